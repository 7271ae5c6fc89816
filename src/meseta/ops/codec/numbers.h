// Encoding of numbers: blocks of sixteen with a common scale, or single numbers in 16 bits. See reference.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ops/quantize/short_floats.h"
#include "ops/simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace meseta {

enum CodecIndex { kFp32, kFp16, kBf16, kFp8, kInt8 };  // In the order of meseta.spec.codecs.CODECS.

constexpr uint32_t kMagnitude = 0x7FFFFFFFu, kInfinite = 0x7F800000u;
constexpr uint16_t kNanHalf = 0x7E00, kNanBfloat = 0x7FC0;  // Every NaN becomes this one, because processors differ.

// ---- As many numbers as fit into a register

#if defined(__AVX512F__)
constexpr int kFloats = 16;
#elif defined(__AVX2__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kFloats)));
typedef int32_t Ints __attribute__((vector_size(4 * kFloats)));
typedef uint32_t Words __attribute__((vector_size(4 * kFloats)));

template <typename V, typename T>
inline V load_lanes(const T* from) {
  V lanes;
  std::memcpy(&lanes, from, sizeof(V));
  return lanes;
}
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Ints truncate(Floats x) { return __builtin_convertvector(x, Ints); }
inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }
inline Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
inline Ints every(int32_t x) { return x - Ints{}; }

inline int32_t largest_lane(Ints a) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m512i wide = __m512i(a);
  const __m256i eight = _mm256_max_epi32(_mm512_castsi512_si256(wide), _mm512_maskz_extracti64x4_epi64(0xFF, wide, 1));
#else
  const __m256i eight = __m256i(a);
#endif
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
#else
  return std::max(std::max(a[0], a[1]), std::max(a[2], a[3]));
#endif
}

// Round to whole numbers as short_floats.h does, many at a time.
inline Ints whole(Floats value, Nearest, int) { return Ints(value + 0x1.8p23f) - 0x4B400000; }
inline Ints whole(Floats value, Stochastic round, int lane) {
  const Ints near = truncate(value), down = near - Ints(Words(value - to_floats(near)) >> 31);
  const Words bits = load_lanes<Words>(round.bits + lane);
  const Floats fraction = to_floats(Ints(bits >> 8)) * 0x1p-24f;
  return down + Ints(Words(fraction - (value - to_floats(down))) >> 31);
}

// Return codes of a short float. kLowest is the biased float exponent of its smallest normal number. No quotient may
// exceed its largest number.
template <int kMantissa, int kLowest, typename Round>
inline Ints short_codes(Floats value, Round round, int lane) {
  const Ints bits = Ints(value), exponent = larger(bits >> 23 & 0xFF, every(kLowest));
  const Floats shift = Floats((every(254 + kMantissa) - exponent) << 23);  // Leaves the mantissa after the leading bit.
  return ((exponent - kLowest) << kMantissa) + whole(Floats(bits & int32_t(kMagnitude)) * shift, round, lane);
}

template <int kCodec, typename Round>
inline Ints to_codes(Floats quotient, Round round, int lane) {
  if constexpr (kCodec == kFp8)
    return smaller(short_codes<3, 121>(quotient, round, lane), every(0x7E)) | (Ints(quotient) >> 24 & 0x80);
  // A quotient may be slightly above 127 if the scale is a subnormal number.
  return smaller(larger(whole(quotient, round, lane), every(-127)), every(127));
}

// ---- A block of sixteen numbers in 8 bits

inline void narrow(const int32_t* wide, uint8_t* codes) {
#if defined(__SSE2__) && !defined(__AVX512F__)
  const auto lower = [&](int i) {
    return _mm_and_si128(_mm_load_si128(reinterpret_cast<const __m128i*>(wide + i)), _mm_set1_epi32(0xFF));
  };
  const __m128i first = _mm_packs_epi32(lower(0), lower(4)), second = _mm_packs_epi32(lower(8), lower(12));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(first, second));
#else
  for (int i = 0; i < kLanes; ++i) codes[i] = uint8_t(wide[i]);
#endif
}

