// What files of rows ask of an engine, and what an engine asks of them.
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

constexpr size_t kSmallBytes = 8 << 10;    // the most that is read for rows that lie apart
constexpr size_t kLargeBytes = 256 << 10;  // for rows that lie together

struct Failure {
  enum Kind : int64_t { kNone, kSystem, kShort, kChecksum, kClosed };
  int64_t kind = kNone;
  int64_t code = 0;    // of the system, with kSystem
  int64_t row = -1;    // whose checksum is wrong
  int64_t place = -1;  // in the file, bytes
  int64_t writing = 0;
  explicit operator bool() const { return kind != kNone; }
};

class EngineClient;
class RowLogSnapshot;
struct PinSegment;

// Rows that are asked for at once. Whoever waits for it keeps its arrays.
struct ReadTicket {
  EngineClient* client = nullptr;
  std::shared_ptr<RowLogSnapshot> frozen;  // whose rows are read in order; or none: rows as they are
  const int64_t* rows = nullptr;   // [count]; null: first, first + 1, ...
  int64_t first = 0;
  int64_t count = 0;
  std::vector<Field> fields;   // where records go, [count] each
  bool* present = nullptr;     // [count]
  std::vector<uint64_t> parts;  // [count] slot and position, sorted by slot within pieces of the ticket
  int64_t claimed = 0;          // rows that are planned or are being planned
  std::atomic<int64_t> open{0};  // pieces that are not planned, and requests that have not ended

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

// One transfer.
struct Request {
  enum class Kind : uint8_t { read, scan, write };
  Kind kind = Kind::read;
  bool small = true;  // which buffer it needs
  EngineClient* client = nullptr;
  ReadTicket* ticket = nullptr;  // of a read
  PinSegment* segment = nullptr;
  const uint64_t* first = nullptr;  // of the ticket's parts that it reads
  const uint64_t* last = nullptr;
  uint64_t place = 0;  // in the file, bytes
  size_t bytes = 0;
  size_t done = 0;  // bytes, where the system transfers in parts
  uint8_t* buffer = nullptr;
  Clock::time_point begun;
};

// A file of rows, as an engine sees it. The engine calls it with no lock held.
class EngineClient {
 public:
  virtual ~EngineClient() = default;
  virtual int descriptor() const = 0;
  // Serves what lies in memory of a ticket's rows begin..end-1, and says what is to be read for the rest.
  virtual void plan(ReadTicket& ticket, int64_t begin, int64_t end, std::vector<Request>& requests) = 0;
  virtual void end_read(const Request& request, const Failure& failure) = 0;
  virtual void end_write(const Request& request, const Failure& failure) = 0;
  // Makes room in the file by one segment; whether there is more to do.
  virtual bool clean(uint8_t* buffer) = 0;
  virtual size_t segment_bytes() const = 0;
};

}  // namespace meseta::row_file
