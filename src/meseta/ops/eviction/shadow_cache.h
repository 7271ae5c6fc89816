// Miniature cache with a sample of the rows, which measures the misses of a half-life (Waldspurger et al., "Cache modeling
// and optimization using miniature simulations", USENIX ATC 2017). It stores row numbers only.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/slot_map/part.h"
#include "ops/eviction/score_table.h"

namespace meseta {

class ShadowCache {
 public:
  // The sample has one row in 2^shrink, and the cache is smaller by the same factor. `half_life` is in lookups of all
  // rows.
  ShadowCache(int64_t num_slots, int64_t num_kept, int shrink, int64_t half_life)
      : half_life_(half_life),
        table_(num_slots >> shrink, num_kept >> shrink, half_life),
        rows_(size_t(num_slots >> shrink), -1) {
    const int64_t homes = SlotMapPart<uint32_t>::homes_for(num_slots >> shrink);
    pages_ = Pages(SlotMapPart<uint32_t>::num_bytes_for(homes));
    slots_.open(pages_.data(), homes, shrink);
  }

  int64_t half_life() const { return half_life_; }
  int64_t misses() const { return misses_; }
  size_t num_bytes() const { return table_.num_bytes() + 8 * rows_.size() + pages_.bytes() + slots_.grown_bytes(); }
  void halve_misses() { misses_ /= 2; }

  // A row is requested whose hash is part of the sample.
  void ask(int64_t row, uint64_t word) {
    int64_t slot = slots_.find(word);
    if (slot < 0) {
      ++misses_;
      table_.choose(1, rows_.data(), [](int64_t) { return false; }, &slot);
      if (rows_[size_t(slot)] >= 0) slots_.remove(sample_hash(rows_[size_t(slot)]));
      rows_[size_t(slot)] = row;
      slots_.insert(word, slot);
      table_.admit(slot, row);
    }
    table_.touch(slot);
  }
  void pass(int64_t lookups) { table_.pass(lookups); }

  static uint64_t sample_hash(int64_t row) { return splitmix64(uint64_t(row) ^ 0x6576696374696F6Eu); }

 private:
  int64_t half_life_;
  ScoreTable table_;
  std::vector<int64_t> rows_;  // Row of each slot.
  Pages pages_;
  SlotMapPart<uint32_t> slots_;
  int64_t misses_ = 0;
};

}  // namespace meseta
