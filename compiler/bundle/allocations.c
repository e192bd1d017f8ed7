/* Counts a process's calls for memory, in all its threads. Preloaded, it stands before glibc's functions of these names:
   cc -O2 -shared -fPIC allocations.c -o allocations.so; LD_PRELOAD=./allocations.so program */
#include <errno.h>
#include <stddef.h>

static unsigned long calls = 0;

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

unsigned long graphrl_allocations(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }

static void count(void) { (void)__atomic_fetch_add(&calls, 1ul, __ATOMIC_RELAXED); }

void *malloc(size_t size)
{
    count();
    return __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    count();
    return __libc_calloc(n, size);
}

void *realloc(void *old, size_t size)
{
    count();
    return __libc_realloc(old, size);
}

void *memalign(size_t alignment, size_t size)
{
    count();
    return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **found, size_t alignment, size_t size)
{
    void *memory;
    if (alignment % sizeof(void *) != 0 || alignment == 0 || (alignment & (alignment - 1)) != 0) { return EINVAL; }
    memory = memalign(alignment, size);
    if (memory == NULL) { return ENOMEM; }
    *found = memory;
    return 0;
}
