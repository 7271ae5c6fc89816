// Float rows cut to 16 bits: to one of the two neighbours, the nearer one more often, so that the mean is right.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/simd.h"

namespace meseta {

// Sixteen Philox4x32-10 generators side by side; words[k][i] is word k of counter i.
struct Philox16 {
  uint32_t words[4][kLanes];
  void run(uint64_t key) {
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int i = 0; i < kLanes; ++i) {
        const uint64_t p0 = uint64_t{words[0][i]} * 0xD2511F53u, p1 = uint64_t{words[2][i]} * 0xCD9E8D57u;
        words[0][i] = uint32_t(p1 >> 32) ^ words[1][i] ^ k0;
        words[1][i] = uint32_t(p1);
        words[2][i] = uint32_t(p0 >> 32) ^ words[3][i] ^ k1;
        words[3][i] = uint32_t(p0);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
};

// 16 random bits for each of `width` columns (a multiple of 16) of each row: the counter is (row, column / 8, step),
// and its four words are the bits of eight columns.
inline void random_halves(uint64_t key, uint32_t step, const int64_t* rows, int64_t num_rows, int64_t first_row,
                          int64_t first_column, int64_t width, uint16_t* out) {
  const int64_t groups = width / 8, count = num_rows * groups;
  const uint32_t first_group = uint32_t(first_column / 8);
  int64_t row = 0, group = 0;
  for (int64_t at = 0; at < count; at += kLanes) {
    Philox16 generator;
    const int lanes = int(std::min<int64_t>(kLanes, count - at));
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t logical = uint64_t(first_row) + uint64_t(rows[row]);
      generator.words[0][i] = uint32_t(logical);
      generator.words[1][i] = uint32_t(logical >> 32);
      generator.words[2][i] = first_group + uint32_t(group);
      generator.words[3][i] = step;
      if (i + 1 < lanes && ++group == groups) group = 0, ++row;
    }
    if (++group == groups) group = 0, ++row;
    generator.run(key);
    uint32_t words[4 * kLanes];
    for (int i = 0; i < kLanes; ++i)
      for (int k = 0; k < 4; ++k) words[4 * i + k] = generator.words[k][i];
    std::memcpy(out + at * 8, words, size_t(lanes) * 16);
  }
}

// Random bits below the kept mantissa, then a cut; infinities and NaN stay what they are.
inline uint16_t round_to_bfloat(float value, uint16_t random) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + random) >> 16, whole = bits >> 16 | ((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x40u : 0u);
  return uint16_t((bits & 0x7F800000u) == 0x7F800000u ? whole : rounded);
}

inline uint16_t round_to_half(float value, uint16_t random16) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  const uint32_t random = random16 >> 3;  // a half drops 13 bits
  const uint32_t normal = std::min((magnitude + random - 0x38000000u) >> 13, 0x7C00u);
  // Subnormal halves are multiples of 2^-24, whatever the float's exponent. The cut to int is towards zero.
  const float scaled = bits_to_float(std::min(magnitude, 0x38800000u)) * 0x1p24f + float(random) * 0x1p-13f;
  const uint32_t subnormal = uint32_t(int32_t(scaled));
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  return uint16_t(sign | (magnitude >= 0x7F800000u ? special : finite));
}

inline void round_rows(const float* values, const uint16_t* random, Bfloat* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i].bits = round_to_bfloat(values[i], random[i]);
}
inline void round_rows(const float* values, const uint16_t* random, Half* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i].bits = round_to_half(values[i], random[i]);
}
}  // namespace meseta
