// Transfers by io_uring. One thread submits requests and handles completions. System calls are made directly, without
// liburing, so that every build of the core has them. Whether the system allows them is known when a ring is created.
#pragma once

#include "ops/row_file/engine.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(IORING_ENTER_EXT_ARG) && defined(__NR_io_uring_setup)
#define MESETA_IO_URING
#endif
#endif

#if defined(MESETA_IO_URING)

#include <future>
#include <system_error>

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

namespace meseta::row_file {

// Queues that are shared with the kernel. Used by one thread.
class Ring {
 public:
  // Throws std::system_error if the system has no io_uring, or forbids it.
  explicit Ring(unsigned entries) {
    io_uring_params params{};
    // First try flags of newer kernels for rings that a single thread uses.
    constexpr unsigned kSingleIssuer = 1u << 12, kDeferTaskrun = 1u << 13;
    params.flags = kSingleIssuer | kDeferTaskrun;
    descriptor_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
    if (descriptor_ < 0 && errno == EINVAL) {
      params = io_uring_params{};
      descriptor_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
    }
    if (descriptor_ < 0) throw std::system_error(errno, std::generic_category());
    const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_EXT_ARG | IORING_FEAT_NODROP;
    if ((params.features & needed) != needed) {
      close(descriptor_);
      throw std::system_error(ENOSYS, std::generic_category());
    }
    rings_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                            params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    rings_ = map(rings_bytes_, IORING_OFF_SQ_RING);
    entries_ = static_cast<io_uring_sqe*>(static_cast<void*>(map(entries_bytes_, IORING_OFF_SQES)));
    if (rings_ == nullptr || entries_ == nullptr) {
      const int error = errno;
      unmap();
      throw std::system_error(error, std::generic_category());
    }
    asked_tail_ = word(params.sq_off.tail);
    asked_mask_ = *word(params.sq_off.ring_mask);
    sq_array_ = word(params.sq_off.array);
    cq_head_ = word(params.cq_off.head);
    cq_tail_ = word(params.cq_off.tail);
    cq_mask_ = *word(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
  }
  ~Ring() { unmap(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Register buffers, so that the kernel need not map them for each transfer. Returns whether it accepts them.
  bool register_memory(const iovec* memory, unsigned count) {
    return syscall(__NR_io_uring_register, descriptor_, IORING_REGISTER_BUFFERS, memory, count) == 0;
  }

  // The queue has space for as many requests as the ring was created for.
  void ask(uint8_t operation, int file, void* memory, size_t bytes, uint64_t place, uint16_t registered, uint64_t tag) {
    const uint32_t tail = *asked_tail_, at = tail & asked_mask_;
    io_uring_sqe& entry = entries_[at];
    entry = io_uring_sqe{};
    entry.opcode = operation;
    entry.fd = file;
    entry.off = place;
    entry.addr = reinterpret_cast<uint64_t>(memory);
    entry.len = static_cast<uint32_t>(bytes);
    entry.buf_index = registered;
    entry.user_data = tag;
    sq_array_[at] = at;
    std::atomic_ref(*asked_tail_).store(tail + 1, std::memory_order_release);
    ++num_unsubmitted_;
  }

  // Submit requests, and wait for `wanted` completions until `when`, or forever.
  void enter(unsigned wanted, Clock::time_point when) {
    io_uring_getevents_arg more{};
    struct {
      int64_t seconds, nanoseconds;
    } limit{};
    if (when != Clock::time_point::max()) {
      const auto rest = std::chrono::duration_cast<std::chrono::nanoseconds>(when - Clock::now()).count();
      limit.nanoseconds = std::max<int64_t>(rest, 1000);
      limit.seconds = limit.nanoseconds / 1'000'000'000;
      limit.nanoseconds %= 1'000'000'000;
      more.ts = reinterpret_cast<uint64_t>(&limit);
    }
    const long sent = syscall(__NR_io_uring_enter, descriptor_, num_unsubmitted_, wanted,
                              IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &more, sizeof(more));
    if (sent > 0) num_unsubmitted_ -= static_cast<unsigned>(sent);
  }

  template <typename Take>
  void answers(Take&& take) {
    uint32_t head = *cq_head_;
    const uint32_t tail = std::atomic_ref(*cq_tail_).load(std::memory_order_acquire);
    for (; head != tail; ++head) {
      const io_uring_cqe answer = cqes_[head & cq_mask_];
      std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
      take(answer.user_data, int64_t(answer.res));
    }
  }

 private:
  uint8_t* map(size_t bytes, uint64_t what) const {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_, off_t(what));
    return memory == MAP_FAILED ? nullptr : static_cast<uint8_t*>(memory);
  }
  void unmap() {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
    close(descriptor_);
  }
  uint32_t* word(uint32_t offset) const { return reinterpret_cast<uint32_t*>(rings_ + offset); }

  int descriptor_ = -1;
  uint8_t* rings_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  size_t rings_bytes_ = 0, entries_bytes_ = 0;
  uint32_t *asked_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t asked_mask_ = 0, cq_mask_ = 0, num_unsubmitted_ = 0;
  io_uring_cqe* cqes_ = nullptr;
};

class RingEngine : public Engine {
 public:
  // Throws std::system_error as Ring does.
  RingEngine(int depth, double max_reads_per_s) : Engine(depth, max_reads_per_s) {
    event_ = eventfd(0, EFD_CLOEXEC);
    if (event_ < 0) throw std::system_error(errno, std::generic_category());
    std::promise<void> made;
    std::future<void> is_made = made.get_future();
    thread_ = signal_free_thread([this, &made] { run(made); });
    try {
      is_made.get();
    } catch (...) {
      thread_.join();
      close(event_);
      throw;
    }
  }
  ~RingEngine() override {
    stop_cleaner();
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
      wake();
    }
    thread_.join();
    close(event_);
  }

 protected:
  void wake() override {
    if (!sleeping_) return;
    sleeping_ = false;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(event_, &one, sizeof(one));
  }

 private:
  static constexpr int kCompletionBatchDivisor = 8;
  static constexpr uint64_t kEvent = ~uint64_t{0};
  static constexpr uint16_t kSmallMemory = 0, kLargeMemory = 1;

  // The thread that uses the ring creates it, as the kernel requires.
  void run(std::promise<void>& made) {
    const unsigned most = unsigned(depth_ + kLargeBuffers + kMaxWritesWhenIdle);
    std::unique_ptr<Ring> ring;
    try {
      ring = std::make_unique<Ring>(std::bit_ceil(most + 1));
    } catch (...) {
      return made.set_exception(std::current_exception());
    }
    const iovec memory[] = {{small_.get(), size_t(depth_) * kSmallBytes}, {large_.get(), kLargeBuffers * kLargeBytes}};
    registered_ = ring->register_memory(memory, 2);
    made.set_value();
    serve(*ring, most);
  }

  void serve(Ring& ring, unsigned most) {
    std::vector<Request> requests(most);
    std::vector<unsigned> unused;
    for (unsigned i = 0; i < most; ++i) unused.push_back(i);
    bool listening = false;
    std::unique_lock lock(mutex_, std::defer_lock);
    for (;;) {
      Clock::time_point when = Clock::time_point::max();
      const Clock::time_point now = Clock::now();
      if (!listening) ring.ask(IORING_OP_READ, event_, &events_, sizeof(events_), 0, 0, kEvent);
      listening = true;
      lock.lock();
      while (!unused.empty() && next(lock, requests[unused.back()], when)) {
        requests[unused.back()].begun = now;
        ask(ring, requests[unused.back()], unused.back());
        unused.pop_back();
      }
      const bool idle = unused.size() == most;
      if (ended_ && idle) return;
      sleeping_ = !ended_;
      lock.unlock();
      // While more reads wait than may be in flight, handle completions in batches.
      ring.enter(unused.size() <= kLargeBuffers + kMaxWritesWhenIdle ? std::max(1, depth_ / kCompletionBatchDivisor) : 1, when);
      lock.lock();
      sleeping_ = false;
      lock.unlock();
      const Clock::time_point then = Clock::now();
      ring.answers([&](uint64_t tag, int64_t result) {
        if (tag == kEvent) {
          listening = false;
          return;
        }
        Request& request = requests[tag];
        Failure failure;
        if (should_continue(request, result, failure)) return ask(ring, request, unsigned(tag));
        end(request, failure, then);
        unused.push_back(unsigned(tag));
      });
    }
  }

  void ask(Ring& ring, const Request& request, unsigned tag) {
    const int file = request.client->descriptor();
    uint8_t* memory = request.buffer + request.done;
    const size_t bytes = request.bytes - request.done;
    const uint64_t place = request.place + request.done;
    if (request.kind == Request::Kind::write)
      ring.ask(IORING_OP_WRITE, file, memory, bytes, place, 0, tag);
    else
      ring.ask(registered_ ? IORING_OP_READ_FIXED : IORING_OP_READ, file, memory, bytes, place,
               request.small ? kSmallMemory : kLargeMemory, tag);
  }

  int event_ = -1;
  uint64_t events_ = 0;
  bool registered_ = false;
  bool sleeping_ = false;  // Whether the thread waits for completions only.
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace meseta::row_file

#endif
