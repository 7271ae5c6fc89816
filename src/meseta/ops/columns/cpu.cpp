// Columns of several matrices put side by side in one: a block of rows at a time, so that its lines are still near.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "ops/checks.h"
#include "ops/parallel.h"
#include "ops/simd.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

constexpr int64_t kRows = 64;
constexpr int64_t kAhead = 16, kLine = 64;  // rows; bytes
constexpr int64_t kBlocksOfThread = 4;  // fewer rows are not worth a second thread
constexpr size_t kFields = 5, kMatrix = 3;

template <typename T>
struct Move {
  const T* from;
  int64_t stride;  // of the source
  T* to;
  int64_t width;
  bool add;
};

template <bool kAdd, typename T>
void move_rows(const Move<T>& move, int64_t first, int64_t last, int64_t stride, T scale) {
  const T* from = move.from + first * move.stride;
  T* to = move.to + first * stride;
  for (int64_t row = first; row < last; ++row, from += move.stride, to += stride) {
    // Short pieces far from each other: the processor does not see them coming.
    for (int64_t c = 0; c < move.width; c += kLine / int64_t(sizeof(T))) {
      prefetch(from + kAhead * move.stride + c);
      prefetch_write(to + kAhead * stride + c);
    }
    for (int64_t c = 0; c < move.width; ++c) to[c] = kAdd ? to[c] + from[c] * scale : from[c] * scale;
  }
}

template <typename T>
void place(std::array<int64_t, 4> out, const std::vector<int64_t>& sources, const std::vector<int64_t>& moves, T scale,
           int num_threads) {
  const auto [address, num_rows, num_columns, stride] = out;
  const int64_t num_sources = int64_t(sources.size() / kMatrix);
  std::vector<Move<T>> checked;
  for (size_t m = 0; m + kFields <= moves.size(); m += kFields) {
    const int64_t source = moves[m], from = moves[m + 1], to = moves[m + 2], width = moves[m + 3];
    if (source < 0 || source >= num_sources) refuse("source ", source, " is outside 0..", num_sources - 1);
    const int64_t *const own = sources.data() + size_t(source) * kMatrix, limit = own[1];
    if (width < 0 || from < 0 || from > limit - width || to < 0 || to > num_columns - width)
      refuse(width, " columns from ", from, " of ", limit, " cannot go to ", to, " of ", num_columns);
    checked.push_back({reinterpret_cast<const T*>(own[0]) + from, own[2], reinterpret_cast<T*>(address) + to, width,
                       moves[m + 4] != 0});
  }
  const int64_t num_blocks = (num_rows + kRows - 1) / kRows;
  const int threads = int(std::clamp<int64_t>(num_blocks / kBlocksOfThread, 1, std::max(num_threads, 1)));
  parallel_tasks(threads, num_blocks, [&, stride = stride, num_rows = num_rows](int64_t block) {
    const int64_t first = block * kRows, last = std::min(first + kRows, num_rows);
    for (const Move<T>& move : checked)
      move.add ? move_rows<true>(move, first, last, stride, scale) : move_rows<false>(move, first, last, stride, scale);
  });
}

// `out`: address, rows, columns, numbers from row to row; `sources`: address, columns and numbers from row to row of
// each, which have as many rows. `moves`: for each (source, first column there, first column of `out`, columns, whether
// to add), done in this order in every row.
void place_columns(std::array<int64_t, 4> out, const std::vector<int64_t>& sources, const std::vector<int64_t>& moves,
                   double scale, bool wide, int num_threads) {
  nb::gil_scoped_release unlocked;
  wide ? place<double>(out, sources, moves, scale, num_threads)
       : place<float>(out, sources, moves, float(scale), num_threads);
}

}  // namespace

void bind_columns(nb::module_& m) {
  m.def("place_columns", &place_columns, nb::arg("out"), nb::arg("sources"), nb::arg("moves"), nb::arg("scale"),
        nb::arg("wide"), nb::arg("num_threads"));
}
