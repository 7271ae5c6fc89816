// Row cache: which rows are in slots, which are pinned, and how they are fetched and evicted.
//
//            slot 0   slot 1   ...   slot n-1 | slot n   ...
//   rows       7        2              none   |   5          from n on: rows for read-only access, such as evaluation.
//   pins       1        0               0     |              Lookups do not find them.
//   dirty      0        1               0     |
//                       |
//                       evicted when another row needs the slot; it is dirty, so it is written to the backing store first
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ops/slot_map/slot_map.h"
#include "ops/eviction/policy.h"
#include "ops/row_cache/row_store.h"

namespace meseta::row_cache {

constexpr int64_t kWriteBackRows = 4096;  // Number of rows per write to the backing store.

using row_file::Field;

class RowCache;

// Ids of one feature that a batch looks up in a cache, and their slots once they are pinned.
struct PinSegment {
  const int64_t* rows;
  int64_t* places;
  int64_t count;
};

// State of a batch in a cache until it is unpinned.
struct CachePins {
  std::shared_ptr<RowCache> cache;
  std::vector<PinSegment> segments;
  int64_t num_lookups = 0;
  std::vector<int64_t> slots;    // Slot of each distinct row, those of `missing` last.
  std::vector<int64_t> missing;  // Rows that were not in the cache.
  std::vector<int64_t> evicted_slots, evicted_rows;  // Evicted dirty rows that the caller must write.
  std::unique_ptr<uint8_t[]> records;                // [missing, record_bytes].
  std::unique_ptr<bool[]> present;                   // [missing].
  std::unique_ptr<PendingLogRead> reading;                  // Null if it is complete.
  bool is_complete = false;

  size_t num_found() const { return slots.size() - missing.size(); }
  const int64_t* missing_slots() const { return slots.data() + num_found(); }
};

struct CacheCounters {
  int64_t num_lookups = 0, num_rows = 0, num_misses = 0, num_written_back = 0, num_read_only = 0;
};

class RowCache {
 public:
  static constexpr int64_t kEmpty = -1;

  // `rows` [num_slots + num_to_read] is memory of the caller, with kEmpty in the first num_slots. Without `fields` the
  // caller moves values between records and slots.
  RowCache(int64_t num_slots, int64_t num_to_read, EvictionPolicy policy, int64_t* rows, std::shared_ptr<RowStore> far,
           std::vector<Field> fields)
      : num_slots_(num_slots),
        policy_(std::move(policy)),
        rows_(rows),
        backing_store_(std::move(far)),
        fields_(std::move(fields)),
        slot_map_(num_slots),
        marks_(size_t(num_slots)),
        dirty_(size_t(num_slots)),
        next_read_only_slot_(num_slots),
        end_read_only_slot_(num_slots + num_to_read) {}

  std::mutex mutex;  // Protects all members below.
  CacheCounters counters;

  int64_t num_slots() const { return num_slots_; }
  int64_t num_pinned() const { return num_pinned_; }
  int64_t num_rows() const { return backing_store_->num_rows(); }
  bool moves_values() const { return !fields_.empty(); }
  RowStore& far() { return *backing_store_; }

  void find(const int64_t* rows, int64_t count, int64_t* slots, int num_threads = 1) const {
    slot_map_.find(rows, count, slots, num_threads);
  }

  // Pin rows of segments that are in the cache, whose slots `find` has set. Collect the others in `missing`. Their places
  // become -2, -3, ... in this order. Returns false if there are not enough unpinned slots.
  bool begin(CachePins& pinned, bool to_read) {
    if (++round_ == 0) {
      for (SlotState& mark : marks_) mark.round = 0;
      round_ = 1;
    }
    int64_t absent = 0;
    for (const PinSegment& segment : pinned.segments) {
      for (int64_t i = 0; i < segment.count; ++i) absent += segment.places[i] < 0;
      pinned.num_lookups += segment.count;
    }
    const size_t homes = std::bit_ceil(size_t(2 * absent + 1));
    uint32_t* const numbers = scratch<uint32_t, 7>(homes);  // Numbers of rows in `missing`, from 1.
    std::fill_n(numbers, absent == 0 ? 0 : homes, 0u);
    for (const PinSegment& segment : pinned.segments)
      for (int64_t i = 0; i < segment.count; ++i) {
        const int64_t ahead = i + kPrefetchDistance < segment.count ? segment.places[i + kPrefetchDistance] : -1;
        if (ahead >= 0) prefetch(&marks_[size_t(ahead)]);
        const int64_t slot = segment.places[i];
        if (slot >= 0) {
          SlotState& mark = marks_[size_t(slot)];
          if (mark.round == round_) continue;
          mark.round = round_;
          num_pinned_ += mark.pins++ == 0;
          pinned.slots.push_back(slot);
          continue;
        }
        const int64_t row = segment.rows[i];
        size_t at = size_t(splitmix64(uint64_t(row))) & (homes - 1);
        while (numbers[at] != 0 && pinned.missing[numbers[at] - 1] != row) at = (at + 1) & (homes - 1);
        if (numbers[at] == 0) {
          pinned.missing.push_back(row);
          numbers[at] = uint32_t(pinned.missing.size());
        }
        segment.places[i] = -1 - int64_t(numbers[at]);
      }
    const int64_t room = to_read ? int64_t(free_read_only_slots_.size()) + end_read_only_slot_ - next_read_only_slot_ : num_slots_ - num_pinned_;
    return int64_t(pinned.missing.size()) <= room;
  }

