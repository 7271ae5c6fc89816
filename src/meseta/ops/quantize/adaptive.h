// Search for the range with the smallest squared error, for sixteen rows at a time, one per lane.
//
// As in Check-N-Run (Eisenman et al., NSDI 2022, section 5), small steps move either end inwards, always the one with the
// smaller error, and the best range on the way is kept. Then scale and offset are fitted to the codes by least squares,
// and codes to them, as Lloyd's method does for a free codebook. All candidates are grids that can be recovered from a
// dequantized row (grid.h): scale and offset are halves, and no level is rounded.
#pragma once

#include <cstdint>

#include "ops/quantize/grid.h"
#include "ops/simd.h"

namespace meseta {

constexpr float kBins = 32;  // The range divided by the step.
constexpr int kSteps = 16;   // Covers half of the range.
constexpr int kFits = 3;

// Candidates for sixteen rows.
struct RangeCandidate {
  Vec scale, offset, error;
};

inline RangeCandidate choose(Vec positive, const RangeCandidate& a, const RangeCandidate& b) {
  return {where_positive(positive, a.scale, b.scale), where_positive(positive, a.offset, b.offset),
          where_positive(positive, a.error, b.error)};
}

class AdaptiveRange {
 public:
  // `columns` has value c of row r at 16 * c + r.
  AdaptiveRange(const float* columns, int64_t dim, const QuantizationGrid& grid)
      : columns_(columns), dim_(dim), top_(broadcast(float(grid.top))) {
    low_ = high_ = load(columns);
    for (int64_t c = 1; c < dim; ++c) {
      low_ = minimum(low_, column(c));
      high_ = maximum(high_, column(c));
    }
    unit_ = maximum(power_part(maximum(abs(low_), abs(high_))) * broadcast(grid.part), broadcast(grid.smallest));
  }

  RangeCandidate search() const {
    RangeCandidate best = narrow();
    for (int i = 0; i < kFits; ++i) {
      const RangeCandidate next = fit(best);
      best = choose(best.error - next.error, next, best);
    }
    return best;
  }

 private:
  const float* columns_;
  int64_t dim_;
  Vec top_, low_, high_, unit_;

  Vec column(int64_t c) const { return load(columns_ + kLanes * c); }
  Vec code(Vec steps) const {
    const Vec shift = broadcast(0x1.8p23f);
    return (clamp(steps, zero(), top_) + shift) - shift;
  }
  // Round to a half, with fewer bits if levels would be rounded otherwise.
  Vec half(Vec value) const {
    const Vec shift = maximum(power_part(value) * broadcast(0x1p-10f), unit_) * broadcast(0x1.8p23f);
    return (value + shift) - shift;
  }

  RangeCandidate measure(Vec scale, Vec offset) const {
    scale = maximum(half(scale), unit_);
    const Vec inverse = broadcast(1.0f) / scale;
    Vec error = zero();
    for (int64_t c = 0; c < dim_; ++c) {
      const Vec steps = (column(c) - offset) * inverse, rest = steps - code(steps);
      error = error + rest * rest;
    }
    return {scale, offset, error * scale * scale};
  }
  RangeCandidate between(Vec low, Vec high) const {
    const Vec offset = half(low);
    return measure((high - offset) / top_, offset);
  }

  RangeCandidate narrow() const {
    Vec low = low_, high = high_;
    const Vec step = (high - low) * broadcast(1 / kBins);
    RangeCandidate best = between(low, high);
    for (int i = 0; i < kSteps; ++i) {
      const Vec above = low + step, below = high - step;
      const RangeCandidate up = between(above, high), down = between(low, below);
      const Vec upper = down.error - up.error;
      low = where_positive(upper, above, low);
      high = where_positive(upper, high, below);
      const RangeCandidate next = choose(upper, up, down);
      best = choose(best.error - next.error, next, best);
    }
    return best;
  }

  // Fit a line to values over codes. It may leave the range by at most an eighth of its width.
  RangeCandidate fit(const RangeCandidate& from) const {
    const Vec inverse = broadcast(1.0f) / from.scale, count = broadcast(float(dim_));
    Vec codes = zero(), squares = zero(), values = zero(), products = zero();
    for (int64_t c = 0; c < dim_; ++c) {
      const Vec value = column(c) - from.offset, q = code(value * inverse);
      codes = codes + q;
      squares = squares + q * q;
      values = values + value;
      products = products + q * value;
    }
    const Vec spread = count * squares - codes * codes, slope = (count * products - codes * values) / spread;
    const Vec margin = (high_ - low_) * broadcast(0.125f);
    const Vec scale = where_positive(spread, where_positive(slope, slope, from.scale), from.scale);
    const Vec start = from.offset + (values - scale * codes) / count;
    const Vec offset = half(clamp(start, maximum(low_ - margin, broadcast(-65504.0f)), high_));
    return measure(clamp(scale, zero(), (high_ + margin - offset) / top_), offset);
  }
};

}  // namespace meseta
