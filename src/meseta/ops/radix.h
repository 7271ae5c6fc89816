// Stable radix sort of 64-bit entries by some of their bits, for (row, position) pairs packed into one word.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace meseta {

// Entry with separate words, for keys that leave no bits for a position.
struct KeyedEntry {
  uint64_t key, value;
};

inline uint64_t sort_key(uint64_t entry) { return entry; }
inline uint64_t sort_key(const KeyedEntry& entry) { return entry.key; }

constexpr size_t kInsertionSize = 24;  // For fewer entries, clearing the counts of a radix pass costs more.
constexpr int kMaxDigitBits = 11;      // 2048 write positions still fit into the second-level TLB.

// Return the bits of [first_bit, last_bit) in which any two entries differ.
template <typename Entry>
uint64_t varying_bits(const Entry* entries, size_t n, int first_bit, int last_bit) {
  if (n < 2 || last_bit <= first_bit) return 0;
  const uint64_t below = last_bit >= 64 ? ~uint64_t{0} : (uint64_t{1} << last_bit) - 1;
  const uint64_t front = sort_key(entries[0]);
  uint64_t varying = 0;
  for (size_t i = 1; i < n; ++i) varying |= sort_key(entries[i]) ^ front;
  return varying & below & ~((uint64_t{1} << first_bit) - 1);
}

template <typename Entry>
void insertion_sort(Entry* entries, size_t n, uint64_t mask) {
  for (size_t i = 1; i < n; ++i) {
    const Entry entry = entries[i];
    const uint64_t key = sort_key(entry) & mask;
    size_t hole = i;
    for (; hole > 0 && (sort_key(entries[hole - 1]) & mask) > key; --hole) entries[hole] = entries[hole - 1];
    entries[hole] = entry;
  }
}

// Division of a range of bits into digits of equal width: as few as the counting cost for `n` entries justifies.
struct DigitWidth {
  int num_passes, bits;
  DigitWidth(int num_bits, size_t n) {
    const int widest = std::clamp(int(std::bit_width(n)), 6, kMaxDigitBits);
    num_passes = std::max((num_bits + widest - 1) / widest, 1);
    bits = (num_bits + num_passes - 1) / num_passes;
  }
};

// Digits of the range of `varying` bits.
struct Digits {
  int low, high, bits;
  Digits(uint64_t varying, size_t n)
      : low(std::countr_zero(varying)), high(64 - std::countl_zero(varying)), bits(DigitWidth(high - low, n).bits) {}
  // The last digit ends with the range. Bits above it may differ, but must not be sorted by.
  uint64_t mask(int shift) const { return (uint64_t{1} << std::min(bits, high - shift)) - 1; }
};

// Sort `n` entries by their bits [first_bit, last_bit), 0 <= first_bit, last_bit <= 64. Equal entries keep their order.
// The least significant digit is first. Digits that all entries share are skipped. Returns the buffer with the result,
// `entries` or `scratch` (n entries each). The other buffer then has undefined content.
template <typename Entry>
Entry* radix_sort(Entry* entries, Entry* scratch, size_t n, int first_bit, int last_bit) {
  const uint64_t varying = varying_bits(entries, n, first_bit, last_bit);
  if (varying == 0) return entries;
  if (n < kInsertionSize) {
    insertion_sort(entries, n, varying);
    return entries;
  }
  const Digits digits(varying, n);
  size_t ends[size_t{1} << kMaxDigitBits];
  for (int shift = digits.low; shift < digits.high; shift += digits.bits) {
    const uint64_t mask = digits.mask(shift);
    if ((varying >> shift & mask) == 0) continue;
    std::fill_n(ends, mask + 1, size_t{0});
    for (size_t i = 0; i < n; ++i) ++ends[sort_key(entries[i]) >> shift & mask];
    size_t at = 0;
    for (size_t b = 0; b <= mask; ++b) at += std::exchange(ends[b], at);
    for (size_t i = 0; i < n; ++i) {
      const Entry entry = entries[i];
      scratch[ends[sort_key(entry) >> shift & mask]++] = entry;
    }
    std::swap(entries, scratch);
  }
  return entries;
}

}  // namespace meseta
