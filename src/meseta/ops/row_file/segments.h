// The segments of a file: which are in use, which may be written again, and how large the file may be.
#pragma once

#include <deque>
#include <optional>
#include <set>

#include <fcntl.h>

#include "ops/row_file/engine.h"

namespace meseta::row_file {

constexpr int64_t kSpareSegments = 4;  // made before they are needed
constexpr int64_t kGrowth = 64;        // the file grows by this part of itself, and by one segment at least
constexpr double kMaxCleanableFill = 0.95;

struct PinSegment {
  uint32_t number = 0;
  uint32_t generation = 0;  // begins the checksums of its entries: what was here before is not taken for what is
  uint64_t born = 0;        // freezes before it was begun
  uint32_t filled = 0;      // entries
  uint32_t live = 0;        // entries that are rows of the index
  bool on_disk = false;     // whole, and not free
  bool damaged = false;     // and not cleaned
  std::atomic<uint32_t> readers{0};
  Buffer buffer;  // what is in it, until it is written
};

// The lock of the file is held by whoever calls it.
class Segments {
 public:
  // `most_open` are being filled at a time, at most.
  Segments(int file, const Layout& layout, int64_t most_open) : file_(file), layout_(layout), max_open_(most_open) {}

  PinSegment& of(uint32_t slot) { return all_[slot / layout_.segment_entries]; }
  uint64_t place(const PinSegment& segment) const { return uint64_t(segment.number) * layout_.segment_bytes; }

  // The most that the file may have for so many rows.
  int64_t allowed(int64_t live) const {
    const double bytes = kMaxSpaceFactor * double(live) * double(layout_.record_bytes);
    const int64_t whole = (live + layout_.segment_entries - 1) / layout_.segment_entries;
    return std::max(int64_t(bytes / double(layout_.segment_bytes)), whole + kSpareSegments + max_open_);
  }
  int64_t num_in_file() const { return int64_t(all_.size() + num_reserved_ - punched_.size()); }
  int64_t spare(int64_t live) const {
    return int64_t(free_.size()) + std::max<int64_t>(0, allowed(live) - num_in_file() + num_reserved_);
  }

  // One that is free to write, or none.
  PinSegment* reuse() {
    for (size_t tries = free_.size(); tries > 0; --tries) {
      PinSegment* segment = free_.front();
      free_.pop_front();
      if (segment->readers.load(std::memory_order_acquire) == 0) return begin(segment);
      free_.push_back(segment);
    }
    return nullptr;
  }

  // One more in the file; none, and the system's error, where the disk is full.
  PinSegment* grow(int& error) {
    error = 0;
    if (!punched_.empty()) {
      PinSegment* segment = punched_.back();
      if (!allocate(segment->number, 1, error)) return nullptr;
      punched_.pop_back();
      return begin(segment);
    }
    if (num_reserved_ == 0) {
      const int64_t step = std::max<int64_t>(1, int64_t(all_.size()) / kGrowth);
      if (allocate(all_.size(), step, error))
        num_reserved_ = step;
      else if (error == ENOSPC && allocate(all_.size(), 1, error))
        num_reserved_ = 1;
      else
        return nullptr;
    }
    --num_reserved_;
    PinSegment& segment = all_.emplace_back();
    segment.number = static_cast<uint32_t>(all_.size() - 1);
    return begin(&segment);
  }

  // Nothing of it is needed any more, but for frozen rows.
  void release(PinSegment& segment) {
    segment.on_disk = false;
    (is_held(segment) ? held_ : free_).push_back(&segment);
  }

  // The segment with the fewest rows, where cleaning it gives room. While rows are frozen none does.
  PinSegment* emptiest() {
    if (!freezes_.empty()) return nullptr;
    PinSegment* best = nullptr;
    const auto most = static_cast<uint32_t>(kMaxCleanableFill * layout_.segment_entries);
    for (PinSegment& segment : all_)
      if (segment.on_disk && !segment.damaged && segment.live <= most)
        if (best == nullptr || segment.live < best->live) best = &segment;
    return best;
  }

  // Gives the room of a free segment back to the file system; whether there was one to give.
  bool punch() {
#if defined(FALLOC_FL_PUNCH_HOLE)
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      PinSegment* segment = *at;
      if (segment->readers.load(std::memory_order_acquire) != 0) continue;
      if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(place(*segment)),
                    off_t(layout_.segment_bytes)) != 0)
        return false;
      free_.erase(at);
      punched_.push_back(segment);
      return true;
    }
#endif
    return false;
  }
  int64_t num_free() const { return int64_t(free_.size()); }

  uint64_t freeze() {
    freezes_.insert(++clock_);
    return clock_;
  }
  void thaw(uint64_t freeze) {
    freezes_.erase(freeze);
    std::erase_if(held_, [this](PinSegment* segment) {
      if (is_held(*segment)) return false;
      free_.push_back(segment);
      return true;
    });
  }

  int64_t file_bytes() const { return num_in_file() * int64_t(layout_.segment_bytes); }
  int64_t num_bytes() const {
    return int64_t(all_.size() * sizeof(PinSegment) +
                   (free_.size() + punched_.capacity() + held_.size()) * sizeof(PinSegment*));
  }

 private:
  bool is_held(const PinSegment& segment) const { return !freezes_.empty() && *freezes_.rbegin() > segment.born; }

  PinSegment* begin(PinSegment* segment) {
    ++segment->generation;
    segment->born = clock_;
    segment->filled = segment->live = 0;
    segment->on_disk = segment->damaged = false;
    return segment;
  }

  // A file system that cannot reserve room says at the write whether there is some.
  bool allocate(size_t first, int64_t count, int& error) {
    error = 0;
#if defined(__linux__)
    const auto bytes = off_t(layout_.segment_bytes);
    int result;
    do result = fallocate(file_, 0, off_t(first) * bytes, count * bytes);
    while (result != 0 && errno == EINTR);
    if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) error = errno;
#endif
    return error == 0;
  }

  const int file_;
  const Layout layout_;
  const int64_t max_open_;
  std::deque<PinSegment> all_;
  std::deque<PinSegment*> free_, held_;
  std::vector<PinSegment*> punched_;
  int64_t num_reserved_ = 0;  // segments behind the last one that the file system has reserved
  uint64_t clock_ = 0;
  std::set<uint64_t> freezes_;
};

}  // namespace meseta::row_file
