// Scores of rows: how often each was asked for, with less weight on what was long ago; one byte each.
//
//   score     0   1   ...   192 ..... 199   ...   255       8 steps are twice as much
//           never            one request now      asked for often
//
// What a request counts rises with time, so that old scores need not fall; after each half-life all are lowered by 8.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace meseta {

constexpr int kScoreSteps = 8;
constexpr int kRequestScore = 24 * kScoreSteps;  // what a request counts after scores were lowered

// By how much the larger of two scores that differ by d rises when they are added up.
inline const std::array<uint8_t, 64>& score_rises() {
  static const auto table = [] {
    std::array<uint8_t, 64> rise{};
    for (size_t d = 0; d < rise.size(); ++d)
      rise[d] = uint8_t(std::lround(kScoreSteps * std::log2(1 + std::exp2(-double(d) / kScoreSteps))));
    return rise;
  }();
  return table;
}

inline uint8_t add_scores(int one, int other) {
  const auto distance = size_t(std::abs(one - other));
  return uint8_t(std::min(255, std::max(one, other) + (distance < score_rises().size() ? score_rises()[distance] : 0)));
}

inline void lower_scores(uint8_t* scores, size_t count, int halvings) {
  const int less = std::clamp(halvings, 0, 32) * kScoreSteps;
  for (size_t i = 0; i < count; ++i) scores[i] = uint8_t(std::max(int(scores[i]) - less, 0));
}

// Time, in lookups.
class ScoreClock {
 public:
  ScoreClock(int64_t half_life) : half_life_(std::max<int64_t>(half_life, 1)) {}
  int now() const { return kRequestScore + int(kScoreSteps * lookups_ / half_life_); }
  // Returns how often scores are to be lowered.
  int pass(int64_t lookups) {
    lookups_ += lookups;
    const int64_t halvings = lookups_ / half_life_;
    lookups_ %= half_life_;
    return int(std::min<int64_t>(halvings, 32));
  }
  // From now on; the part of a half-life that has passed stays.
  void set(int64_t half_life) {
    half_life = std::max<int64_t>(half_life, 1);
    lookups_ = int64_t(double(lookups_) / double(half_life_) * double(half_life));
    lookups_ = std::min(lookups_, half_life - 1);
    half_life_ = half_life;
  }

 private:
  int64_t half_life_, lookups_ = 0;
};

}  // namespace meseta
