// Sixteen Philox4x32-10 generators side by side, in registers as wide as the instruction set's.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace meseta {

#if defined(__AVX512F__)
constexpr int kWordBytes = 64;
#elif defined(__AVX2__)
constexpr int kWordBytes = 32;
#else
constexpr int kWordBytes = 16;
#endif
// 32-bit words, each the low half of 64 bits; what is above them is never read.
typedef uint64_t Words __attribute__((vector_size(kWordBytes)));

inline Words multiply(Words a, uint64_t factor) {
  const Words factors = factor - Words{};
#if defined(__AVX512F__)
  return Words(_mm512_maskz_mul_epu32(0xFF, __m512i(a), __m512i(factors)));
#elif defined(__AVX2__)
  return Words(_mm256_mul_epu32(__m256i(a), __m256i(factors)));
#elif defined(__SSE2__)
  return Words(_mm_mul_epu32(__m128i(a), __m128i(factors)));
#else
  return (a & 0xFFFFFFFFu) * factors;
#endif
}

// Sixteen counters (counters[0][i] .. counters[3][i]), whose four words go to words[4 * i] .. words[4 * i + 3].
struct Philox16 {
  alignas(64) uint64_t counters[4][16];

  void run(uint64_t key, uint32_t (&words)[64]) const {
    constexpr int kWords = kWordBytes / 8;
    alignas(64) uint64_t low[16], high[16];
    for (int i = 0; i < 16; i += kWords) {
      Words c[4];
      for (int k = 0; k < 4; ++k) std::memcpy(&c[k], counters[k] + i, kWordBytes);
      uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
      for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const Words p0 = multiply(c[0], 0xD2511F53u), p1 = multiply(c[2], 0xCD9E8D57u);
        c[0] = p1 >> 32 ^ c[1] ^ uint64_t{k0};
        c[1] = p1;
        c[2] = p0 >> 32 ^ c[3] ^ uint64_t{k1};
        c[3] = p0;
      }
      const Words first = (c[0] & 0xFFFFFFFFu) | c[1] << 32, second = (c[2] & 0xFFFFFFFFu) | c[3] << 32;
      std::memcpy(low + i, &first, kWordBytes);
      std::memcpy(high + i, &second, kWordBytes);
    }
    uint64_t pairs[32];  // of words, the first in the low half
    for (int i = 0; i < 16; ++i) {
      pairs[2 * i] = low[i];
      pairs[2 * i + 1] = high[i];
    }
    std::memcpy(words, pairs, sizeof(words));
  }
};

}  // namespace meseta