// Encode a block and return the bits of its scale. The scale is rounded up to a bfloat16. Quotients are then within the
// range of the codec, unless the scale is subnormal.
template <int kCodec, typename Round>
inline uint16_t encode_block(const float* __restrict from, float scale, Round round, uint8_t* __restrict codes) {
  constexpr float kLargest = kCodec == kFp8 ? 448.0f : 127.0f;
  Floats values[kLanes / kFloats];
  Ints most{};
  for (int i = 0; i < kLanes / kFloats; ++i) {
    values[i] = load_lanes<Floats>(from + i * kFloats) * scale;
    most = larger(most, Ints(values[i]) & int32_t(kMagnitude));
  }
  const uint32_t largest = uint32_t(largest_lane(most));
  if (largest == 0 || largest >= kInfinite) {
    std::memset(codes, 0, kLanes);
    return largest == 0 ? 0 : kNanBfloat;
  }
  const uint32_t exact = float_to_bits(bits_to_float(largest) / kLargest), up = std::max((exact + 0xFFFFu) >> 16, 1u);
  const float unit = bits_to_float(up << 16);
  // Collect codes in local memory. Stores of bytes may alias anything, which would prevent vectorization.
  alignas(64) int32_t wide[kLanes];
  for (int i = 0; i < kLanes / kFloats; ++i) {
    const Ints some = to_codes<kCodec>(values[i] / unit, round, i * kFloats);
    std::memcpy(wide + i * kFloats, &some, sizeof(some));
  }
  narrow(wide, codes);
  return uint16_t(up);
}

template <int kCodec>
inline float decode_number(uint8_t code) {
  if constexpr (kCodec == kInt8) return float(int8_t(code));
  // Select by masks. gcc generates branches for a selection between floating-point results, which may trap.
  const uint32_t magnitude = code & 0x7Fu, sign = uint32_t(code & 0x80u) << 24;
  const uint32_t normal = (magnitude << 20) + (120u << 23), small = float_to_bits(float(int32_t(magnitude)) * 0x1p-9f);
  const uint32_t is_small = 0u - uint32_t(magnitude < 8), is_nan = 0u - uint32_t(magnitude == 0x7F);
  return bits_to_float((small & is_small) | (normal & ~is_small) | (0x7FC00000u & is_nan) | sign);
}

// ---- Sixteen numbers in 16 bits

inline uint16_t to_bf16_bits(float value) {
  const uint32_t bits = float_to_bits(value), rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
  return (bits & kMagnitude) > kInfinite ? kNanBfloat : uint16_t(rounded);
}

// Convert to halves. Numbers must be at most 65504 in magnitude, infinite, or the quiet NaN without a sign.
inline void to_fp16_bits(const float* __restrict from, uint16_t* __restrict out) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_maskz_cvtps_ph(kAll, _mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), halves);
#elif defined(__AVX2__)
  for (int i = 0; i < kLanes; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; i += kFloats) {
    const Floats values = load_lanes<Floats>(from + i);
    const Ints bits = Ints(values), magnitude = bits & int32_t(kMagnitude), infinite = every(int32_t(kInfinite));
    const Ints finite = short_codes<10, 113>(Floats(magnitude < infinite ? bits : Ints{}), Nearest{}, i);
    const Ints special = magnitude == infinite ? every(0x7C00) : every(kNanHalf);
    const Ints some = (magnitude < infinite ? finite : special) | (magnitude > infinite ? Ints{} : bits >> 16 & 0x8000);
    for (int lane = 0; lane < kFloats; ++lane) out[i + lane] = uint16_t(some[lane]);
  }
#endif
}

// Factors applied to numbers before rounding.
struct Factors {
  float scale;
  float power;  // A power of two, for fp16.
};

// Encode as halves. Returns how many finite numbers were too large.
inline int encode_halves(const float* __restrict from, const Factors& factors, uint16_t* __restrict out) {
  constexpr float kLargest = 65504.0f;
  float clamped[kLanes];
  int beyond = 0;
  for (int i = 0; i < kLanes; ++i) {
    const float value = from[i] * factors.scale, scaled = value * factors.power;
    const uint32_t bits = float_to_bits(value), magnitude = bits & kMagnitude;
    const bool is_beyond = magnitude < kInfinite && std::fabs(scaled) > kLargest;
    const float most = bits_to_float(float_to_bits(kLargest) | (bits & ~kMagnitude));
    beyond += is_beyond;
    clamped[i] = magnitude > kInfinite ? bits_to_float(0x7FC00000u) : is_beyond ? most : scaled;
  }
  to_fp16_bits(clamped, out);
  return beyond;
}

template <int kCodec>
inline int encode_16(const float* __restrict from, const Factors& factors, uint16_t* __restrict out) {
  if constexpr (kCodec == kFp16) return encode_halves(from, factors, out);
  for (int i = 0; i < kLanes; ++i) out[i] = to_bf16_bits(from[i] * factors.scale);
  return 0;
}

}  // namespace meseta
