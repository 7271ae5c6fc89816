// Native thread that writes a heartbeat to a memory-mapped file.
#include <nanobind/nanobind.h>

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace nb = nanobind;

namespace {

int64_t nanoseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// The mapping belongs to the process and is not unmapped. If the process exits without stopping the thread, the thread
// can still write.
class Heartbeat {
 public:
  Heartbeat(int descriptor, size_t place, double period_s) : period_(period_s) {
    num_bytes_ = place + 2 * sizeof(int64_t);
    memory_ = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory_ == MAP_FAILED) throw std::runtime_error("start_heartbeat: the file cannot be mapped");
    time_ = reinterpret_cast<int64_t*>(static_cast<char*>(memory_) + place);
    write();
    // Block signals, which the interpreter's thread handles.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void end() {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
    munmap(memory_, num_bytes_);
  }

 private:
  void write() {
    std::atomic_ref<int64_t>(time_[1]).store(nanoseconds(CLOCK_PROCESS_CPUTIME_ID), std::memory_order_relaxed);
    std::atomic_ref<int64_t>(time_[0]).store(nanoseconds(CLOCK_MONOTONIC), std::memory_order_release);
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::duration<double>(period_), [this] { return ended_; })) write();
  }

  double period_;
  size_t num_bytes_ = 0;
  void* memory_ = nullptr;
  int64_t* time_ = nullptr;  // [2] monotonic time and CPU time of the process, in nanoseconds.
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::thread thread_;
};

Heartbeat* active_heartbeat = nullptr;  // Of this process. Never destroyed at exit.

void stop_heartbeat() {
  if (active_heartbeat == nullptr) return;
  Heartbeat* ending = active_heartbeat;
  active_heartbeat = nullptr;
  nb::gil_scoped_release release;
  ending->end();
  delete ending;
}

void start_heartbeat(int descriptor, size_t offset, double interval_s) {
  if (offset % sizeof(int64_t) != 0 || !(interval_s > 0) || interval_s > 3600)
    throw std::invalid_argument("start_heartbeat: offset must be a multiple of 8, and interval_s in 0..3600");
  const off_t size = lseek(descriptor, 0, SEEK_END);
  if (size < 0 || static_cast<size_t>(size) < 2 * sizeof(int64_t) ||
      offset > static_cast<size_t>(size) - 2 * sizeof(int64_t))
    throw std::invalid_argument("start_heartbeat: the file is too short for this offset, or is not a regular file");
  stop_heartbeat();
  active_heartbeat = new Heartbeat(descriptor, offset, interval_s);
}

}  // namespace

void bind_heartbeat(nb::module_& m) {
  m.def("start_heartbeat", &start_heartbeat, nb::arg("descriptor"), nb::arg("offset"), nb::arg("interval_s"));
  m.def("stop_heartbeat", &stop_heartbeat);
}
