// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), by the processor's instruction where it has one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
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
__attribute__((target("sse4.2"))) inline uint32_t crc32c_by_sse42(uint32_t crc, const uint8_t* data, size_t bytes) {
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
#endif

// The checksum of `bytes` bytes, begun with `crc`; begin with ~0 or the checksum of what comes before.
inline uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t bytes) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
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

}  // namespace meseta::row_file
