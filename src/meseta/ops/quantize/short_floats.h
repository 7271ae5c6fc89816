// Floats of 8 and 16 bits, to the nearest or to one of two neighbours by random bits, and back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/simd.h"

namespace meseta {

// Sign, exponent and mantissa of a short float whose bits are those of a whole number in the order of its values.
struct Short {
  int mantissa, smallest_exponent;
  uint32_t sign, largest;  // codes; above `largest` a value is infinite, or saturates to it
};
constexpr Short kShortE4m3{3, -6, 0x80, 0x7E}, kShortE5m2{2, -14, 0x80, 0x7B}, kShortHalf{10, -14, 0x8000, 0x7C00},
    kShortBfloat{7, -126, 0x8000, 0x7F80};

inline float power_of_two(int exponent) { return bits_to_float(uint32_t(exponent + 127) << 23); }  // -126..127

// Both take values within +-2^22. They are sums and signs of differences, without a comparison of floats, of which gcc makes
// branches; and what the C library has is a call per number without SSE4.1.
// To the nearest whole number, ties to even.
struct Nearest {
  float operator()(float value, int64_t) const { return (value + 0x1.8p23f) - 0x1.8p23f; }
};
// Up where the random bits, as a fraction, lie below the value's.
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
