// Sorted entries of a table's ids within a range of rows. An entry has 64 bits: the row relative to the range above
// `payload_bits`, and below them the location of its gradient (sums.h). Entries of one row keep the order of (feature,
// sample, position). The sort is that of radix.h, except that one pass over the ids counts the digits of all passes, and
// the first pass scatters entries directly from the ids.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "ops/checks.h"
#include "ops/radix.h"
#include "ops/row_update/sums.h"

namespace meseta {

struct RowRange {
  uint64_t first, count;
};

// Numbers of entries by digit, for every pass. Each has an additional count for ids outside the range.
class DigitCounts {
 public:
  DigitCounts(uint64_t num_rows, uint64_t num_ids, Buffer<uint32_t>& room)
      : width_(std::bit_width(num_rows - 1), num_ids), mask_((uint64_t{1} << width_.bits) - 1) {
    room.reserve(size_t(num_passes()) * (mask_ + 2));
    counts_ = room.data();
    std::fill_n(counts_, size_t(num_passes()) * (mask_ + 2), 0u);
  }
  int num_passes() const { return width_.num_passes; }
  uint64_t outside() const { return mask_ + 1; }
  uint64_t digit(uint64_t row, int pass) const { return row >> pass * width_.bits & mask_; }
  uint32_t* of(int pass) const { return counts_ + size_t(pass) * (mask_ + 2); }

  void add(const uint64_t* rows, int64_t n) const {
    for (int pass = 0; pass < num_passes(); ++pass) {
      uint32_t* const counts = of(pass);
      for (int64_t k = 0; k < n; ++k) ++counts[digit(rows[k], pass)];
    }
  }
  // Replace the counts by the start of the entries of each digit.
  void to_starts() const {
    for (int pass = 0; pass < num_passes(); ++pass) {
      uint32_t at = 0;
      for (uint64_t d = 0; d <= mask_ + 1; ++d) at += std::exchange(of(pass)[d], at);
    }
  }

 private:
  DigitWidth width_;
  uint64_t mask_;
  uint32_t* counts_;
};

// Count the digits of the rows in the range. Returns the number of entries. Throws if an id is outside the table.
template <typename Id>
int64_t count_digits(const UpdateTable& table, const UpdateBatch& batch, RowRange range, const DigitCounts& counts) {
  constexpr int64_t kBlock = 256;
  const Id* ids = static_cast<const Id*>(batch.ids);
  uint64_t rows[kBlock], worst = 0;
  int64_t total = 0;
  for (const GradientSource& f : table.features) {
    for (int64_t i = f.offsets[0], end = f.offsets[batch.num_bags]; i < end; i += kBlock) {
      const int64_t size = std::min(kBlock, end - i);
      int64_t n = 0;
      for (int64_t k = 0; k < size; ++k) {
        const uint64_t row = uint64_t(int64_t(ids[i + k]));
        worst = std::max(worst, row);
        rows[n] = row - range.first;
        n += row - range.first < range.count;
      }
      counts.add(rows, n);
      total += n;
    }
  }
  if (worst >= uint64_t(table.target.num_rows))
    throw_invalid_argument("id ", int64_t(worst), " is outside 0..", table.target.num_rows - 1);
  return total;
}

// Write entries in the order of the lowest digit of their rows. `entries` must have space for one additional entry.
template <typename Id>
void scatter_first_pass(const UpdateTable& table, const UpdateBatch& batch, RowRange range, bool by_position, int payload_bits,
                const DigitCounts& counts, uint64_t* entries) {
  const Id* ids = static_cast<const Id*>(batch.ids);
  uint32_t* const ends = counts.of(0);
  const auto put = [&](int64_t i, uint64_t payload) {
    const uint64_t row = uint64_t(int64_t(ids[i])) - range.first;
    const bool inside = row < range.count;
    uint32_t& end = ends[inside ? counts.digit(row, 0) : counts.outside()];
    entries[end] = row << payload_bits | payload;
    end += inside;
  };
  uint64_t position = 0, first_line = 0;
  for (const GradientSource& f : table.features) {
    if (by_position) {
      for (int64_t i = f.offsets[0]; i < f.offsets[batch.num_bags]; ++i) put(i, position++);
    } else {
      for (int64_t bag = 0; bag < batch.num_bags; ++bag)
        for (int64_t i = f.offsets[bag]; i < f.offsets[bag + 1]; ++i) put(i, first_line + uint64_t(bag));
      first_line += uint64_t{1} << table.sample_bits;
    }
  }
}

// Run the remaining passes. Returns the buffer with the result, `entries` or `other`.
inline const uint64_t* scatter_remaining_passes(const DigitCounts& counts, int64_t n, int payload_bits, uint64_t* entries,
                                 uint64_t* other) {
  for (int pass = 1; pass < counts.num_passes(); ++pass) {
    uint32_t* const ends = counts.of(pass);
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t entry = entries[i];
      other[ends[counts.digit(entry >> payload_bits, pass)]++] = entry;
    }
    std::swap(entries, other);
  }
  return entries;
}

}  // namespace meseta
