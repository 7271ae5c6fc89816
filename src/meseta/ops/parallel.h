// Threads of the compiled core: OpenMP's, which torch shares, and no other use of OpenMP anywhere.
//
// MESETA_GOMP: on Linux the threads are asked of GNU's runtime by the call that gcc makes of the pragma, and no library
// is linked for it, since torch brings one (meseta.ops.core). What clang makes of the pragma needs LLVM's runtime, and
// two of them in a process, whose idle threads spin while the other ones work, make a step take twice as long.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#if defined(MESETA_GOMP)
extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}
#endif

namespace meseta {

// body(thread) on `num_threads` threads. An exception of any thread is rethrown on the caller's.
template <typename Body>
void parallel(int num_threads, Body&& body) {
  if (num_threads <= 1) {
    body(0);
    return;
  }
  std::exception_ptr failed;
  std::mutex failing;
  const auto guarded = [&](int thread) {
    try {
      body(thread);
    } catch (...) {
      const std::lock_guard<std::mutex> locked(failing);
      if (!failed) failed = std::current_exception();
    }
  };
#if defined(MESETA_GOMP)
  auto share = [&] {  // the runtime may give fewer threads than it was asked for
    for (int thread = omp_get_thread_num(); thread < num_threads; thread += omp_get_num_threads()) guarded(thread);
  };
  GOMP_parallel([](void* data) { (*static_cast<decltype(share)*>(data))(); }, &share, unsigned(num_threads), 0);
#else
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int thread = 0; thread < num_threads; ++thread) guarded(thread);
#endif
  if (failed) std::rethrow_exception(failed);
}

// body(task) for every task in 0..num_tasks-1, each on whichever thread is free: the result must not depend on it.
template <typename Body>
void parallel_tasks(int num_threads, int64_t num_tasks, Body&& body) {
  std::atomic<int64_t> next{0};
  parallel(num_tasks < num_threads ? int(num_tasks) : num_threads, [&](int) {
    for (int64_t task = next.fetch_add(1); task < num_tasks; task = next.fetch_add(1)) body(task);
  });
}

}  // namespace meseta
