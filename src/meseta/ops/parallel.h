// Threads of the compiled core. They are OpenMP's, which torch shares. OpenMP is used nowhere else.
//
// With MESETA_GOMP, on Linux, threads are requested from GNU's runtime by the call that gcc generates for the pragma. No
// library is linked for it, because torch contains one (meseta.ops.core). Code that clang generates for the pragma needs
// LLVM's runtime. With two runtimes in a process, idle threads of one spin while the other one works, and a step takes
// twice as long.
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

// Run body(thread) on `num_threads` threads. An exception of any thread is rethrown in the caller's thread.
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
  auto share = [&] {  // The runtime may provide fewer threads than requested.
    for (int thread = omp_get_thread_num(); thread < num_threads; thread += omp_get_num_threads()) guarded(thread);
  };
  GOMP_parallel([](void* data) { (*static_cast<decltype(share)*>(data))(); }, &share, unsigned(num_threads), 0);
#else
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int thread = 0; thread < num_threads; ++thread) guarded(thread);
#endif
  if (failed) std::rethrow_exception(failed);
}

// Run body(task) for each task in 0..num_tasks-1, each on any free thread. The result must not depend on the thread.
template <typename Body>
void parallel_tasks(int num_threads, int64_t num_tasks, Body&& body) {
  std::atomic<int64_t> next{0};
  parallel(num_tasks < num_threads ? int(num_tasks) : num_threads, [&](int) {
    for (int64_t task = next.fetch_add(1); task < num_tasks; task = next.fetch_add(1)) body(task);
  });
}

}  // namespace meseta
