// Floats of 8 and 16 bits, rounded to nearest or stochastically.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/simd.h"

namespace meseta {

// Sign, exponent and mantissa of a short float. Its codes, read as integers, have the order of the values.
struct Short {
  int mantissa, smallest_exponent;
  uint32_t sign, largest;  // Codes. Values above `largest` become infinite, or saturate to it.
};
constexpr Short kShortE4m3{3, -6, 0x80, 0x7E}, kShortE5m2{2, -14, 0x80, 0x7B}, kShortHalf{10, -14, 0x8000, 0x7C00},
    kShortBfloat{7, -126, 0x8000, 0x7F80};

inline float power_of_two(int exponent) { return bits_to_float(uint32_t(exponent + 127) << 23); }  // For -126..127.

// Both roundings need values within +-2^22. They use sums and signs of differences instead of comparisons of floats, for
// which gcc generates branches. Without SSE4.1, functions of the C library would be a call per number.
//
// Round to nearest, ties to even.
struct Nearest {
  float operator()(float value, int64_t) const { return (value + 0x1.8p23f) - 0x1.8p23f; }
};
// Round up if the random bits, as a fraction, are below the fractional part of the value.
struct Stochastic {
  const uint32_t* bits;
  float operator()(float value, int64_t column) const {
    const int32_t cut = int32_t(value), down = cut - int32_t(float_to_bits(value - float(cut)) >> 31);
    const float fraction = float(int32_t(bits[column] >> 8)) * 0x1p-24f;
    return float(down + int32_t(float_to_bits(fraction - (value - float(down))) >> 31));
  }
};

template <typename Round>
inline uint32_t to_short(float value, const Short& form, const Round& round, int64_t column) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 31 ? form.sign : 0;
  const int exponent = std::max(int(bits >> 23 & 0xFF) - 127, form.smallest_exponent);
  const int step = exponent - form.mantissa, half = step / 2;
  const float scaled = std::fabs(value) * power_of_two(-half) * power_of_two(half - step);
  const uint32_t code = (uint32_t(exponent - form.smallest_exponent) << form.mantissa) + uint32_t(int32_t(round(scaled, column)));
  return sign | std::min(code, form.largest);
}

inline float from_short(uint32_t code, const Short& form) {
  const uint32_t magnitude = code & (form.sign - 1), field = magnitude >> form.mantissa;
  const uint32_t fraction = magnitude & ((1u << form.mantissa) - 1);
  const float whole = float(field ? fraction | 1u << form.mantissa : fraction);
  const float value = whole * power_of_two(int(std::max(field, 1u)) - 1 + form.smallest_exponent - form.mantissa);
  return code & form.sign ? -value : value;
}

}  // namespace meseta
