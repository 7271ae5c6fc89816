// Copying of columns between matrices, a block of rows at a time, so that its cache lines are reused.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "ops/columns/moves.h"
#include "ops/parallel.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

constexpr int64_t kRows = 64;
constexpr int64_t kMinBlocksPerThread = 4;  // With fewer rows, another thread does not pay off.

template <typename T>
void place(std::array<int64_t, 4> out, const std::vector<int64_t>& sources, const std::vector<int64_t>& moves, T scale,
           int num_threads) {
  const auto [address, num_rows, num_columns, stride] = out;
  const std::vector<Strip<T>> strips = checked_strips<T>(sources, moves, num_columns);
  const int64_t num_blocks = (num_rows + kRows - 1) / kRows;
  const int threads = int(std::clamp<int64_t>(num_blocks / kMinBlocksPerThread, 1, std::max(num_threads, 1)));
  T* const to = reinterpret_cast<T*>(address);
  parallel_tasks(threads, num_blocks, [&, stride = stride, num_rows = num_rows](int64_t block) {
    const int64_t first = block * kRows, last = std::min(first + kRows, num_rows);
    place_strips<true>(strips, first, last, to + first * stride, stride, scale);
  });
}

// Copy columns. `out` is (address, rows, columns, row stride). `sources` has (address, columns, row stride) of each
// source, all with the same number of rows. `moves` has (source, first column, first column of `out`, columns, whether to
// add) of each move. Moves are applied in order in every row.
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
