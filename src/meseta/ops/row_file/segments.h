// Segments of a file: those in use, those that may be reused, and the maximum size of the file.
#pragma once

#include <deque>
#include <optional>
#include <set>

#include <fcntl.h>

#include "ops/row_file/engine.h"

namespace meseta::row_file {

constexpr int64_t kSpareSegments = 4;  // Number of segments that are created before they are needed.
constexpr int64_t kGrowth = 64;        // The file grows by 1/kGrowth of its size, and by at least one segment.
constexpr double kMaxCleanableFill = 0.95;

struct PinSegment {
  uint32_t number = 0;
  uint32_t generation = 0;  // Seed of the checksums of entries, so that earlier content is not mistaken for current.
  uint64_t born = 0;        // Number of snapshots before the segment was started.
  uint32_t filled = 0;      // Number of entries.
  uint32_t live = 0;        // Number of entries that the index refers to.
  bool on_disk = false;     // Complete, and not free.
  bool damaged = false;     // Not to be cleaned.
  std::atomic<uint32_t> readers{0};
  Buffer buffer;  // Content, until it is written.
};

// Not thread-safe. Callers hold the lock of the file.
class Segments {
 public:
  // At most `most_open` segments are filled at the same time.
  Segments(int file, const Layout& layout, int64_t most_open) : file_(file), layout_(layout), max_open_(most_open) {}

  PinSegment& of(uint32_t slot) { return all_[slot / layout_.segment_entries]; }
  uint64_t place(const PinSegment& segment) const { return uint64_t(segment.number) * layout_.segment_bytes; }

  // Return the maximum number of segments for `live` rows.
  int64_t allowed(int64_t live) const {
    const double bytes = kMaxSpaceFactor * double(live) * double(layout_.record_bytes);
    const int64_t whole = (live + layout_.segment_entries - 1) / layout_.segment_entries;
    return std::max(int64_t(bytes / double(layout_.segment_bytes)), whole + kSpareSegments + max_open_);
  }
  int64_t num_in_file() const { return int64_t(all_.size() + num_reserved_ - punched_.size()); }
  int64_t spare(int64_t live) const {
    return int64_t(free_.size()) + std::max<int64_t>(0, allowed(live) - num_in_file() + num_reserved_);
  }

  // Return a segment that is free to write, or null.
  PinSegment* reuse() {
    for (size_t tries = free_.size(); tries > 0; --tries) {
      PinSegment* segment = free_.front();
      free_.pop_front();
      if (segment->readers.load(std::memory_order_acquire) == 0) return begin(segment);
      free_.push_back(segment);
    }
    return nullptr;
  }

  // Add a segment to the file. If the disk is full, return null and set the system's error.
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

  // Release a segment, which only snapshots may still need.
  void release(PinSegment& segment) {
    segment.on_disk = false;
    (is_held(segment) ? held_ : free_).push_back(&segment);
  }

  // Return the segment with the fewest rows if cleaning it frees space, or null. While there are snapshots, none does.
  PinSegment* emptiest() {
    if (!freezes_.empty()) return nullptr;
    PinSegment* best = nullptr;
    const auto most = static_cast<uint32_t>(kMaxCleanableFill * layout_.segment_entries);
    for (PinSegment& segment : all_)
      if (segment.on_disk && !segment.damaged && segment.live <= most)
        if (best == nullptr || segment.live < best->live) best = &segment;
    return best;
  }

  // Return the space of a free segment to the file system. Returns whether there was one.
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

  // A file system that cannot reserve space reports a full disk only when it is written.
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
  int64_t num_reserved_ = 0;  // Segments after the last one for which the file system has reserved space.
  uint64_t clock_ = 0;
  std::set<uint64_t> freezes_;
};

}  // namespace meseta::row_file
