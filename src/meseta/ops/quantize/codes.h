// Codes of 2, 3 or 4 bits as a stream: code c is bits c * width .. of the row's bytes, the low bit of a byte first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace meseta {

// Eight codes are one word with a byte for each; neighbours move together, then pairs, then fours.
struct CodeWidth {
  int bits;
  uint64_t ones, pairs, fours;  // which bits are codes, where each lies in 8, two in 16, four in 32
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

// `codes` has padded(count) bytes, zeros at the end.
inline void pack_codes(const uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  const CodeWidth width(bits);
  const int64_t bytes = packed_bytes(count, bits);
  for (int64_t c = 0, at = 0; c < count; c += 8, at += bits) {
    uint64_t word;
    std::memcpy(&word, codes + c, 8);
    word = width.pack(word);
    if (at + 8 <= bytes) {
      std::memcpy(out + at, &word, 8);  // the next codes go over what is too much
    } else {
      std::memcpy(out + at, &word, size_t(std::min<int64_t>(bits, bytes - at)));
    }
  }
}

// Writes padded(count) bytes.
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
