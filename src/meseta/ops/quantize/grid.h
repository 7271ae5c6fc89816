// Detection of rows that are on a grid already, as all rows that were quantized and dequantized are.
//
// A row is on a grid if every value is offset + code * scale without rounding. The result depends only on the values of
// the row. The adaptive range is chosen such that its rows are on a grid. Bytes therefore do not change, however often a
// row is dequantized and quantized.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include "ops/quantize/scales.h"

namespace meseta {

// Codes 0..top, and the numbers that scale and offset may be: halves, or any float. Levels are multiples of `smallest`
// and of `part` times the largest power of two in the row, so that the type of the rows represents every level.
struct QuantizationGrid {
  int top;
  bool halves;
  float part, smallest;
  float largest;  // Maximum magnitude of a value.
  bool holds(double value) const {
    if (std::fabs(value) > double(halves ? 65504.0f : std::numeric_limits<float>::max())) return false;
    const float narrow = float(value);
    return double(narrow) == value && (!halves || to_half(narrow) == narrow);
  }
};

template <typename T>
QuantizationGrid make_grid(int bits) {
  const bool halves = bits < 8;
  QuantizationGrid grid{(1 << bits) - 1, halves, 0x1p-21f, 0x1p-126f, 0x1p126f};
  if (halves) grid = {grid.top, halves, 0x1p-22f, 0x1p-24f, 65504.0f};
  if (sizeof(T) == 2) grid.part = std::is_same_v<T, Half> ? 0x1p-9f : 0x1p-6f;
  if (std::is_same_v<T, Half>) grid.smallest = 0x1p-24f;
  if (std::is_same_v<T, Half> || (sizeof(T) == 2 && halves)) grid.largest = 0x1p15f;  // No level may become infinite.
  return grid;
}

inline float nearest_code(float value, const Scales& scales, float inverse, float top) {
  return Nearest{}(std::min(std::max((value - scales.offset) * inverse, 0.0f), top), 0);
}

// Return the largest power of two that is at most `reach`, times `part`, and at least `smallest`.
inline float level_unit(float reach, float part, float smallest) {
  return std::max(bits_to_float(float_to_bits(reach) & 0x7F800000u) * part, smallest);
}

// Return scales for a row of equal values, whose codes are all 1. With halves, offset and scale together have 22 bits.
inline Scales constant_scales(float value, const QuantizationGrid& grid) {
  if (!grid.halves) return {0, value};
  Scales scales{0, value};
  for (int turn = 0; turn < 2; ++turn) {  // The remainder may round up to the next half. Its remainder is then 0.
    const float whole = scales.offset + scales.scale;
    uint16_t below = half_bits(whole);
    if (to_float(Half{below}) > whole) below = below == 0 ? 0x8001 : below & 0x8000 ? below + 1 : below - 1;
    const float offset = to_float(Half{below});
    scales = {to_half(whole - offset), offset + 0.0f};
  }
  return scales;
}

// Return the greatest step that divides `distance` and the distances of all values from `low`, in `unit`s. It is 0 if
// the row would need more than `top` steps.
inline int64_t common_step(const float* row, int64_t dim, double low, double unit, int64_t distance, int top) {
  int64_t step = distance;
  for (int64_t c = 0; c < dim; ++c) {
    const double units = (double(row[c]) - low) / unit;
    int64_t rest = int64_t(units);
    if (double(rest) != units) return 0;
    while (rest != 0) {
      if (rest * top < distance) return 0;
      const int64_t next = step % rest;
      step = rest;
      rest = next;
    }
  }
  return step;
}

inline std::optional<Scales> grid_scales(const float* row, int64_t dim, const ValueRange& span, const QuantizationGrid& grid) {
  if (span.low == span.high) {
    if (span.reach() > grid.largest) return std::nullopt;
    return constant_scales(span.low, grid);
  }
  const double low = span.low, unit = level_unit(span.reach(), 0x1p-23f, grid.smallest);
  const double distance = (double(span.high) - low) / unit;
  if (double(int64_t(distance)) != distance) return std::nullopt;
  const int64_t step = common_step(row, dim, low, unit, int64_t(distance), grid.top);
  if (step == 0 || int64_t(distance) > step * grid.top) return std::nullopt;
  const int highest = int(int64_t(distance) / step);
  // Try fractions of the step, starting at the lowest value or some steps below. Use the first that is representable.
  const int parts = grid.halves ? grid.top / highest : 1;
  for (int part = 1; part <= parts; ++part) {
    const double scale = double(step) * unit / part;
    if (!grid.holds(scale)) continue;
    for (int below = 0; below <= (grid.halves ? grid.top - highest * part : 0); ++below) {
      const double offset = low - below * scale;
      if (!grid.holds(offset)) continue;
      const Scales scales{float(scale), float(offset)};
      const float inverse = 1.0f / scales.scale;
      bool exact = true;
      for (int64_t c = 0; c < dim; ++c)
        exact &= nearest_code(row[c], scales, inverse, float(grid.top)) * scales.scale + scales.offset == row[c];
      if (exact) return scales;
      return std::nullopt;
    }
  }
  return std::nullopt;
}

}  // namespace meseta
