// Transfers by threads that block in pread and pwrite, for systems without io_uring.
#pragma once

#include <vector>

#include <unistd.h>

#include "ops/row_file/engine.h"

namespace meseta::row_file {

class ThreadEngine : public Engine {
 public:
  ThreadEngine(int depth, double max_reads_per_s) : Engine(depth, max_reads_per_s) {
    try {
      for (int i = 0; i < depth; ++i) threads_.push_back(signal_free_thread([this] { run(); }));
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ThreadEngine() override { stop(); }

 protected:
  void wake() override { work_.notify_all(); }

 private:
  void stop() {
    stop_cleaner();
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
      work_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  void run() {
    std::unique_lock lock(mutex_);
    Request request;
    Clock::time_point when;
    while (!ended_) {
      if (next(lock, request, when)) {
        lock.unlock();
        transfer(request);
        lock.lock();
      } else if (when == Clock::time_point::max()) {
        work_.wait(lock);
      } else {
        work_.wait_until(lock, when);
      }
    }
  }

  void transfer(Request& request) {
    Failure failure;
    request.begun = Clock::now();
    int64_t result;
    do {
      uint8_t* memory = request.buffer + request.done;
      const size_t bytes = request.bytes - request.done;
      const off_t place = static_cast<off_t>(request.place + request.done);
      const int file = request.client->descriptor();
      result = request.kind == Request::Kind::write ? pwrite(file, memory, bytes, place)
                                                    : pread(file, memory, bytes, place);
      if (result < 0) result = -errno;
    } while (should_continue(request, result, failure));
    end(request, failure, Clock::now());
  }

  std::condition_variable work_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace meseta::row_file
