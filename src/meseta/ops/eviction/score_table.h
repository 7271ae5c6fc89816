// Scores of the slots of a cache, ghost scores of evicted rows, and the choice of victims.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "ops/eviction/scores.h"

namespace meseta {

class ScoreTable {
 public:
  // Create the scores of empty slots 0..num_slots-1, with `num_kept` ghost scores.
  ScoreTable(int64_t num_slots, int64_t num_kept, int64_t half_life)
      : scores_(size_t(num_slots)), ghost_scores_(size_t(std::max<int64_t>(num_kept, 1))), clock_(half_life) {}

  int64_t num_slots() const { return int64_t(scores_.size()); }
  size_t num_bytes() const { return scores_.size() + ghost_scores_.size(); }
  void set_half_life(int64_t half_life) { clock_.set(half_life); }

  // A row is put into a slot. It gets its ghost score.
  void admit(int64_t slot, int64_t row) { scores_[size_t(slot)] = ghost_scores_[place(row)]; }
  // The row in a slot is requested.
  void touch(int64_t slot) { scores_[size_t(slot)] = add_scores(scores_[size_t(slot)], clock_.now()); }
  // Advance the clock by a number of lookups.
  void pass(int64_t lookups) {
    const int halvings = clock_.pass(lookups);
    if (halvings == 0) return;
    lower_scores(scores_.data(), scores_.size(), halvings);
    lower_scores(ghost_scores_.data(), ghost_scores_.size(), halvings);
  }

  // Choose `count` unpinned slots of `rows` (negative for empty slots). Unused slots come first, then the lowest scores
  // within a window after the hand. The window has kWindow slots per victim, or more if many are pinned. Of equal scores
  // the first ones are chosen. Their ghost scores are stored. Returns false, with nothing chosen, if too few slots are
  // unpinned.
  template <typename IsPinned>
  bool choose(int64_t count, const int64_t* rows, const IsPinned& is_pinned, int64_t* out) {
    const int64_t fresh = std::min(count, num_slots() - num_used_);
    if (count > fresh && !choose_used(count - fresh, rows, is_pinned, out + fresh)) return false;
    for (int64_t i = 0; i < fresh; ++i) out[i] = num_used_++;
    return true;
  }

 private:
  static constexpr int64_t kWindow = 8, kMinWindow = 64;

  size_t place(int64_t row) const { return size_t(uint64_t(row) % ghost_scores_.size()); }

  template <typename IsPinned>
  bool choose_used(int64_t count, const int64_t* rows, const IsPinned& is_pinned, int64_t* out) {
    if (count > num_used_) return false;
    const auto after = [&](int64_t place) { return hand_ + place < num_used_ ? hand_ + place : hand_ + place - num_used_; };
    std::array<int64_t, 256> numbers{};
    int64_t candidates = 0, seen = 0;
    const int64_t least = std::min(std::max(count * kWindow, kMinWindow), num_used_);
    for (; seen < num_used_ && (seen < least || candidates < count); ++seen) {
      const int64_t slot = after(seen);
      if (is_pinned(slot)) continue;
      ++numbers[scores_[size_t(slot)]];
      ++candidates;
    }
    if (candidates < count) return false;
    size_t highest = 0;
    int64_t below = 0;  // Number of candidates with a lower score than `highest`.
    while (below + numbers[highest] < count) below += numbers[highest++];
    int64_t equal = count - below, chosen = 0;
    for (int64_t step = 0; chosen < count; ++step) {
      const int64_t slot = after(step);
      const size_t score = scores_[size_t(slot)];
      if (is_pinned(slot) || score > highest || (score == highest && equal-- <= 0)) continue;
      out[chosen++] = slot;
      if (rows[slot] >= 0) ghost_scores_[place(rows[slot])] = uint8_t(score);
    }
    hand_ = seen == num_used_ ? hand_ : after(seen);
    return true;
  }

  std::vector<uint8_t> scores_, ghost_scores_;
  ScoreClock clock_;
  int64_t num_used_ = 0, hand_ = 0;
};

}  // namespace meseta
