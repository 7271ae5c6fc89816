// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), with the processor's instruction if it has one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace meseta::row_file {

constexpr std::array<uint32_t, 256> crc32c_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest & 1 ? rest >> 1 ^ 0x82F63B78u : rest >> 1;
    table[byte] = rest;
  }
  return table;
}

inline uint32_t crc32c_by_table(uint32_t crc, const uint8_t* data, size_t bytes) {
  static constexpr std::array<uint32_t, 256> table = crc32c_table();
  for (size_t i = 0; i < bytes; ++i) crc = crc >> 8 ^ table[(crc ^ data[i]) & 0xff];
  return crc;
}

#if defined(__x86_64__)
// __builtin_cpu_supports is always false if Zig compiles, because its runtime does not ask the processor.
inline bool has_sse42() {
  unsigned a = 0, b = 0, features = 0, d = 0;
  return __get_cpuid(1, &a, &b, &features, &d) != 0 && (features & bit_SSE4_2) != 0;
}

__attribute__((target("sse4.2,crc32"))) inline uint32_t crc32c_by_sse42(uint32_t crc, const uint8_t* data,
                                                                          size_t bytes) {
  uint64_t wide = crc, word = 0;
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    std::memcpy(&word, data + i, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; i < bytes; ++i) crc = _mm_crc32_u8(crc, data[i]);
  return crc;
}

__attribute__((target("sse4.2,crc32"))) inline uint32_t entry_checksum_by_sse42(uint32_t begin, const uint8_t* data,
                                                                                 size_t bytes) {
  uint64_t sums[3] = {begin, 0, 0}, words[3];
  size_t i = 0;
  for (; i + 24 <= bytes; i += 24) {
    std::memcpy(words, data + i, 24);
    sums[0] = _mm_crc32_u64(sums[0], words[0]);
    sums[1] = _mm_crc32_u64(sums[1], words[1]);
    sums[2] = _mm_crc32_u64(sums[2], words[2]);
  }
  const uint64_t others = sums[1] << 32 | sums[2];
  return crc32c_by_sse42(static_cast<uint32_t>(_mm_crc32_u64(sums[0], others)), data + i, bytes - i);
}
#endif

// Return the checksum of `bytes` bytes. Start with ~0, or with the checksum of the preceding bytes.
inline uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t bytes) {
#if defined(__x86_64__)
  static const bool has_instruction = has_sse42();
  return has_instruction ? crc32c_by_sse42(crc, data, bytes) : crc32c_by_table(crc, data, bytes);
#elif defined(__ARM_FEATURE_CRC32)
  size_t i = 0;
  uint64_t word = 0;
  for (; i + 8 <= bytes; i += 8) {
    std::memcpy(&word, data + i, 8);
    crc = __crc32cd(crc, word);
  }
  for (; i < bytes; ++i) crc = __crc32cb(crc, data[i]);
  return crc;
#else
  return crc32c_by_table(crc, data, bytes);
#endif
}

// Return the checksum of an entry. The instruction has a latency of three cycles and a throughput of one per cycle, so
// words are distributed over three sums. The first sum then continues over the two others and the rest.
inline uint32_t entry_checksum(uint32_t begin, const uint8_t* data, size_t bytes) {
#if defined(__x86_64__)
  static const bool has_instruction = has_sse42();
  if (has_instruction) return entry_checksum_by_sse42(begin, data, bytes);
#endif
  return crc32c(begin, data, bytes);
}

}  // namespace meseta::row_file
