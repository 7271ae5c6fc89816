// Scores of rows, one byte each. A score is the number of requests of a row, with less weight for older requests.
//
//   score     0   1   ...   192 ..... 199   ...   255       8 steps are a factor of two
//           never             one request        many requests
//
// The score of a request rises with time, so that old scores need not be lowered in each step. After each half-life all
// scores are lowered by 8.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace meseta {

constexpr int kScoreSteps = 8;
constexpr int kRequestScore = 24 * kScoreSteps;  // Score of a request directly after scores were lowered.

// Increase of the larger of two scores that differ by d, when they are added.
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

// Time in lookups.
class ScoreClock {
 public:
  ScoreClock(int64_t half_life) : half_life_(std::max<int64_t>(half_life, 1)) {}
  int now() const { return kRequestScore + int(kScoreSteps * lookups_ / half_life_); }
  // Advance the clock. Returns by how many half-lives all scores must be lowered.
  int pass(int64_t lookups) {
    lookups_ += lookups;
    const int64_t halvings = lookups_ / half_life_;
    lookups_ %= half_life_;
    return int(std::min<int64_t>(halvings, 32));
  }
  // Change the half-life. The elapsed fraction of a half-life is kept.
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
