// Cache lines of the rows of a table, for prefetching.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/simd.h"

namespace meseta {

// Example: a table with rows of 96 bytes that starts at a line:
//
//   lines  |       0       |       1       |       2       |
//   rows   |           0           |           1           |
//
// Both rows end in a second line. A row that does not start at a line may extend into one line more than its size
// suggests. The line of its last byte is therefore also fetched.
class RowLines {
 public:
  RowLines(const void* table, int64_t row_bytes)
      : table_(reinterpret_cast<uintptr_t>(table)),
        row_bytes_(row_bytes),
        lines_((row_bytes + kBytes - 1) / kBytes),
        straddles_(row_bytes > 0 && row_bytes % kBytes != 0 && kBytes % row_bytes != 0) {}

  // Number of lines that a row fills.
  int64_t lines() const { return lines_; }
  // Number of rows by which prefetching should run ahead in a loop that reads one row per iteration.
  int64_t ahead() const { return std::clamp<int64_t>(64 / std::max<int64_t>(lines_, 1), 8, 32); }

  // Prefetch a row that is known to fill at least `kAtLeast` lines. Any row number is valid: prefetching an invalid
  // address has no effect.
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
