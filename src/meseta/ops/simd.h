// Sixteen float lanes for every instruction set: one AVX-512 register, two AVX2 registers, or plain loops. There is no
// fused multiply-add, and lanes are summed as a fixed tree, so that all three give bitwise identical results.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace meseta {

constexpr int kLanes = 16;

// Storage types of rows other than float.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

// ---- One number

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float to_float(float value) { return value; }
inline float to_float(Bfloat value) { return bits_to_float(uint32_t(value.bits) << 16); }
inline float to_float(Half value) {
  // A multiplication adjusts the exponent. It is exact, also for subnormal halves.
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return bits_to_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
}
// Convert a float that is exactly representable as a half. Other floats are rounded towards zero.
inline Half to_half_exact(float value) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {uint16_t(sign | 0x7E00u)};
  if (magnitude >= 0x47800000u) return {uint16_t(sign | 0x7C00u)};  // 2^16 and above.
  if (magnitude < 0x38800000u) return {uint16_t(sign | uint32_t(bits_to_float(magnitude) * 0x1p24f))};
  return {uint16_t(sign | (magnitude - 0x38000000u) >> 13)};
}

// ---- Sixteen numbers

#if defined(__AVX512F__)

struct Vec {
  __m512 v;
};
// Use the zeroing intrinsics with all lanes set. gcc warns about the undefined source of the plain ones (bug 105593).
constexpr __mmask16 kAll = 0xFFFF;
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec widen(__m256i bfloats) {
  const __m512i wide = _mm512_maskz_cvtepu16_epi32(kAll, bfloats);
  return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, wide, 16))};
}
inline Vec load(const Half* p) {
  return {_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec load(const Bfloat* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// Load the first n lanes, with zeros in the others. The access is only as wide as needed: a masked access that crosses
// into the next cache line waits for that line, although all its lanes there are masked. With wide accesses, rows of 4
// numbers took 18 ns instead of 7.
inline Vec load(const float* p, int n) {
  const unsigned mask = (1u << n) - 1;
  if (n <= 4) return {_mm512_zextps128_ps512(_mm_maskz_loadu_ps(__mmask8(mask), p))};
  if (n <= 8) return {_mm512_zextps256_ps512(_mm256_maskz_loadu_ps(__mmask8(mask), p))};
  if (n > 12) return {_mm512_maskz_loadu_ps(__mmask16(mask), p)};
  const __m512 eight = _mm512_zextps256_ps512(_mm256_loadu_ps(p));
  return {_mm512_maskz_insertf32x4(kAll, eight, _mm_maskz_loadu_ps(__mmask8(mask >> 8), p + 8), 2)};
}
inline __m256i load_halves(const void* p, int n) {
  const unsigned mask = (1u << n) - 1;
  if (n == 4) return _mm256_zextsi128_si256(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  if (n <= 8) return _mm256_zextsi128_si256(_mm_maskz_loadu_epi16(__mmask8(mask), p));
  return _mm256_maskz_loadu_epi16(__mmask16(mask), p);
}
inline Vec load(const Half* p, int n) { return {_mm512_maskz_cvtph_ps(kAll, load_halves(p, n))}; }
inline Vec load(const Bfloat* p, int n) { return widen(load_halves(p, n)); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, Vec a, int n) {
  const unsigned mask = (1u << n) - 1;
  if (n <= 4) {
    _mm_mask_storeu_ps(p, __mmask8(mask), _mm512_castps512_ps128(a.v));
  } else if (n <= 8) {
    _mm256_mask_storeu_ps(p, __mmask8(mask), _mm512_castps512_ps256(a.v));
  } else {
    _mm512_mask_storeu_ps(p, __mmask16(mask), a.v);
  }
}
// Store to 64-byte aligned memory, bypassing the caches. Call stream_fence before another thread reads it.
inline void stream(float* p, Vec a) { _mm512_stream_ps(p, a.v); }
inline void stream_fence() { _mm_sfence(); }
inline Vec sqrt(Vec a) { return {_mm512_maskz_sqrt_ps(kAll, a.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec negate(Vec a) {
  return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(int(0x80000000u))))};
}
// NaN in either operand gives NaN, as in torch.maximum.
inline Vec maximum(Vec a, Vec b) {
  return {_mm512_mask_mov_ps(_mm512_maskz_max_ps(kAll, a.v, b.v), _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}
inline Vec minimum(Vec a, Vec b) {
  return {_mm512_mask_mov_ps(_mm512_maskz_min_ps(kAll, a.v, b.v), _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}
// Operands must not be NaN, because its result differs between instruction sets.
inline Vec clamp(Vec a, Vec low, Vec high) {
  return {_mm512_maskz_min_ps(kAll, _mm512_maskz_max_ps(kAll, a.v, low.v), high.v)};
}
// The largest power of two that is at most |a|. It is 0 for subnormal numbers.
inline Vec power_part(Vec a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7F800000)))};
}
inline Vec greater(Vec a, Vec b) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), _mm512_set1_ps(1.0f))};
}
inline Vec where_positive(Vec c, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(c.v, _mm512_setzero_ps(), _CMP_GT_OQ), b.v, a.v)};
}
// Add lanes 0..7 and 8..15, and so on down to one.
inline float sum_lanes(Vec a) {
  const __m256 low = _mm512_maskz_extractf32x8_ps(0xFF, a.v, 0), high = _mm512_extractf32x8_ps(a.v, 1);
  const __m256 eight = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
// Sum the lanes of each of sixteen consecutive vectors. The additions are those of sum_lanes.
inline Vec sum_lanes16(const float* p) {
  const auto at = [p](int i) { return _mm512_loadu_ps(p + 16 * i); };
  __m512 eights[8], fours[4], twos[2];
  for (int i = 0; i < 8; ++i) {  // Eight lanes each of vectors i and i + 8.
    const __m512 a = at(i), b = at(i + 8);
    eights[i] = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(kAll, a, b, 0x44), _mm512_maskz_shuffle_f32x4(kAll, a, b, 0xEE));
  }
  for (int i = 0; i < 4; ++i) {  // Vectors i, i + 8, i + 4, i + 12.
    const __m512 a = eights[i], b = eights[i + 4];
    fours[i] = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(kAll, a, b, 0x88), _mm512_maskz_shuffle_f32x4(kAll, a, b, 0xDD));
  }
  for (int i = 0; i < 2; ++i) {  // Two lanes of vector i, two of i + 2, and so on.
    const __m512 a = fours[i], b = fours[i + 2];
    const __m512d low = _mm512_maskz_unpacklo_pd(0xFF, _mm512_castps_pd(a), _mm512_castps_pd(b));
    const __m512d high = _mm512_maskz_unpackhi_pd(0xFF, _mm512_castps_pd(a), _mm512_castps_pd(b));
    twos[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  }
  const __m512 even = _mm512_maskz_shuffle_ps(kAll, twos[0], twos[1], 0x88);
  const __m512 odd = _mm512_maskz_shuffle_ps(kAll, twos[0], twos[1], 0xDD);
  // Lanes now belong to vectors 0 2 1 3, 8 10 9 11, 4 6 5 7, 12 14 13 15.
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return {_mm512_maskz_permutexvar_ps(kAll, order, _mm512_add_ps(even, odd))};
}

