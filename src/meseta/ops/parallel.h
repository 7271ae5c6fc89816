// Threads of the compiled core: OpenMP's, which torch shares, and no other use of OpenMP anywhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

namespace meseta {

// body(thread) on `num_threads` threads. An exception of any thread is rethrown on the caller's.
template <typename Body>
void parallel(int num_threads, Body&& body) {
  if (num_threads <= 1) {
    body(0);
    return;
  }
  std::exception_ptr failed;
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int thread = 0; thread < num_threads; ++thread) {
    try {
      body(thread);
    } catch (...) {
#pragma omp critical(meseta_parallel)
      if (!failed) failed = std::current_exception();
    }
  }
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
