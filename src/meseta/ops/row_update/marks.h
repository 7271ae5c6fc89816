// Marks of changed rows: two bits a row, sixteen rows a word, as meseta.ops.row_marks keeps them.
#pragma once

#include <atomic>
#include <cstdint>

#include "ops/checks.h"
#include "ops/row_update/chunk.h"

namespace meseta {

constexpr int64_t kMarkedRows = 16;  // of a word
constexpr uint32_t kMarks = 3;       // of a row: one bit for each who asks

inline void prefetch_marks(const Target& target, const int64_t* rows, int64_t n) {
  if (target.marks == nullptr) return;
  for (int64_t k = 0; k < n; ++k) __builtin_prefetch(target.marks + target.row(rows[k]) / kMarkedRows, 1);
}

// Marks rows for all who ask. `alone`: no other thread has rows of these words, unless rows lie in slots.
inline void mark_rows(const Target& target, const int64_t* rows, int64_t n, bool alone) {
  if (target.marks == nullptr) return;
  uint32_t* const marks = target.marks;
  if (alone && target.row_ids == nullptr) {  // these many marks there are: call.py
    for (int64_t k = 0; k < n; ++k) marks[rows[k] / kMarkedRows] |= kMarks << rows[k] % kMarkedRows * 2;
    return;
  }
  for (int64_t k = 0; k < n; ++k) {
    const int64_t row = target.row(rows[k]);
    if (row < 0 || row / kMarkedRows >= target.num_marks)
      refuse("row ", row, " lies outside the marks of ", target.num_marks * kMarkedRows, " rows");
    const std::atomic_ref word(marks[row / kMarkedRows]);
    const uint32_t bits = kMarks << row % kMarkedRows * 2;
    if ((word.load(std::memory_order_relaxed) & bits) != bits) word.fetch_or(bits, std::memory_order_relaxed);
  }
}

}  // namespace meseta
