// Interface between row files and engines.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/row_file/fields.h"

namespace meseta::row_file {

using Clock = std::chrono::steady_clock;

constexpr size_t kSmallBytes = 8 << 10;    // Maximum size of a request for isolated rows.
constexpr size_t kLargeBytes = 256 << 10;  // Maximum size of a request for adjacent rows.

struct Failure {
  enum Kind : int64_t { kNone, kSystem, kShort, kChecksum, kClosed };
  int64_t kind = kNone;
  int64_t code = 0;    // Error of the system, for kSystem.
  int64_t row = -1;    // Row with a wrong checksum.
  int64_t place = -1;  // Byte offset in the file.
  int64_t writing = 0;
  explicit operator bool() const { return kind != kNone; }
};

class EngineClient;
class RowLogSnapshot;
struct PinSegment;

// Rows that are requested together. Whoever waits for a ticket keeps its arrays alive.
struct ReadTicket {
  EngineClient* client = nullptr;
  std::shared_ptr<RowLogSnapshot> frozen;  // Snapshot whose rows are read in order, or null for the current rows.
  const int64_t* rows = nullptr;   // [count]. Null means first, first + 1, ...
  int64_t first = 0;
  int64_t count = 0;
  std::vector<Field> fields;   // Destinations of the records, [count] each.
  bool* present = nullptr;     // [count].
  std::vector<uint64_t> parts;  // [count] slot and position, sorted by slot within pieces of the ticket.
  int64_t claimed = 0;          // Number of rows whose planning has started.
  std::atomic<int64_t> open{0};  // Number of unplanned pieces and incomplete requests.

  int64_t row(int64_t position) const { return rows == nullptr ? first + position : rows[position]; }

  void fail(const Failure& failure) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = failure;
  }

  void finish_one() {
    if (open.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }

  bool done() {
    const std::lock_guard lock(mutex_);
    return done_;
  }

  Failure wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    return failure_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Failure failure_;
};

// A transfer.
struct Request {
  enum class Kind : uint8_t { read, scan, write };
  Kind kind = Kind::read;
  bool small = true;  // Kind of buffer that it needs.
  EngineClient* client = nullptr;
  ReadTicket* ticket = nullptr;  // Ticket of a read.
  PinSegment* segment = nullptr;
  const uint64_t* first = nullptr;  // First part of the ticket that it reads.
  const uint64_t* last = nullptr;
  uint64_t place = 0;  // Byte offset in the file.
  size_t bytes = 0;
  size_t done = 0;  // Bytes that are complete, if the system transfers in parts.
  uint8_t* buffer = nullptr;
  Clock::time_point begun;
};

// A row file from the engine's view. The engine calls it without holding locks.
class EngineClient {
 public:
  virtual ~EngineClient() = default;
  virtual int descriptor() const = 0;
  // Copy rows begin..end-1 of a ticket that are in memory, and list requests for the others.
  virtual void plan(ReadTicket& ticket, int64_t begin, int64_t end, std::vector<Request>& requests) = 0;
  virtual void end_read(const Request& request, const Failure& failure) = 0;
  virtual void end_write(const Request& request, const Failure& failure) = 0;
  // Free one segment of the file. Returns whether there is more to do.
  virtual bool clean(uint8_t* buffer) = 0;
  virtual size_t segment_bytes() const = 0;
};

}  // namespace meseta::row_file
