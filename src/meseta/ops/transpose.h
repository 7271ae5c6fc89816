// Transposes of 16 x 16 floats, which convert between rows and columns of samples. They move bits and compute nothing.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "ops/simd.h"

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace meseta {

// Memory for rows of sixteen lanes.
struct alignas(64) Line {
  float x[kLanes];
};
inline float* lines(std::vector<Line>& memory) { return reinterpret_cast<float*>(memory.data()); }

// Round to nearest, ties to even.
inline Bfloat to_bfloat(float value) {
  const uint32_t bits = float_to_bits(value), rounded = bits + 0x7FFFu + (bits >> 16 & 1u);
  return {uint16_t(value != value ? 0x7FC0u : rounded >> 16)};
}

// Write `count` floats, at most sixteen, in the type of the destination.
inline void write(float* to, const float* from, int64_t count) { std::memcpy(to, from, size_t(count) * sizeof(float)); }
inline void write(Bfloat* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_bfloat(from[i]);
}

// Set to[c * to_stride + r] = from[r * from_stride + c] for r and c in 0..15.
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#if defined(__AVX512F__)
  for (int c = 0; c < 16; c += 4) {
    // Vector r has rows r, r + 4, r + 8 and r + 12, so that 4 x 4 transposes within 128-bit lanes are sufficient.
    const auto four = [&](int r) {
      const float* p = from + r * from_stride + c;
      const int64_t step = 4 * from_stride;
      __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(p));
      v = _mm512_insertf32x4(v, _mm_loadu_ps(p + step), 1);
      v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 2 * step), 2);
      return _mm512_insertf32x4(v, _mm_loadu_ps(p + 3 * step), 3);
    };
    const __m512 a = four(0), b = four(1), d = four(2), e = four(3);
    // Use the zeroing intrinsics with all lanes set. gcc warns about the undefined source of the plain ones (bug 105593).
    const __m512d ab_low = _mm512_castps_pd(_mm512_maskz_unpacklo_ps(0xFFFF, a, b));
    const __m512d ab_high = _mm512_castps_pd(_mm512_maskz_unpackhi_ps(0xFFFF, a, b));
    const __m512d de_low = _mm512_castps_pd(_mm512_maskz_unpacklo_ps(0xFFFF, d, e));
    const __m512d de_high = _mm512_castps_pd(_mm512_maskz_unpackhi_ps(0xFFFF, d, e));
    _mm512_storeu_ps(to + c * to_stride, _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xFF, ab_low, de_low)));
    _mm512_storeu_ps(to + (c + 1) * to_stride, _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xFF, ab_low, de_low)));
    _mm512_storeu_ps(to + (c + 2) * to_stride, _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xFF, ab_high, de_high)));
    _mm512_storeu_ps(to + (c + 3) * to_stride, _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xFF, ab_high, de_high)));
  }
#elif defined(__SSE__)
  for (int r = 0; r < 16; r += 4) {
    for (int c = 0; c < 16; c += 4) {
      const float* p = from + r * from_stride + c;
      __m128 a = _mm_loadu_ps(p), b = _mm_loadu_ps(p + from_stride);
      __m128 d = _mm_loadu_ps(p + 2 * from_stride), e = _mm_loadu_ps(p + 3 * from_stride);
      _MM_TRANSPOSE4_PS(a, b, d, e);
      float* q = to + c * to_stride + r;
      _mm_storeu_ps(q, a);
      _mm_storeu_ps(q + to_stride, b);
      _mm_storeu_ps(q + 2 * to_stride, d);
      _mm_storeu_ps(q + 3 * to_stride, e);
    }
  }
#else
  for (int c = 0; c < 16; ++c)
    for (int r = 0; r < 16; ++r) to[c * to_stride + r] = from[r * from_stride + c];
#endif
}

// Transpose `rows` x `columns` values of any storage type. The rest of `to` becomes zero.
template <typename T>
inline void transpose_in(const T* from, int64_t from_stride, int rows, int columns, float* to, int64_t to_stride) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (rows == kLanes && columns == kLanes) return transpose(from, from_stride, to, to_stride);
  }
  alignas(64) float square[kLanes * kLanes];
  for (int r = 0; r < kLanes; ++r) {
    Vec row = zero();
    if (r < rows) row = columns == kLanes ? load(from + r * from_stride) : load(from + r * from_stride, columns);
    store(square + kLanes * r, row);
  }
  transpose(square, kLanes, to, to_stride);
}

}  // namespace meseta
