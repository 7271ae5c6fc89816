// Ids and their positions as entries of a radix sort: one word if 64 bits are enough, else two.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "ops/radix.h"

namespace meseta {

// Packs ids and positions into words. Rows are numbered from the smallest id, modulo 2^64.
struct Packing {
  uint64_t first;
  int row_bits, position_bits;
  Packing(int64_t low, int64_t high, int64_t count)
      : first(uint64_t(low)),
        row_bits(int(std::bit_width(uint64_t(high) - uint64_t(low)))),
        position_bits(count > 0 ? int(std::bit_width(uint64_t(count - 1))) : 0) {}
  bool fits() const { return row_bits + position_bits <= 64; }
  uint64_t row(int64_t id) const { return uint64_t(id) - first; }
  int64_t id(uint64_t row) const { return int64_t(row + first); }
};

template <typename SlotMapEntry>
struct Packed;

template <>
struct Packed<uint64_t> {
  static uint64_t make(const Packing& p, int64_t id, int64_t i) { return p.row(id) << p.position_bits | uint64_t(i); }
  static int64_t position(const Packing& p, uint64_t entry) {
    return int64_t(entry & ((uint64_t{1} << p.position_bits) - 1));
  }
  static uint64_t row(const Packing& p, uint64_t entry) { return entry >> p.position_bits; }
  static std::array<int, 2> bits(const Packing& p) { return {p.position_bits, p.position_bits + p.row_bits}; }
};

template <>
struct Packed<KeyedEntry> {
  static KeyedEntry make(const Packing& p, int64_t id, int64_t i) { return {p.row(id), uint64_t(i)}; }
  static int64_t position(const Packing&, const KeyedEntry& entry) { return int64_t(entry.value); }
  static uint64_t row(const Packing&, const KeyedEntry& entry) { return entry.key; }
  static std::array<int, 2> bits(const Packing& p) { return {0, p.row_bits}; }
};

}  // namespace meseta
