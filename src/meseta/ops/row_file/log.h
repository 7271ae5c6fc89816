// Log-structured file of rows. Written rows are appended to the segment that is being filled, and whole segments are
// written to disk. Segments with few remaining rows are cleaned: their rows are moved to other segments.
//
// Each part of the rows has its own segments. A scan of all rows in order therefore reads the segments of one part after
// those of another, each of them once and as a whole.
//
// Rosenblum and Ousterhout, The Design and Implementation of a Log-Structured File System, 1992.
#pragma once

#include <cstring>
#include <utility>

#include <unistd.h>

#include "ops/radix.h"
#include "ops/row_file/checksum.h"
#include "ops/row_file/engine.h"
#include "ops/row_file/index.h"
#include "ops/row_file/segments.h"

namespace meseta::row_file {

constexpr int kMaxSealedSegments = 8;               // Segments with a pending write. Filling another one blocks.
constexpr size_t kMaxReadGapBytes = 4 << 10;    // Gaps between requested rows up to this size are read too.
constexpr int64_t kReservedForCleaning = 2;  // Segments.
constexpr size_t kMaxScanGapBytes = 32 << 10;  // As kMaxReadGapBytes, for scans of all rows.
constexpr int64_t kRowsPerLock = 256;     // Rows that are written before the lock is released.
constexpr int64_t kFindsPerLock = 4096;   // Rows that are located before the lock is released.

struct RowLogCounters {
  std::atomic<int64_t> reads{0}, read_bytes{0}, rows_read{0}, rows_from_memory{0}, rows_unwritten{0};
  std::atomic<int64_t> writes{0}, written_bytes{0}, rows_written{0}, rows_cleaned{0}, cleaned_bytes{0};
  std::atomic<int64_t> wait_ns{0}, ticket_bytes{0};
};

class RowLog;

// Snapshot of the rows. Segments that it needs are kept while it exists.
class RowLogSnapshot {
 public:
  RowLogSnapshot(std::shared_ptr<RowLog> log, Index index, uint64_t freeze)
      : log(std::move(log)), index(std::move(index)), freeze(freeze) {}
  ~RowLogSnapshot();
  const std::shared_ptr<RowLog> log;
  Index index;
  const uint64_t freeze;
};

class RowLog : public EngineClient, public std::enable_shared_from_this<RowLog> {
 public:
  // Each `part_rows` consecutive rows have their own segments.
  RowLog(std::shared_ptr<Engine> engine, int file, int64_t rows, const Layout& layout, uint32_t salt,
         int64_t part_rows)
      : engine_(std::move(engine)),
        file_(file),
        layout_(layout),
        salt_(salt),
        num_rows_(rows),
        part_rows_(part_rows),
        index_(rows),
        filling_(size_t(kStreams * std::max<int64_t>(1, (rows + part_rows - 1) / part_rows))),
        segments_(file, layout, int64_t(filling_.size())) {}
  ~RowLog() override { close(); }

