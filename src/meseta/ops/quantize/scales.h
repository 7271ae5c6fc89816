// Scale and offset of rows in int8, int4, int3 and int2, from the range of their values, and conversion to halves.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/checks.h"
#include "ops/quantize/short_floats.h"
#include "ops/simd.h"

namespace meseta {

struct Scales {
  float scale, offset;
};

inline uint16_t half_bits(float value) {
  if (std::isnan(value)) return 0x7E00;
  if (std::isinf(value)) return value < 0 ? 0xFC00 : 0x7C00;
  return uint16_t(to_short(value, kShortHalf, Nearest{}, 0));
}

inline float to_half(float value) { return to_float(Half{half_bits(value)}); }

struct ValueRange {
  float low, high;
  float reach() const { return std::max(std::fabs(low), std::fabs(high)); }
};

// Map float bits to integers with the same order. The compiler vectorizes their comparison.
inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }

inline ValueRange value_range(const float* row, int64_t dim, int64_t index) {
  int32_t lowest = std::numeric_limits<int32_t>::max(), highest = std::numeric_limits<int32_t>::min();
  uint32_t largest = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const uint32_t bits = float_to_bits(row[c]);
    lowest = std::min(lowest, ordered(int32_t(bits)));
    highest = std::max(highest, ordered(int32_t(bits)));
    largest = std::max(largest, bits & 0x7FFFFFFFu);
  }
  if (dim == 0) return {0, 0};
  const float low = bits_to_float(uint32_t(ordered(lowest))), high = bits_to_float(uint32_t(ordered(highest)));
  if (largest >= 0x7F800000u || !std::isfinite(high - low))
    throw_invalid_argument("row ", index, " has a non-finite value or range; fix the row, or use fp16 or bf16");
  return {low + 0.0f, high + 0.0f};  // Adding 0 removes the sign of zero.
}

}  // namespace meseta
