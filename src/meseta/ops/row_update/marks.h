// Marks of changed rows: two bits per row, sixteen rows per word, see meseta.ops.row_marks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ops/checks.h"
#include "ops/row_update/chunk.h"

namespace meseta {

constexpr int64_t kRowsPerWord = 16;
constexpr uint32_t kAllMarks = 3;       // Marks of a row: one bit per consumer.

inline uint32_t* mark_word(uint32_t* marks, int64_t row) { return marks + uint64_t(row) / kRowsPerWord; }
inline uint32_t mark_shift(int64_t row) { return uint32_t(row) % uint32_t(kRowsPerWord) * 2; }  // Bit within the word.

inline bool is_marked(const TableTarget& target, int64_t row) {
  return (*mark_word(target.marks, row) >> mark_shift(row) & kAllMarks) == kAllMarks;
}

inline void prefetch_marks(const TableTarget& target, const int64_t* rows, int64_t n) {
  if (target.marks == nullptr) return;
  for (int64_t k = 0; k < n; ++k) __builtin_prefetch(mark_word(target.marks, target.row(rows[k])), 1);
}

// Mark rows whose words no other thread uses. Most are marked already. A chunk of marked rows is only read, so that no row
// waits for a word that the previous one has written.
template <typename Row>
void mark_rows_unshared(uint32_t* marks, const Row* rows, int64_t n) {
  uint32_t marked = kAllMarks;
#pragma GCC unroll 8
  for (int64_t k = 0; k < n; ++k) marked &= *mark_word(marks, rows[k]) >> mark_shift(rows[k]);
  if (marked == kAllMarks) return;
  for (int64_t k = 0; k < n; ++k) *mark_word(marks, rows[k]) |= kAllMarks << mark_shift(rows[k]);
}

// Append rows to the log, from any thread. There must be space: see flush_log.
inline void log_rows(const TableTarget& target, const int64_t* rows, int64_t n) {
  const uint32_t first = std::atomic_ref(*target.log).fetch_add(uint32_t(n), std::memory_order_relaxed);
  for (int64_t k = 0; k < n; ++k) target.log[1 + first + uint64_t(k)] = uint32_t(rows[k]);
}

inline bool log_has_capacity(const TableTarget& target, int64_t num_rows) {
  return target.log == nullptr || *target.log + num_rows <= target.log_capacity;
}

// Mark the rows of a log and empty it. If an empty log has no space for `num_rows` rows, rows are marked when updated.
inline void flush_log(TableTarget& target, int64_t num_rows) {
  constexpr int64_t kChunk = 64;
  for (int64_t at = 0, n = *target.log; at < n; at += kChunk)
    mark_rows_unshared(target.marks, target.log + 1 + at, std::min(kChunk, n - at));
  *target.log = 0;
  if (num_rows > target.log_capacity) target.log = nullptr;
}

// Mark rows for all consumers. `alone` means that no other thread has rows of these words, unless rows are in slots.
inline void mark_rows(const TableTarget& target, const int64_t* rows, int64_t n, bool alone) {
  if (target.marks == nullptr) return;
  if (alone && target.row_ids == nullptr) return mark_rows_unshared(target.marks, rows, n);  // call.py checks their number.
  for (int64_t k = 0; k < n; ++k) {
    const int64_t row = target.row(rows[k]);
    if (row < 0 || row / kRowsPerWord >= target.num_marks)
      throw_invalid_argument("row ", row, " is outside the marks of ", target.num_marks * kRowsPerWord, " rows");
    const std::atomic_ref word(*mark_word(target.marks, row));
    const uint32_t bits = kAllMarks << mark_shift(row);
    if ((word.load(std::memory_order_relaxed) & bits) != bits) word.fetch_or(bits, std::memory_order_relaxed);
  }
}

}  // namespace meseta