  // Wait for transfers. The file descriptor may be closed afterwards. Later requests fail.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      changed_.notify_all();
    }
    engine_->leave(*this);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return num_sealed_ == 0 && reading_ == 0; });
  }

  // Write rows [count] with their values. The last values of a repeated row are used. If the disk fails, rows are kept in
  // memory and the failure is returned. The next write tries again, and returns the failure if it persists.
  Failure write(const int64_t* rows, std::span<const ConstField> fields, int64_t count, int64_t& taken) {
    const std::lock_guard one_by_one(writing_);
    std::unique_lock lock(mutex_);
    taken = 0;
    if (const Failure failure = retry(lock)) return failure;
    for (; taken < count; ++taken) {
      if (const Failure failure = append(lock, rows[taken], fields, size_t(taken), kEvicted)) return failure;
      if (taken % kRowsPerLock == kRowsPerLock - 1) {
        lock.unlock();
        lock.lock();
      }
    }
    counters.rows_written += count;
    return {};
  }

  // Write everything to the disk and wait for it.
  Failure flush() {
    const std::lock_guard one_by_one(writing_);
    std::unique_lock lock(mutex_);
    if (const Failure failure = retry(lock)) return failure;
    for (size_t place = 0; place < filling_.size(); ++place) {
      if (filling_[place] == nullptr) continue;
      changed_.wait(lock, [this] { return num_sealed_ < kMaxSealedSegments || failure_; });
      if (filling_[place] != nullptr && !failure_) seal(place);
    }
    changed_.wait(lock, [this] { return num_sealed_ == 0; });
    return failure_;
  }

  std::shared_ptr<RowLogSnapshot> freeze() {
    const std::lock_guard lock(mutex_);
    return std::make_shared<RowLogSnapshot>(shared_from_this(), index_, segments_.freeze());
  }
  void thaw(RowLogSnapshot& frozen) {
    const std::lock_guard lock(mutex_);
    frozen.index.clear();
    segments_.thaw(frozen.freeze);
    engine_->request_cleaning(*this);
  }

  void submit(ReadTicket& ticket) {
    if (ticket.frozen != nullptr) return scan(ticket);
    engine_->submit(ticket);
  }
  int64_t num_rows() const { return num_rows_; }
  const Layout& layout() const { return layout_; }

  struct Sizes {
    int64_t memory_bytes, file_bytes, rows;
  };
  Sizes sizes() {
    const std::lock_guard lock(mutex_);
    const int64_t filling = std::count_if(filling_.begin(), filling_.end(), [](auto* one) { return one != nullptr; });
    const int64_t buffers =
        (num_sealed_ + int64_t(failed_.size()) + filling + (unused_ != nullptr)) * int64_t(layout_.segment_bytes);
    const int64_t index = index_.num_bytes() + chunks_.load() * kChunkBytes;
    return {int64_t(sizeof(RowLog)) + index + segments_.num_bytes() + buffers + counters.ticket_bytes.load(),
            segments_.file_bytes(), live_};
  }
  RowLogCounters counters;

  int descriptor() const override { return file_; }
  size_t segment_bytes() const override { return layout_.segment_bytes; }

  void plan(ReadTicket& ticket, int64_t begin, int64_t end, std::vector<Request>& requests) override {
    const std::lock_guard lock(mutex_);
    if (closed_) return ticket.fail(closed());
    uint64_t* const first = ticket.parts.data() + begin;
    const size_t count = size_t(find(ticket, begin, end, first) - first);
    uint64_t other[kPieceRows];
    if (sort_by_slot(first, other, count) != first) std::copy_n(other, count, first);
    cut(ticket, first, first + count, requests);
  }

  void end_read(const Request& request, const Failure& failure) override {
    ++counters.reads;
    counters.read_bytes += int64_t(request.done);
    if (failure) {
      request.ticket->fail(failure);
    } else {
      for (const uint64_t* part = request.first; part != request.last; ++part) take(request, *part);
      counters.rows_read += request.last - request.first;
    }
    request.segment->readers.fetch_sub(1, std::memory_order_release);
    if (--reading_ == 0 && closed_) {
      const std::lock_guard lock(mutex_);
      changed_.notify_all();
    }
  }

  void end_write(const Request& request, const Failure& failure) override {
    const std::lock_guard lock(mutex_);
    PinSegment& segment = *request.segment;
    --num_sealed_;
    ++counters.writes;
    counters.written_bytes += int64_t(request.done);
    if (failure) {
      failed_.push_back(&segment);
      failure_ = failure;
    } else {
      segment.on_disk = true;
      unused_ = std::move(segment.buffer);
      segment.buffer = nullptr;
      if (segment.live == 0) segments_.release(segment);
    }
    changed_.notify_all();
  }

  bool clean(uint8_t* buffer) override;

 private:
  enum Stream { kEvicted, kCleaned, kStreams };

  uint8_t* entry(const PinSegment& segment, uint32_t slot) const {
    return segment.buffer.get() + layout_.place(slot % layout_.segment_entries);
  }
  uint32_t checksum(const PinSegment& segment, const uint8_t* entry) const {
    return entry_checksum(salt_ ^ segment.generation, entry, layout_.record_bytes + sizeof(uint32_t));
  }
  // Return the row number stored in an entry, or none if its checksum is wrong.
  std::optional<uint32_t> verified_row(const PinSegment& segment, const uint8_t* entry) const {
    uint32_t row, sum;
    std::memcpy(&row, entry + layout_.record_bytes, sizeof(row));
    std::memcpy(&sum, entry + layout_.record_bytes + sizeof(row), sizeof(sum));
    if (sum != checksum(segment, entry)) return std::nullopt;
    return row;
  }

  void take(const Request& request, uint64_t part) {
    ReadTicket& ticket = *request.ticket;
    const size_t place = layout_.place(static_cast<uint32_t>(part >> 32) % layout_.segment_entries);
    const auto at = static_cast<int64_t>(part & ~uint32_t{0});
    const uint64_t in_file = segments_.place(*request.segment) + place;
    const uint8_t* entry = request.buffer + (in_file - request.place);
    const auto row = verified_row(*request.segment, entry);
    if (row.has_value() && int64_t(*row) == ticket.row(at)) {
      scatter(ticket.fields, size_t(at), entry);
      return;
    }
    Failure failure;
    failure.kind = Failure::kChecksum;
    failure.row = ticket.row(at);
    failure.place = int64_t(in_file);
    ticket.fail(failure);
  }

  // Locate rows begin..end-1 of a ticket. Rows in memory are copied, and rows on disk are listed from `last` on. Called
  // with the lock held.
  uint64_t* find(ReadTicket& ticket, int64_t begin, int64_t end, uint64_t* last) {
    const Index& index = ticket.frozen == nullptr ? index_ : ticket.frozen->index;
    int64_t absent = 0, from_memory = 0;
    for (int64_t at = begin; at < end; ++at) index.prefetch(ticket.row(at));
    for (int64_t at = begin; at < end; ++at) {
      const uint32_t slot = index[ticket.row(at)];
      ticket.present[at] = slot != kUnwritten;
      if (slot == kUnwritten) {
        ++absent;
        continue;
      }
      const PinSegment& segment = segments_.of(slot);
      if (segment.buffer != nullptr) {
        scatter(ticket.fields, size_t(at), entry(segment, slot));
        ++from_memory;
      } else {
        *last++ = uint64_t(slot) << 32 | uint64_t(at);
      }
    }
    counters.rows_unwritten += absent;
    counters.rows_from_memory += from_memory;
    return last;
  }

  // Locate all rows of a scan before the first one is read, in the calling thread, because each segment has many of
  // them. The segments of a snapshot do not change, so that no lock is needed.
  void scan(ReadTicket& ticket) {
    ticket.open = 1;
    uint64_t* last = ticket.parts.data();
    for (int64_t begin = 0; begin < ticket.count; begin += kFindsPerLock) {
      const std::lock_guard lock(mutex_);
      last = find(ticket, begin, std::min(begin + kFindsPerLock, ticket.count), last);
    }
    const size_t count = size_t(last - ticket.parts.data());
    std::vector<Request> requests;
    {
      std::vector<uint64_t> other(count);
      if (sort_by_slot(ticket.parts.data(), other.data(), count) == other.data()) ticket.parts.swap(other);
      const std::lock_guard lock(mutex_);
      if (closed_) ticket.fail(closed());
      else cut(ticket, ticket.parts.data(), ticket.parts.data() + count, requests);
    }
    ticket.open += int64_t(requests.size());
    engine_->submit_scan(requests);
    ticket.finish_one();
  }

  static uint64_t* sort_by_slot(uint64_t* parts, uint64_t* other, size_t count) {
    return radix_sort(parts, other, count, 32, 64);
  }

  // Divide sorted parts into requests. Adjacent rows are read together.
  void cut(ReadTicket& ticket, const uint64_t* part, const uint64_t* last, std::vector<Request>& requests) {
    const bool scans = ticket.frozen != nullptr;
    const size_t most = scans ? kLargeBytes : kSmallBytes, gap = scans ? kMaxScanGapBytes : kMaxReadGapBytes;
    while (part != last) {
      const auto slot = static_cast<uint32_t>(*part >> 32);
      PinSegment& segment = segments_.of(slot);
      const uint64_t next_segment = (uint64_t(segment.number) + 1) * layout_.segment_entries;
      size_t place = layout_.place(slot % layout_.segment_entries);
      const size_t begin = layout_.block_begin(place);
      size_t end = layout_.block_end(place);
      const uint64_t* stop = part + 1;
      for (; stop != last && *stop >> 32 < next_segment; ++stop) {
        place = layout_.place(static_cast<uint32_t>(*stop >> 32) % layout_.segment_entries);
        if (layout_.block_begin(place) > end + gap || layout_.block_end(place) - begin > most) break;
        end = std::max(end, layout_.block_end(place));
      }
      segment.readers.fetch_add(1, std::memory_order_relaxed);
      ++reading_;
      Request& request = requests.emplace_back();
      request.kind = scans ? Request::Kind::scan : Request::Kind::read;
      request.small = end - begin <= kSmallBytes;
      request.client = this;
      request.ticket = &ticket;
      request.segment = &segment;
      request.first = part;
      request.last = part = stop;
      request.place = segments_.place(segment) + begin;
      request.bytes = end - begin;
    }
  }

  // Append a row, value `number` of the fields, to its stream. A row that cleaning moves must still be in `from`: while
  // the lock was released to wait for space, a newer version may have been written.
  Failure append(std::unique_lock<std::mutex>& lock, int64_t row, std::span<const ConstField> fields, size_t number,
                 Stream stream, uint32_t from = kUnwritten) {
    const auto place = size_t(row / part_rows_ * kStreams + stream);
    if (filling_[place] == nullptr)
      if (const Failure failure = start(lock, place)) return failure;
    if (stream == kCleaned && index_[row] != from) return {};
    PinSegment& segment = *filling_[place];
    const uint32_t slot = segment.number * layout_.segment_entries + segment.filled;
    uint8_t* at = entry(segment, slot);
    const auto stored = static_cast<uint32_t>(row);
    gather(fields, number, at);
    std::memcpy(at + layout_.record_bytes, &stored, sizeof(stored));
    const uint32_t sum = checksum(segment, at);
    std::memcpy(at + layout_.record_bytes + sizeof(stored), &sum, sizeof(sum));
    ++segment.filled;
    ++segment.live;
    ++live_;
    leave(index_.move(row, slot, chunks_));
    if (segment.filled == layout_.segment_entries) seal(place);
    return {};
  }

  // Mark an entry as obsolete.
  void leave(uint32_t slot) {
    if (slot == kUnwritten) return;
    PinSegment& segment = segments_.of(slot);
    --live_;
    if (--segment.live == 0 && segment.on_disk) {
      segments_.release(segment);
      changed_.notify_all();
    }
  }

  // Start a segment. May release the lock and wait for the disk, or for space freed by cleaning.
  Failure start(std::unique_lock<std::mutex>& lock, size_t place) {
    changed_.wait(lock, [this] { return num_sealed_ < kMaxSealedSegments || failure_; });
    // The last free segments are reserved for cleaning, which frees more of them.
    while (place % kStreams == kEvicted && !failure_ && !cleaning_failure_ && !closed_ &&
           segments_.spare(live_) <= kReservedForCleaning && segments_.emptiest() != nullptr) {
      engine_->request_cleaning(*this);
      changed_.wait(lock);
    }
    if (failure_) return failure_;
    if (closed_) return closed();
    PinSegment* segment = segments_.reuse();
    if (segment == nullptr) {
      int error;
      segment = segments_.grow(error);
      if (segment == nullptr) {
        Failure failure;
        failure.kind = Failure::kSystem;
        failure.code = error;
        failure.writing = 1;
        return failure;
      }
    }
    if (unused_ == nullptr) {
      unused_ = make_buffer(layout_.segment_bytes);
      std::memset(unused_.get(), 0, layout_.segment_bytes);  // Other memory of this process must not reach the disk.
    }
    segment->buffer = std::exchange(unused_, nullptr);
    filling_[place] = segment;
    return {};
  }

  void seal(size_t place) {
    send(*std::exchange(filling_[place], nullptr));
    if (segments_.spare(live_) < kSpareSegments) engine_->request_cleaning(*this);
  }

  void send(PinSegment& segment) {
    Request request;
    request.kind = Request::Kind::write;
    request.client = this;
    request.segment = &segment;
    request.place = segments_.place(segment);
    request.bytes = layout_.segment_bytes;
    request.buffer = segment.buffer.get();
    ++num_sealed_;
    engine_->submit_write(request);
  }

  static Failure closed() {
    Failure failure;
    failure.kind = Failure::kClosed;
    return failure;
  }

  // Write segments again that the disk has not accepted.
  Failure retry(std::unique_lock<std::mutex>& lock) {
    if (closed_) return closed();
    cleaning_failure_ = {};
    if (failed_.empty()) return {};
    failure_ = {};
    for (PinSegment* segment : std::exchange(failed_, {})) send(*segment);
    changed_.wait(lock, [this] { return num_sealed_ == 0; });
    return failure_;
  }

  std::shared_ptr<Engine> engine_;
  const int file_;
  const Layout layout_;
  const uint32_t salt_;
  const int64_t num_rows_, part_rows_;
  std::mutex writing_;  // Taken before mutex_. Serializes writers.
  std::mutex mutex_;
  std::condition_variable changed_;
  Index index_;
  std::atomic<int64_t> chunks_{0};  // Chunks of this index and of snapshots.
  std::vector<PinSegment*> filling_;  // Segments being filled, by part: evicted rows, and rows moved by cleaning.
  Segments segments_;
  int num_sealed_ = 0;                            // Segments with a pending write.
  std::vector<PinSegment*> failed_;              // Segments whose write failed.
  Failure failure_;
  Failure cleaning_failure_;
  Buffer unused_;
  int64_t live_ = 0;
  std::atomic<int64_t> reading_{0};  // Requests that are not complete.
  std::atomic<bool> closed_{false};
};

