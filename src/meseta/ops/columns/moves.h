// Moves of columns from several matrices to one: checks, and execution for some rows.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/checks.h"
#include "ops/simd.h"

namespace meseta {

struct ColumnMove {
  int64_t source, from, to, width;
  bool add;
};

// Check moves. `moves` has (source, first column, first column of the output, columns, whether to add) of each move.
// `widths` has the number of columns of each source.
inline std::vector<ColumnMove> checked_moves(const std::vector<int64_t>& moves, const std::vector<int64_t>& widths,
                                       int64_t num_columns) {
  constexpr size_t kFields = 5;
  const int64_t num_sources = int64_t(widths.size());
  std::vector<ColumnMove> checked;
  for (size_t m = 0; m + kFields <= moves.size(); m += kFields) {
    const int64_t source = moves[m], from = moves[m + 1], to = moves[m + 2], width = moves[m + 3];
    if (source < 0 || source >= num_sources) throw_invalid_argument("source ", source, " is outside 0..", num_sources - 1);
    const int64_t limit = widths[size_t(source)];
    if (width < 0 || from < 0 || from > limit - width || to < 0 || to > num_columns - width)
      throw_invalid_argument(width, " columns from column ", from, " of ", limit, " cannot move to column ", to, " of ", num_columns);
    checked.push_back({source, from, to, width, moves[m + 4] != 0});
  }
  return checked;
}

// Move from a matrix in memory.
template <typename T>
struct Strip {
  const T* from;
  int64_t stride;  // Row stride of the source.
  int64_t to, width;
  bool add;
};

// Check moves. `sources` has (address, columns, row stride) of each source.
template <typename T>
std::vector<Strip<T>> checked_strips(const std::vector<int64_t>& sources, const std::vector<int64_t>& moves,
                                     int64_t num_columns) {
  constexpr size_t kMatrix = 3;
  std::vector<int64_t> widths;
  for (size_t s = 0; s + kMatrix <= sources.size(); s += kMatrix) widths.push_back(sources[s + 1]);
  std::vector<Strip<T>> strips;
  for (const ColumnMove& move : checked_moves(moves, widths, num_columns)) {
    const int64_t* const matrix = sources.data() + size_t(move.source) * kMatrix;
    strips.push_back({reinterpret_cast<const T*>(matrix[0]) + move.from, matrix[2], move.to, move.width, move.add});
  }
  return strips;
}

template <bool kAdd, bool kFar, typename T>
void move_rows(const Strip<T>& strip, int64_t first, int64_t last, T* out, int64_t stride, T scale) {
  constexpr int64_t kAhead = 16, kLine = 64;  // Rows, and bytes.
  const T* from = strip.from + first * strip.stride;
  T* to = out + strip.to;
  for (int64_t row = first; row < last; ++row, from += strip.stride, to += stride) {
    // The hardware prefetcher does not detect short pieces with a large stride.
    for (int64_t c = 0; c < strip.width; c += kLine / int64_t(sizeof(T))) {
      prefetch(from + kAhead * strip.stride + c);
      if (kFar) prefetch_write(to + kAhead * stride + c);
    }
    for (int64_t c = 0; c < strip.width; ++c) to[c] = kAdd ? to[c] + from[c] * scale : from[c] * scale;
  }
}

// Apply moves to rows [first, last) of the sources. `out` receives row `first` first. kFar: `out` is in memory, not in
// the cache.
template <bool kFar, typename T>
void place_strips(const std::vector<Strip<T>>& strips, int64_t first, int64_t last, T* out, int64_t stride, T scale) {
  for (const Strip<T>& strip : strips)
    strip.add ? move_rows<true, kFar>(strip, first, last, out, stride, scale)
              : move_rows<false, kFar>(strip, first, last, out, stride, scale);
}

}  // namespace meseta