  // Undo `begin`.
  void undo(CachePins& pinned) {
    unpin(pinned.slots);
    pinned.slots.clear();
    pinned.missing.clear();
  }

  // Assign slots to the missing rows, and start to read them. If evicted rows cannot be written, nothing changes and
  // `begin` is undone.
  Failure bring(CachePins& pinned, bool to_read) {
    const size_t found = pinned.slots.size(), count = pinned.missing.size();
    if (count != 0) {
      pinned.slots.resize(found + count);
      int64_t* const slots = pinned.slots.data() + found;
      if (to_read) {
        allocate_read_only_slots(slots, count);
      } else if (const Failure failure = take(pinned, slots, int64_t(count))) {
        pinned.slots.resize(found);
        undo(pinned);
        return failure;
      }
      pinned.records.reset(new uint8_t[count * backing_store_->record_bytes()]);
      pinned.present.reset(new bool[count]);
      pinned.reading = backing_store_->read(pinned.missing.data(), int64_t(count), pinned.records.get(), pinned.present.get());
      for (const PinSegment& segment : pinned.segments)
        for (int64_t i = 0; i < segment.count; ++i)
          if (segment.places[i] < 0) segment.places[i] = slots[-2 - segment.places[i]];
    }
    if (to_read) {
      counters.num_read_only += int64_t(count);
      return {};
    }
    int64_t* const rows = scratch<int64_t, 7>(pinned.slots.size());
    for (size_t i = 0; i < pinned.slots.size(); ++i) rows[i] = rows_[pinned.slots[i]];
    policy_.touch(pinned.slots.data(), rows, int64_t(pinned.slots.size()), pinned.num_lookups);
    counters.num_lookups += pinned.num_lookups;
    counters.num_rows += int64_t(pinned.slots.size());
    counters.num_misses += int64_t(count);
    return {};
  }

  // Copy records first..last-1 of the missing rows into their slots, except those of unwritten rows.
  void put(const CachePins& pinned, int64_t first, int64_t last) const {
    const int64_t* const slots = pinned.missing_slots();
    for (int64_t i = first; i < last; ++i) {
      if (!pinned.present[size_t(i)]) continue;
      row_file::scatter(fields_, size_t(slots[i]), pinned.records.get() + size_t(i) * backing_store_->record_bytes());
    }
  }

  // Remove the missing rows from the cache after a failed read.
  void drop_missing(CachePins& pinned) {
    const int64_t* const slots = pinned.missing_slots();
    const size_t count = pinned.missing.size();
    if (count == 0 || slots[0] >= num_slots_) return;
    slot_map_.remove(pinned.missing.data(), int64_t(count), scratch<int64_t, 7>(count), 1);
    for (size_t i = 0; i < count; ++i) rows_[slots[i]] = kEmpty;
  }

  // Unpin the rows of a batch, which may have changed them.
  void release(CachePins& pinned, bool to_read) {
    if (!to_read)
      for (const int64_t slot : pinned.slots) dirty_[size_t(slot)] = uint8_t(rows_[slot] != kEmpty);
    unpin(pinned.slots);
    pinned.slots.clear();
    pinned.missing.clear();
  }

