#include "parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace grl {
namespace {

constexpr int64_t kMaxThreads = 64;

struct Pool {
    std::mutex owner;  // held by the caller whose tasks are running
    std::mutex mutex;
    std::condition_variable wake, finished;
    int64_t workers = 0;     // started so far
    int64_t wanted = 0;      // workers the current job may still take
    int64_t running = 0;     // workers inside the current job
    int64_t generation = 0;  // number of the current job
    Task task = nullptr;
    const void* context = nullptr;
    int64_t count = 0;
    std::atomic<int64_t> next{0};

    void drain() {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(context, i);
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex);
        for (int64_t seen = 0;;) {
            wake.wait(lock, [&] { return generation != seen && wanted > 0; });
            seen = generation;
            --wanted;
            ++running;
            lock.unlock();
            drain();
            lock.lock();
            if (--running == 0) finished.notify_one();
        }
    }

    void run(int64_t helpers, int64_t n, Task t, const void* c) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            try {
                for (; workers < helpers; ++workers) std::thread([this] { work(); }).detach();
            } catch (const std::system_error&) {  // no more threads to be had: go on with those there are
            }
            task = t, context = c, count = n, wanted = helpers;
            next.store(0, std::memory_order_relaxed);
            ++generation;
        }
        wake.notify_all();
        drain();
        std::unique_lock<std::mutex> lock(mutex);
        wanted = 0;  // a worker that has not woken yet finds nothing to do
        finished.wait(lock, [&] { return running == 0; });
    }
};

// Never freed: workers are detached and may outlive static destructors. A forked child has no workers, so it starts
// a pool of its own and leaves the parent's, whose locks may be held, alone.
std::atomic<Pool*> g_pool{nullptr};

Pool& pool() {
    static const bool once = [] {
        g_pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { g_pool = new Pool; });
        return true;
    }();
    (void)once;
    return *g_pool.load(std::memory_order_acquire);
}

}  // namespace

void parallel_for(int64_t count, int64_t threads, Task task, const void* context) {
    const int64_t helpers = std::min({threads, count, kMaxThreads}) - 1;
    if (helpers >= 1) {
        Pool& p = pool();
        std::unique_lock<std::mutex> owner(p.owner, std::try_to_lock);
        if (owner) return p.run(helpers, count, task, context);
    }
    for (int64_t i = 0; i < count; ++i) task(context, i);
}

}  // namespace grl
