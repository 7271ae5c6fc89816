// Marks of changed rows: two bits a row, sixteen rows a word, as meseta.ops.row_marks keeps them.
#pragma once

#include <atomic>
#include <cstdint>

#include "ops/checks.h"
#include "ops/row_update/chunk.h"

namespace meseta {

constexpr int64_t kMarkedRows = 16;  // of a word
constexpr uint32_t kMarks = 3;       // of a row: one bit for each who asks

inline uint32_t* word_of(uint32_t* marks, int64_t row) { return marks + uint64_t(row) / kMarkedRows; }
inline uint32_t place_of(int64_t row) { return uint32_t(row) % uint32_t(kMarkedRows) * 2; }  // in its word

inline bool is_marked(const Target& target, int64_t row) {
  return (*word_of(target.marks, row) >> place_of(row) & kMarks) == kMarks;
}

inline void prefetch_marks(const Target& target, const int64_t* rows, int64_t n) {
  if (target.marks == nullptr) return;
  for (int64_t k = 0; k < n; ++k) __builtin_prefetch(word_of(target.marks, target.row(rows[k])), 1);
}

// Marks rows for all who ask. `alone`: no other thread has rows of these words, unless rows lie in slots. Most rows are
// marked already: a chunk of those is only read, so that no row waits for the word that the one before it has written.
inline void mark_rows(const Target& target, const int64_t* rows, int64_t n, bool alone) {
  if (target.marks == nullptr) return;
  if (alone && target.row_ids == nullptr) {  // these many marks there are: call.py
    uint32_t marked = kMarks;
#pragma GCC unroll 8
    for (int64_t k = 0; k < n; ++k) marked &= *word_of(target.marks, rows[k]) >> place_of(rows[k]);
    if (marked == kMarks) return;
    for (int64_t k = 0; k < n; ++k) *word_of(target.marks, rows[k]) |= kMarks << place_of(rows[k]);
    return;
  }
  for (int64_t k = 0; k < n; ++k) {
    const int64_t row = target.row(rows[k]);
    if (row < 0 || row / kMarkedRows >= target.num_marks)
      refuse("row ", row, " lies outside the marks of ", target.num_marks * kMarkedRows, " rows");
    const std::atomic_ref word(*word_of(target.marks, row));
    const uint32_t bits = kMarks << place_of(row);
    if ((word.load(std::memory_order_relaxed) & bits) != bits) word.fetch_or(bits, std::memory_order_relaxed);
  }
}

}  // namespace meseta
