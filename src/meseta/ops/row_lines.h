// The cache lines in which the rows of a table lie, to be fetched before the rows are read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/simd.h"

namespace meseta {

// A table of rows of 96 bytes, from the beginning of a line on:
//
//   lines  |       0       |       1       |       2       |
//   rows   |           0           |           1           |
//
// Both end in a second line. A row that does not begin with a line may end in one line more than its bytes fill, so that
// its last byte is asked for too.
class RowLines {
 public:
  RowLines(const void* table, int64_t row_bytes)
      : table_(reinterpret_cast<uintptr_t>(table)),
        row_bytes_(row_bytes),
        lines_((row_bytes + kBytes - 1) / kBytes),
        straddles_(row_bytes > 0 && row_bytes % kBytes != 0 && kBytes % row_bytes != 0) {}

  // The lines that a row fills.
  int64_t lines() const { return lines_; }
  // How many rows before its turn one is fetched, by loops that fetch one row for each that they read.
  int64_t ahead() const { return std::clamp<int64_t>(64 / std::max<int64_t>(lines_, 1), 8, 32); }

  // Any row: one outside the table is fetched from nowhere. It is known to fill `kAtLeast` lines.
  template <int kAtLeast = 0>
  void fetch(int64_t row) const {
    const uintptr_t first = table_ + uintptr_t(row) * uintptr_t(row_bytes_);
#pragma GCC unroll 8
    for (int line = 0; line < kAtLeast; ++line) fetch_line(first + uintptr_t(line) * kBytes);
    for (int64_t line = kAtLeast; line < lines_; ++line) fetch_line(first + uintptr_t(line) * kBytes);
    if (straddles_) fetch_line(first + uintptr_t(row_bytes_) - 1);
  }

 private:
  static constexpr int64_t kBytes = 64;

  static void fetch_line(uintptr_t address) { prefetch(reinterpret_cast<const void*>(address)); }

  uintptr_t table_;
  int64_t row_bytes_, lines_;
  bool straddles_;
};

}  // namespace meseta
