/* Latency of @prefix@_step on this machine, hot and then paced: bench [calls] [rate_hz] [paced_calls]. POSIX clocks.
   Built with -D@PREFIX@_COUNT_ALLOCATIONS and -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=aligned_alloc,
   --wrap=posix_memalign it counts allocations. */
#define _POSIX_C_SOURCE 200809L
#include "@prefix@.h"
#include "@prefix@_golden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef @PREFIX@_COUNT_ALLOCATIONS
static unsigned long allocations = 0;
static unsigned long counted = 0; /* in the last hot loop */
void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void *__real_aligned_alloc(size_t align, size_t size);
int __real_posix_memalign(void **to, size_t align, size_t size);
void *__wrap_aligned_alloc(size_t align, size_t size);
int __wrap_posix_memalign(void **to, size_t align, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);
void *__wrap_malloc(const size_t size) { ++allocations; return __real_malloc(size); }
void *__wrap_calloc(const size_t count, const size_t size) { ++allocations; return __real_calloc(count, size); }
void *__wrap_realloc(void *const old, const size_t size) { ++allocations; return __real_realloc(old, size); }
void *__wrap_aligned_alloc(const size_t align, const size_t size)
{
    ++allocations;
    return __real_aligned_alloc(align, size);
}
int __wrap_posix_memalign(void **const to, const size_t align, const size_t size)
{
    ++allocations;
    return __real_posix_memalign(to, align, size);
}
#endif

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int ascending(const void *const a, const void *const b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *const what, double *const us, const size_t n)
{
    qsort(us, n, sizeof us[0], ascending);
    printf("%s: %zu calls, p50 %.3f us, p99 %.3f us, p99.9 %.3f us, max %.3f us\n", what, n, us[n / 2],
           us[(n * 99) / 100], us[(n * 999) / 1000], us[n - 1]);
}

static void wait_until(const double t_us)
{
    while (now_us() < t_us) {
        struct timespec pause = {0, 20000};
        if (t_us - now_us() > 200.0) { nanosleep(&pause, NULL); }
    }
}

static int threads(void) /* of this process, where Linux tells; 0 elsewhere */
{
    char line[256];
    int found = 0;
    FILE *const file = fopen("/proc/self/status", "r");
    if (file == NULL) { return 0; }
    while (found == 0 && fgets(line, (int)sizeof line, file) != NULL) {
        if (strncmp(line, "Threads:", 8) == 0) { found = (int)strtol(line + 8, NULL, 10); }
    }
    fclose(file);
    return found;
}

static @prefix@_state st_;
static @prefix@_state *const st = &st_;
static @prefix@_obs obs;
static @prefix@_command command;

static void hot(const char *const what, double *const us, const size_t n)
{
#ifdef @PREFIX@_COUNT_ALLOCATIONS
    allocations = 0;
#endif
    for (size_t i = 0; i < n; ++i) {
        const double start = now_us();
        (void)@prefix@_step(st, &obs, &command);
        us[i] = now_us() - start;
    }
#ifdef @PREFIX@_COUNT_ALLOCATIONS
    counted = allocations;
#endif
    report(what, us, n);
}

static void paced(double *const us, double *const late, const size_t n, const double rate_hz)
{
    const double period = 1e6 / rate_hz;
    const double begin = now_us() + period;
    double last = begin;
    size_t overruns = 0;
    for (size_t i = 0; i < n; ++i) {
        const double due = begin + (double)i * period; /* absolute: a late step does not move the next one */
        wait_until(due);
        last = now_us();
        (void)@prefix@_step(st, &obs, &command);
        us[i] = now_us() - last;
        late[i] = last - due;
        if (last + us[i] > due + period) { ++overruns; }
    }
    report("paced", us, n);
    report("late", late, n);
    printf("overruns: %zu\nperiod bias: %.3f us\n", overruns,
           n > 1 ? (last - begin) / (double)(n - 1) - period : 0.0);
}

int main(const int argc, char **const argv)
{
    const size_t n = argc > 1 ? (size_t)strtoul(argv[1], NULL, 10) : 20000u;
    const double rate_hz = argc > 2 ? strtod(argv[2], NULL) : 0.0;
    const size_t m = argc > 3 ? (size_t)strtoul(argv[3], NULL, 10) : (n < 2000u ? n : 2000u);
    const size_t most = n > m ? n : m;
    const int row = 0;
    double *const us = malloc((most + 1) * sizeof us[0]);
    double *const late = malloc((most + 1) * sizeof late[0]);
    const int before = threads();
    if (us == NULL || late == NULL || n == 0) { return 1; }
    @prefix@_init(st);
@load@
    hot("hot", us, n); /* the first steps among them */
#ifdef @PREFIX@_COUNT_ALLOCATIONS
    printf("allocations: %lu\n", counted);
#endif
    printf("threads: %d then %d\n", before, threads());
    if (rate_hz > 0.0 && m > 0) { paced(us, late, m, rate_hz); }
@fill@
    hot("subnormal", us, n / 10u + 1u);
    free(us);
    free(late);
    return 0;
}