inline RowLogSnapshot::~RowLogSnapshot() { log->thaw(*this); }

// Move the rows of the segment with the fewest rows, if free space is short.
inline bool RowLog::clean(uint8_t* buffer) {
  std::unique_lock lock(mutex_);
  const auto is_short = [this] {
    return segments_.spare(live_) < kSpareSegments || segments_.num_in_file() > segments_.allowed(live_);
  };
  if (closed_ || failure_ || cleaning_failure_) return false;
  while (segments_.num_in_file() > segments_.allowed(live_) && segments_.num_free() > kSpareSegments)
    if (!segments_.punch()) break;
  PinSegment* const segment = is_short() ? segments_.emptiest() : nullptr;
  if (segment == nullptr) {
    changed_.notify_all();
    return false;
  }
  segment->readers.fetch_add(1, std::memory_order_relaxed);
  const uint64_t place = segments_.place(*segment);
  lock.unlock();
  size_t done = 0;
  int error = 0;
  while (done < layout_.segment_bytes) {
    const ssize_t bytes = pread(file_, buffer + done, layout_.segment_bytes - done, off_t(place + done));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) {
      error = bytes < 0 ? errno : EIO;
      break;
    }
    done += size_t(bytes);
  }
  lock.lock();
  counters.cleaned_bytes += int64_t(done);
  bool stopped = false;
  if (error != 0) segment->damaged = true;
  for (uint32_t i = 0; i < segment->filled && error == 0 && !stopped && segment->live > 0; ++i) {
    const uint8_t* at = buffer + layout_.place(i);
    const std::optional<uint32_t> row = verified_row(*segment, at);
    if (!row.has_value() || *row >= num_rows_) continue;
    const uint32_t slot = segment->number * layout_.segment_entries + i;
    if (index_[*row] != slot) continue;
    const ConstField record{at, layout_.record_bytes, 0};
    cleaning_failure_ = append(lock, *row, {&record, 1}, 0, kCleaned, slot);
    stopped = bool(cleaning_failure_);
    counters.rows_cleaned += !stopped;
    if (i % kRowsPerLock == kRowsPerLock - 1) {
      lock.unlock();
      lock.lock();
    }
  }
  segment->readers.fetch_sub(1, std::memory_order_release);
  // Rows that cannot be read are not moved. Their readers get the error.
  if (segment->live > 0 && !stopped) segment->damaged = true;
  changed_.notify_all();
  return !stopped && is_short();
}

}  // namespace meseta::row_file
