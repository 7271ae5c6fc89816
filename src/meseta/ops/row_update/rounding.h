// Stochastic rounding of float rows to 16 bits: to one of the two neighbors, such that the mean is the exact value.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/philox.h"
#include "ops/simd.h"

namespace meseta {

// Generate 16 random bits for each of `width` columns (a multiple of 8) of each row. The counter is (row, column / 8,
// step), and its four words are the bits of eight columns.
inline void random_16_bits(uint64_t key, uint32_t step, const int64_t* rows, int64_t num_rows, int64_t first_row,
                          int64_t first_column, int64_t width, uint16_t* out) {
  philox_words({key, uint64_t(first_row), uint32_t(first_column / 8), step}, rows, num_rows, width / 8, out);
}

// ---- One number

// Add random bits below the mantissa and truncate. Infinities and NaN are kept.
inline Bfloat round_to(Bfloat, float value, uint16_t random) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + random) >> 16, whole = bits >> 16 | ((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x40u : 0u);
  return {uint16_t((bits & 0x7F800000u) == 0x7F800000u ? whole : rounded)};
}

inline Half round_to(Half, float value, uint16_t random16) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  const uint32_t random = random16 >> 3;  // A half drops 13 bits.
  const uint32_t normal = std::min((magnitude + random - 0x38000000u) >> 13, 0x7C00u);
  // Subnormal halves are multiples of 2^-24. The conversion to int truncates.
  const float scaled = bits_to_float(std::min(magnitude, 0x38800000u)) * 0x1p24f + float(random) * 0x1p-13f;
  const uint32_t subnormal = uint32_t(int32_t(scaled));
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  return {uint16_t(sign | (magnitude >= 0x7F800000u ? special : finite))};
}

// ---- Sixteen numbers, by the same steps

#if defined(__AVX512F__)

inline __m512i each(uint32_t x) { return _mm512_set1_epi32(int(x)); }
inline __m256i round_bits(Bfloat, __m512i bits, __m512i random) {
  const __m512i magnitude = _mm512_and_si512(bits, each(0x7FFFFFFFu));
  const __m512i rounded = _mm512_mask_add_epi32(bits, _mm512_cmplt_epi32_mask(magnitude, each(0x7F800000u)), bits, random);
  const __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, each(0x7F800000u));
  const __m512i quiet = _mm512_mask_or_epi32(rounded, nan, rounded, each(0x400000u));
  return _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_srli_epi32(kAll, quiet, 16));
}
// The hardware truncates the sum with the random bits to halves. Its subnormals are truncated at the same bit as ours.
inline __m256i round_bits(Half, __m512i bits, __m512i random16) {
  const __m512i magnitude = _mm512_and_si512(bits, each(0x7FFFFFFFu)), random = _mm512_maskz_srli_epi32(kAll, random16, 3);
  const __m512 fraction = _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(kAll, random), _mm512_set1_ps(0x1p-37f));
  const __m512i subnormal = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(magnitude), fraction));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(magnitude, each(0x38800000u));
  __m512i sum = _mm512_mask_mov_epi32(_mm512_add_epi32(magnitude, random), is_small, subnormal);
  sum = _mm512_mask_mov_epi32(sum, _mm512_cmpge_epu32_mask(sum, each(0x47800000u)), each(0x7F800000u));
  sum = _mm512_mask_mov_epi32(sum, _mm512_cmpgt_epi32_mask(magnitude, each(0x7F800000u)), each(0x7FC00000u));
  const __m512i with_sign = _mm512_or_si512(sum, _mm512_and_si512(bits, each(0x80000000u)));
  return _mm512_maskz_cvt_roundps_ph(kAll, _mm512_castsi512_ps(with_sign), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
template <typename T>
inline void round_vector(Vec v, const uint16_t* random, T* out) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(random));
  const __m256i rounded = round_bits(T{}, _mm512_castps_si512(v.v), _mm512_maskz_cvtepu16_epi32(kAll, halves));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounded);
}

#elif defined(__AVX2__)

inline __m256i each(uint32_t x) { return _mm256_set1_epi32(int(x)); }
inline __m256i round_bits(Bfloat, __m256i bits, __m256i random) {
  const __m256i magnitude = _mm256_and_si256(bits, each(0x7FFFFFFFu));
  const __m256i finite = _mm256_cmpgt_epi32(each(0x7F800000u), magnitude);
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, each(0x7F800000u));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_and_si256(finite, random));
  return _mm256_srli_epi32(_mm256_or_si256(rounded, _mm256_and_si256(nan, each(0x400000u))), 16);
}
inline __m256i round_bits(Half, __m256i bits, __m256i random16) {
  const __m256i magnitude = _mm256_and_si256(bits, each(0x7FFFFFFFu));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 16), each(0x8000u));
  const __m256i random = _mm256_srli_epi32(random16, 3);
  const __m256i moved = _mm256_sub_epi32(_mm256_add_epi32(magnitude, random), each(0x38000000u));
  const __m256i normal = _mm256_min_epu32(_mm256_srli_epi32(moved, 13), each(0x7C00u));
  const __m256 small = _mm256_castsi256_ps(_mm256_min_epu32(magnitude, each(0x38800000u)));
  const __m256 fraction = _mm256_mul_ps(_mm256_cvtepi32_ps(random), _mm256_set1_ps(0x1p-13f));
  const __m256 scaled = _mm256_add_ps(_mm256_mul_ps(small, _mm256_set1_ps(0x1p24f)), fraction);
  const __m256i is_small = _mm256_cmpgt_epi32(each(0x38800000u), magnitude);
  const __m256i finite = _mm256_blendv_epi8(normal, _mm256_cvttps_epi32(scaled), is_small);
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, each(0x7F800000u));
  const __m256i special = _mm256_add_epi32(each(0x7C00u), _mm256_and_si256(nan, each(0x200u)));
  const __m256i is_finite = _mm256_cmpgt_epi32(each(0x7F800000u), magnitude);
  return _mm256_or_si256(sign, _mm256_blendv_epi8(special, finite, is_finite));
}
template <typename T>
inline void round_vector(Vec v, const uint16_t* random, T* out) {
  const auto eight = [&](__m256 x, const uint16_t* bits) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bits)));
    return round_bits(T{}, _mm256_castps_si256(x), wide);
  };
  const __m256i packed = _mm256_packus_epi32(eight(v.lo, random), eight(v.hi, random + 8));  // 0..3, 8..11, 4..7, 12..15.
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(packed, 0xD8));
}

#else

template <typename T>
inline void round_vector(Vec v, const uint16_t* random, T* out) {
  for (int i = 0; i < kLanes; ++i) out[i] = round_to(T{}, v.x[i], random[i]);
}

#endif

// Round the first `lanes` numbers. `random` has all sixteen.
template <typename T>
inline void round_part(Vec v, const uint16_t* random, T* out, int lanes) {
  T rounded[kLanes];
  round_vector(v, random, rounded);
  std::copy_n(rounded, lanes, out);
}

// `values` and `random` are whole vectors. Nothing is written after column `dim` of `out`, a row of a table.
template <typename T>
inline void round_row(const float* values, const uint16_t* random, T* out, int64_t dim) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) round_vector(load(values + c), random + c, out + c);
  if (c < dim) round_part(load(values + c), random + c, out + c, int(dim - c));
}

}  // namespace meseta
