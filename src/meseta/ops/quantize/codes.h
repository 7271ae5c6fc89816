// Streams of codes of 2, 3 or 4 bits: code c starts at bit c * width of the row. The low bit of a byte is first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace meseta {

// Eight codes are packed from a word with one code per byte: first neighbors are joined, then pairs, then fours.
struct CodeWidth {
  int bits;
  uint64_t ones, pairs, fours;  // Masks of the codes, with one in 8, two in 16 or four in 32 bits.
  explicit constexpr CodeWidth(int width)
      : bits(width),
        ones(0x0101010101010101u * ((uint64_t{1} << width) - 1)),
        pairs(0x0001000100010001u * ((uint64_t{1} << 2 * width) - 1)),
        fours(0x0000000100000001u * ((uint64_t{1} << 4 * width) - 1)) {}

  uint64_t pack(uint64_t word) const {
    word = (word | word >> (8 - bits)) & pairs;
    word = (word | word >> (16 - 2 * bits)) & fours;
    return (word | word >> (32 - 4 * bits)) & ((uint64_t{1} << 8 * bits) - 1);
  }
  uint64_t unpack(uint64_t word) const {
    word &= (uint64_t{1} << 8 * bits) - 1;
    word = (word | word << (32 - 4 * bits)) & fours;
    word = (word | word << (16 - 2 * bits)) & pairs;
    return (word | word << (8 - bits)) & ones;
  }
};

inline int64_t packed_bytes(int64_t count, int bits) { return (count * bits + 7) / 8; }
inline int64_t padded(int64_t count) { return (count + 7) / 8 * 8; }

// Pack codes. `codes` has padded(count) bytes, with zeros at the end.
inline void pack_codes(const uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  const CodeWidth width(bits);
  const int64_t bytes = packed_bytes(count, bits);
  for (int64_t c = 0, at = 0; c < count; c += 8, at += bits) {
    uint64_t word;
    std::memcpy(&word, codes + c, 8);
    word = width.pack(word);
    if (at + 8 <= bytes) {
      std::memcpy(out + at, &word, 8);  // The next codes overwrite the excess bytes.
    } else {
      std::memcpy(out + at, &word, size_t(std::min<int64_t>(bits, bytes - at)));
    }
  }
}

// Unpack codes. Writes padded(count) bytes.
inline void unpack_codes(const uint8_t* packed, int64_t count, int bits, uint8_t* codes) {
  const CodeWidth width(bits);
  const int64_t bytes = packed_bytes(count, bits);
  for (int64_t c = 0, at = 0; c < count; c += 8, at += bits) {
    uint64_t word = 0;
    if (at + 8 <= bytes) {
      std::memcpy(&word, packed + at, 8);
    } else {
      std::memcpy(&word, packed + at, size_t(std::min<int64_t>(bits, bytes - at)));
    }
    word = width.unpack(word);
    std::memcpy(codes + c, &word, 8);
  }
}

}  // namespace meseta