  // Return the slots of rows that differ from the backing store, ordered by row.
  std::vector<int64_t> dirty() const {
    std::vector<int64_t> slots;
    for (int64_t slot = 0; slot < num_slots_; ++slot)
      if (dirty_[size_t(slot)]) slots.push_back(slot);
    std::sort(slots.begin(), slots.end(), [this](int64_t a, int64_t b) { return rows_[a] < rows_[b]; });
    return slots;
  }

  // Write the rows in some slots to the backing store, and mark them clean.
  Failure write_back(const int64_t* slots, int64_t count) {
    const size_t bytes = backing_store_->record_bytes();
    for (int64_t first = 0; first < count; first += kWriteBackRows) {
      const int64_t some = std::min(kWriteBackRows, count - first);
      uint8_t* const records = scratch<uint8_t, 7>(size_t(some) * bytes);
      int64_t* const rows = scratch<int64_t, 7>(size_t(some));
      for (int64_t i = 0; i < some; ++i) {
        const int64_t slot = slots[first + i];
        rows[i] = rows_[slot];
        row_file::gather(std::span<const Field>(fields_), size_t(slot), records + size_t(i) * bytes);
      }
      if (const Failure failure = backing_store_->write(rows, records, some)) return failure;
      clean(slots + first, some);
    }
    return {};
  }
  void clean(const int64_t* slots, int64_t count) {
    for (int64_t i = 0; i < count; ++i) dirty_[size_t(slots[i])] = 0;
    counters.num_written_back += count;
  }

  size_t num_bytes() const {
    return slot_map_.num_bytes() + policy_.num_bytes() + marks_.size() * sizeof(SlotState) + dirty_.size() +
           free_read_only_slots_.capacity() * sizeof(int64_t);
  }

 private:
  static constexpr int64_t kPrefetchDistance = 16;
  struct SlotState {
    uint32_t round = 0;  // Last round in which the row was requested.
    int32_t pins = 0;
  };

  // Choose unpinned slots for missing rows, and evict their rows.
  Failure take(CachePins& pinned, int64_t* slots, int64_t count) {
    policy_.choose(count, rows_, [this](int64_t slot) { return marks_[size_t(slot)].pins != 0; }, slots);
    std::vector<int64_t> leaving, dirty;
    for (int64_t i = 0; i < count; ++i) {
      if (rows_[slots[i]] == kEmpty) continue;
      leaving.push_back(rows_[slots[i]]);
      if (dirty_[size_t(slots[i])]) dirty.push_back(slots[i]);
    }
    if (moves_values()) {
      if (const Failure failure = write_back(dirty.data(), int64_t(dirty.size()))) return failure;
    } else {
      for (const int64_t slot : dirty) pinned.evicted_rows.push_back(rows_[slot]);
      pinned.evicted_slots = std::move(dirty);
      clean(pinned.evicted_slots.data(), int64_t(pinned.evicted_slots.size()));
    }
    slot_map_.remove(leaving.data(), int64_t(leaving.size()), scratch<int64_t, 7>(leaving.size()), 1);
    for (int64_t i = 0; i < count; ++i) {
      rows_[slots[i]] = pinned.missing[size_t(i)];
      marks_[size_t(slots[i])].pins = 1;
    }
    num_pinned_ += count;
    slot_map_.insert(pinned.missing.data(), count, slots, 1);
    policy_.admit(slots, pinned.missing.data(), count);
    return {};
  }

  void allocate_read_only_slots(int64_t* slots, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (free_read_only_slots_.empty()) {
        slots[i] = next_read_only_slot_++;
      } else {
        slots[i] = free_read_only_slots_.back();
        free_read_only_slots_.pop_back();
      }
    }
  }

  void unpin(const std::vector<int64_t>& slots) {
    for (const int64_t slot : slots) {
      if (slot >= num_slots_) free_read_only_slots_.push_back(slot);
      else num_pinned_ -= --marks_[size_t(slot)].pins == 0;
    }
  }

  const int64_t num_slots_;
  EvictionPolicy policy_;
  int64_t* const rows_;
  const std::shared_ptr<RowStore> backing_store_;
  const std::vector<Field> fields_;
  TypedSlotMap<uint32_t> slot_map_;
  std::vector<SlotState> marks_;
  std::vector<uint8_t> dirty_;
  std::vector<int64_t> free_read_only_slots_;  // Read-only slots that were used and are free again.
  int64_t next_read_only_slot_, end_read_only_slot_;
  int64_t num_pinned_ = 0;
  uint32_t round_ = 0;
};

}  // namespace meseta::row_cache
