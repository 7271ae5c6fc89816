// Queues of an engine: the order of transfers, and the handling of completed ones. Derived classes execute transfers, see
// ring.h and threads.h.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <deque>
#include <new>
#include <thread>

#include <pthread.h>
#include <signal.h>

#include "ops/row_file/layout.h"
#include "ops/row_file/requests.h"

namespace meseta::row_file {

constexpr int64_t kPieceRows = 1024;    // Number of rows that are planned at a time.
constexpr int kLargeBuffers = 12;       // Maximum number of concurrent requests for adjacent rows.
constexpr int kMaxWritesWhenIdle = 8;         // Maximum number of concurrent writes while no read waits.
constexpr int kMaxWritesUnderReads = 3;        // Otherwise. More writes would only delay reads.
constexpr int kReadsPerScan = 8;            // While both wait, one in this many reads belongs to a scan.
constexpr double kBurstSeconds = 1e-3;  // Length of a burst of reads under a rate limit.
constexpr size_t kSectorBytes = 512;

struct FreeMemory {
  void operator()(uint8_t* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<uint8_t, FreeMemory>;

inline Buffer make_buffer(size_t bytes) {
  void* memory = std::aligned_alloc(kPageBytes, (bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  if (memory == nullptr) throw std::bad_alloc();
  return Buffer(static_cast<uint8_t*>(memory));
}

// Start a thread with all signals blocked, because the interpreter's thread handles them.
template <typename Body>
std::thread signal_free_thread(Body&& body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::forward<Body>(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

// Histogram of durations, with eight bins for each power of two of nanoseconds.
struct LatencyHistogram {
  static constexpr int kSteps = 8;
  std::array<int64_t, 40 * kSteps> counts{};

  void add(int64_t nanoseconds) {
    const uint64_t value = nanoseconds < kSteps ? kSteps : uint64_t(nanoseconds);
    const int power = std::bit_width(value) - 1;
    const size_t at = size_t(power - 3) * kSteps + (value >> (power - 3)) - kSteps;
    ++counts[std::min(at, counts.size() - 1)];
  }
};

class Engine {
 public:
  Engine(int depth, double max_reads_per_s) : depth_(depth), rate_(max_reads_per_s), refilled_(Clock::now()) {
    small_ = make_buffer(size_t(depth) * kSmallBytes);
    large_ = make_buffer(kLargeBuffers * kLargeBytes);
    for (int i = 0; i < depth; ++i) free_small_.push_back(small_.get() + i * kSmallBytes);
    for (int i = 0; i < kLargeBuffers; ++i) free_large_.push_back(large_.get() + i * kLargeBytes);
  }
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void submit(ReadTicket& ticket) {
    const int64_t pieces = (ticket.count + kPieceRows - 1) / kPieceRows;
    ticket.open = std::max<int64_t>(pieces, 1);
    if (pieces == 0) return ticket.finish_one();
    const std::lock_guard lock(mutex_);
    reads_.tickets.push_back(&ticket);
    wake();
  }

  // Submit reads with low priority.
  void submit_scan(const std::vector<Request>& requests) {
    const std::lock_guard lock(mutex_);
    scans_.requests.insert(scans_.requests.end(), requests.begin(), requests.end());
    wake();
  }

  // Called with the client's lock held.
  void submit_write(const Request& request) {
    const std::lock_guard lock(mutex_);
    writes_.push_back(request);
    wake();
  }

  // Request cleaning in the background. Called with the client's lock held.
  void request_cleaning(EngineClient& client) {
    const std::lock_guard lock(mutex_);
    if (client_cleaned_ == &client) clean_again_ = true;
    if (stopping_ || client_cleaned_ == &client) return;
    if (std::find(cleaning_queue_.begin(), cleaning_queue_.end(), &client) != cleaning_queue_.end()) return;
    cleaning_queue_.push_back(&client);
    if (!cleaner_.joinable()) cleaner_ = signal_free_thread([this] { clean(); });
    cleaning_.notify_all();
  }

  // Unregister a client. The cleaner does not use it afterwards.
  void leave(EngineClient& client) {
    std::unique_lock lock(mutex_);
    cleaning_.wait(lock, [&] { return client_cleaned_ != &client; });
    std::erase(cleaning_queue_, &client);
  }

  LatencyHistogram latencies() {
    const std::lock_guard lock(mutex_);
    return latencies_;
  }

  int64_t num_bytes() {
    const std::lock_guard lock(mutex_);
    return int64_t(size_t(depth_) * kSmallBytes + kLargeBuffers * kLargeBytes + cleaner_bytes_);
  }

  void limit(double max_reads_per_s) {
    const std::lock_guard lock(mutex_);
    rate_ = max_reads_per_s;
    tokens_ = 0;
    refilled_ = Clock::now();
    wake();
  }

 protected:
  // Notify the threads that execute transfers. Called with the lock held.
  virtual void wake() = 0;

  // Take the next transfer, if there is one, with its buffer. Called with `lock` held, which is released while rows are
  // located. Otherwise `when` is set to the time at which to try again, if there is one.
  bool next(std::unique_lock<std::mutex>& lock, Request& request, Clock::time_point& when) {
    when = Clock::time_point::max();
    for (;;) {
      const bool reads_wait = !reads_.requests.empty() || !reads_.tickets.empty();
      if (!writes_.empty() && writing_ < (reads_wait ? kMaxWritesUnderReads : kMaxWritesWhenIdle)) {
        request = writes_.front();
        writes_.pop_front();
        ++writing_;
        return true;
      }
      const bool scans_turn = turn_ % kReadsPerScan == kReadsPerScan - 1;
      Queue* queues[] = {scans_turn ? &scans_ : &reads_, scans_turn ? &reads_ : &scans_};
      bool planned = false;
      for (Queue* queue : queues) {
        if (queue->requests.empty() && plan(lock, *queue)) {
          planned = true;
          break;
        }
        if (queue->requests.empty()) continue;
        if (take(*queue, request, when)) return true;
      }
      if (!planned) return false;
    }
  }

  // Process the result of the system: bytes, or a negative error. Returns whether to submit the transfer again.
  bool should_continue(Request& request, int64_t result, Failure& failure) {
    if (result == -EINTR || result == -EAGAIN) return true;
    failure = Failure{};
    failure.place = int64_t(request.place);
    failure.writing = request.kind == Request::Kind::write;
    if (result < 0) {
      failure.kind = Failure::kSystem;
      failure.code = -result;
      return false;
    }
    request.done += size_t(result);
    if (request.done >= request.bytes) return false;
    if (result > 0 && size_t(result) % kSectorBytes == 0) return true;
    failure.kind = Failure::kShort;
    return false;
  }

  void end(Request& request, const Failure& failure, Clock::time_point now) {
    EngineClient& client = *request.client;
    if (request.kind == Request::Kind::write) {
      {
        const std::lock_guard lock(mutex_);
        --writing_;
        wake();
      }
      client.end_write(request, failure);
      return;
    }
    ReadTicket& ticket = *request.ticket;
    client.end_read(request, failure);
    {
      const std::lock_guard lock(mutex_);
      (request.small ? free_small_ : free_large_).push_back(request.buffer);
      latencies_.add(std::chrono::duration_cast<std::chrono::nanoseconds>(now - request.begun).count());
      if (!request.small) wake();
    }
    ticket.finish_one();  // Must be last, because the waiting thread may then destroy everything.
  }

  // Derived classes must stop their own threads first.
  void stop_cleaner() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      cleaning_.notify_all();
    }
    if (cleaner_.joinable()) cleaner_.join();
  }

  std::mutex mutex_;
  const int depth_;
  Buffer small_, large_;

 private:
  struct Queue {
    std::deque<ReadTicket*> tickets;
    std::deque<Request> requests;
  };

  // Plan the reads of another piece of the first ticket. Returns whether there was a piece.
  bool plan(std::unique_lock<std::mutex>& lock, Queue& queue) {
    if (queue.tickets.empty()) return false;
    ReadTicket& ticket = *queue.tickets.front();
    const int64_t begin = ticket.claimed;
    const int64_t end = ticket.claimed = std::min(begin + kPieceRows, ticket.count);
    if (end == ticket.count) queue.tickets.pop_front();
    lock.unlock();
    std::vector<Request> requests;
    ticket.client->plan(ticket, begin, end, requests);
    ticket.open += int64_t(requests.size());
    lock.lock();
    for (const Request& request : requests) queue.requests.push_back(request);
    if (requests.size() > 1) wake();
    lock.unlock();
    ticket.finish_one();  // For the piece itself.
    lock.lock();
    return true;
  }

  bool take(Queue& queue, Request& request, Clock::time_point& when) {
    std::vector<uint8_t*>& buffers = queue.requests.front().small ? free_small_ : free_large_;
    if (buffers.empty() || !allowed(when)) return false;
    request = queue.requests.front();
    queue.requests.pop_front();
    request.buffer = buffers.back();
    buffers.pop_back();
    ++turn_;
    return true;
  }

  // Token bucket with one token per read and `rate_` tokens per second.
  bool allowed(Clock::time_point& when) {
    if (rate_ <= 0) return true;
    const auto now = Clock::now();
    const double most = std::max(1.0, rate_ * kBurstSeconds);
    tokens_ = std::min(most, tokens_ + rate_ * std::chrono::duration<double>(now - refilled_).count());
    refilled_ = now;
    if (tokens_ >= 1) {
      tokens_ -= 1;
      return true;
    }
    when = now + std::chrono::nanoseconds(int64_t((1 - tokens_) / rate_ * 1e9) + 1);
    return false;
  }

  void clean() {
    Buffer buffer;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (cleaning_queue_.empty()) {
        cleaning_.wait(lock);
        continue;
      }
      EngineClient* client = client_cleaned_ = cleaning_queue_.front();
      cleaning_queue_.pop_front();
      lock.unlock();
      const size_t bytes = client->segment_bytes();
      if (bytes > cleaner_bytes_) buffer = make_buffer(bytes);
      const bool more = client->clean(buffer.get());
      lock.lock();
      cleaner_bytes_ = std::max(bytes, cleaner_bytes_);
      client_cleaned_ = nullptr;
      if (more || clean_again_) cleaning_queue_.push_back(client);
      clean_again_ = false;
      cleaning_.notify_all();
    }
  }

  double rate_;  // Reads per second. 0 means no limit.
  double tokens_ = 0;
  Clock::time_point refilled_;
  uint64_t turn_ = 0;
  int writing_ = 0;
  bool stopping_ = false;
  std::vector<uint8_t*> free_small_, free_large_;
  Queue reads_, scans_;
  std::deque<Request> writes_;
  LatencyHistogram latencies_;
  std::thread cleaner_;
  size_t cleaner_bytes_ = 0;
  std::condition_variable cleaning_;
  std::deque<EngineClient*> cleaning_queue_;
  EngineClient* client_cleaned_ = nullptr;
  bool clean_again_ = false;  // Whether it requested cleaning again meanwhile.
};

}  // namespace meseta::row_file
