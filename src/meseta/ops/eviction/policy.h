// Eviction policy, which combines frequency and recency of requests. See reference.py.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "ops/eviction/score_table.h"
#include "ops/eviction/shadow_cache.h"

namespace meseta {

class EvictionPolicy {
 public:
  // Half-lives are in lookups. The first one is used until trials select another.
  EvictionPolicy(int64_t num_slots, int64_t num_kept, const std::vector<int64_t>& half_lives)
      : table_(num_slots, num_kept, half_lives.at(0)), half_life_(half_lives.at(0)) {
    if (half_lives.size() < 2 || num_slots < kMinShadowedSlots) return;
    shrink_ = std::min(int(std::bit_width(uint64_t(num_slots / kMinShadowSlots))) - 1, kMaxShrink);
    for (const int64_t half_life : half_lives) shadow_caches_.emplace_back(num_slots, num_kept, shrink_, half_life);
  }

  int64_t half_life() const { return half_life_; }
  size_t num_bytes() const {
    size_t bytes = table_.num_bytes();
    for (const ShadowCache& trial : shadow_caches_) bytes += trial.num_bytes();
    return bytes;
  }

  // Record that a batch of `num_lookups` lookups requested these distinct rows [count], which are in these slots.
  void touch(const int64_t* slots, const int64_t* rows, int64_t count, int64_t num_lookups) {
    for (int64_t i = 0; i < count; ++i) table_.touch(slots[i]);
    table_.pass(num_lookups);
    if (shadow_caches_.empty()) return;
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t word = ShadowCache::sample_hash(rows[i]);
      if (word >> (64 - shrink_) != 0) continue;
      for (ShadowCache& trial : shadow_caches_) trial.ask(rows[i], word);
    }
    for (ShadowCache& trial : shadow_caches_) trial.pass(num_lookups);
    review(num_lookups);
  }

  // Record that rows have been put into slots.
  void admit(const int64_t* slots, const int64_t* rows, int64_t count) {
    for (int64_t i = 0; i < count; ++i) table_.admit(slots[i], rows[i]);
  }

  // Choose `count` unpinned slots of `rows` (negative for empty slots). Returns false if there are fewer.
  template <typename IsPinned>
  bool choose(int64_t count, const int64_t* rows, const IsPinned& is_pinned, int64_t* out) {
    return table_.choose(count, rows, is_pinned, out);
  }

  int64_t num_slots() const { return table_.num_slots(); }

 private:
  static constexpr int64_t kMinShadowedSlots = 8192, kMinShadowSlots = 512;  // Smaller samples say little about misses.
  static constexpr int kMaxShrink = 6;

  // Regularly switch to the half-life with the fewest misses in its trial, if the difference is large enough.
  void review(int64_t num_lookups) {
    lookups_since_update_ += num_lookups;
    if (lookups_since_update_ < 2 * table_.num_slots()) return;
    lookups_since_update_ = 0;
    const auto least = std::min_element(shadow_caches_.begin(), shadow_caches_.end(),
                                        [](const ShadowCache& a, const ShadowCache& b) { return a.misses() < b.misses(); });
    for (const ShadowCache& trial : shadow_caches_)
      if (trial.half_life() == half_life_ && least->misses() * 50 < trial.misses() * 49) {
        half_life_ = least->half_life();
        table_.set_half_life(half_life_);
        break;
      }
    for (ShadowCache& trial : shadow_caches_) trial.halve_misses();
  }

  ScoreTable table_;
  int64_t half_life_, lookups_since_update_ = 0;
  int shrink_ = 0;
  std::vector<ShadowCache> shadow_caches_;
};

}  // namespace meseta
