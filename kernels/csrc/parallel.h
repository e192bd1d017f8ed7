// A small thread pool of our own: linking OpenMP would bring a second libgomp beside torch's, and two pools that spin.
#pragma once
#include <cstdint>

namespace grl {

using Task = void (*)(const void* context, int64_t index);

// Runs task(context, 0..count-1) on the caller and up to threads-1 workers, and returns when all are done.
// Serial when threads <= 1, when count <= 1, and when another thread is using the pool. Safe after fork().
void parallel_for(int64_t count, int64_t threads, Task task, const void* context);

}  // namespace grl