#elif defined(__AVX2__)

struct Vec {
  __m256 lo, hi;
};
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec load(const Half* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline __m256 widen(__m128i eight) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
}
inline Vec load(const Bfloat* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}
template <typename T>
inline Vec load(const T* p, int n) {
  T part[kLanes] = {};
  std::memcpy(static_cast<void*>(part), p, size_t(n) * sizeof(T));
  return load(part);
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(float* p, Vec a, int n) {
  float part[kLanes];
  store(part, a);
  std::memcpy(p, part, size_t(n) * sizeof(float));
}
inline void stream(float* p, Vec a) {
  _mm256_stream_ps(p, a.lo);
  _mm256_stream_ps(p + 8, a.hi);
}
inline void stream_fence() { _mm_sfence(); }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline Vec abs(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline Vec negate(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(sign, a.lo), _mm256_xor_ps(sign, a.hi)};
}
inline __m256 keep_nan(__m256 a, __m256 result) {
  return _mm256_blendv_ps(result, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
inline Vec maximum(Vec a, Vec b) {
  return {keep_nan(a.lo, _mm256_max_ps(a.lo, b.lo)), keep_nan(a.hi, _mm256_max_ps(a.hi, b.hi))};
}
inline Vec minimum(Vec a, Vec b) {
  return {keep_nan(a.lo, _mm256_min_ps(a.lo, b.lo)), keep_nan(a.hi, _mm256_min_ps(a.hi, b.hi))};
}
inline Vec clamp(Vec a, Vec low, Vec high) {
  return {_mm256_min_ps(_mm256_max_ps(a.lo, low.lo), high.lo), _mm256_min_ps(_mm256_max_ps(a.hi, low.hi), high.hi)};
}
inline Vec power_part(Vec a) {
  const __m256 exponent = _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000));
  return {_mm256_and_ps(a.lo, exponent), _mm256_and_ps(a.hi, exponent)};
}
inline Vec greater(Vec a, Vec b) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return {_mm256_and_ps(one, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
          _mm256_and_ps(one, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}
inline Vec where_positive(Vec c, Vec a, Vec b) {
  const __m256 none = _mm256_setzero_ps();
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(c.lo, none, _CMP_GT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(c.hi, none, _CMP_GT_OQ))};
}
inline float sum_lanes(Vec a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#else

struct Vec {
  float x[kLanes];
};
template <typename F>
inline Vec each(F f) {
  Vec out;
  for (int i = 0; i < kLanes; ++i) out.x[i] = f(i);
  return out;
}
inline Vec operator+(Vec a, Vec b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
inline Vec operator-(Vec a, Vec b) { return each([&](int i) { return a.x[i] - b.x[i]; }); }
inline Vec operator*(Vec a, Vec b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
inline Vec operator/(Vec a, Vec b) { return each([&](int i) { return a.x[i] / b.x[i]; }); }
inline Vec zero() { return {}; }
inline Vec broadcast(float x) { return each([&](int) { return x; }); }
template <typename T>
inline Vec load(const T* p) {
  return each([&](int i) { return to_float(p[i]); });
}
template <typename T>
inline Vec load(const T* p, int n) {
  return each([&](int i) { return i < n ? to_float(p[i]) : 0.0f; });
}
inline void store(float* p, Vec a) { std::memcpy(p, a.x, sizeof(a.x)); }
inline void store(float* p, Vec a, int n) { std::memcpy(p, a.x, size_t(n) * sizeof(float)); }
inline void stream(float* p, Vec a) { store(p, a); }
inline void stream_fence() {}
inline Vec sqrt(Vec a) { return each([&](int i) { return std::sqrt(a.x[i]); }); }
inline Vec abs(Vec a) { return each([&](int i) { return std::fabs(a.x[i]); }); }
inline Vec negate(Vec a) { return each([&](int i) { return -a.x[i]; }); }
inline Vec maximum(Vec a, Vec b) {
  return each([&](int i) { return a.x[i] > b.x[i] || a.x[i] != a.x[i] ? a.x[i] : b.x[i]; });
}
inline Vec minimum(Vec a, Vec b) {
  return each([&](int i) { return a.x[i] < b.x[i] || a.x[i] != a.x[i] ? a.x[i] : b.x[i]; });
}
inline Vec clamp(Vec a, Vec low, Vec high) {
  return each([&](int i) {
    const float above = a.x[i] > low.x[i] ? a.x[i] : low.x[i];
    return above < high.x[i] ? above : high.x[i];
  });
}
inline Vec power_part(Vec a) {
  return each([&](int i) { return bits_to_float(float_to_bits(a.x[i]) & 0x7F800000u); });
}
inline Vec greater(Vec a, Vec b) { return each([&](int i) { return a.x[i] > b.x[i] ? 1.0f : 0.0f; }); }
inline Vec where_positive(Vec c, Vec a, Vec b) { return each([&](int i) { return c.x[i] > 0.0f ? a.x[i] : b.x[i]; }); }
inline float sum_lanes(Vec a) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.x[i] += a.x[i + half];
  return a.x[0];
}

#endif

#if !defined(__AVX512F__)
inline Vec sum_lanes16(const float* p) {
  float sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = sum_lanes(load(p + kLanes * i));
  return load(sums);
}
#endif

inline Vec sign(Vec a) { return greater(a, zero()) - greater(zero(), a); }

// Prefetch into the second-level cache, because the first-level cache has too few miss buffers. It is assembly, because
// gcc treats a function that only prefetches as free of effects and drops calls to it.
inline void prefetch(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

// Prefetch memory that will be written.
inline void prefetch_write(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 1, 2);
#endif
}

}  // namespace meseta
