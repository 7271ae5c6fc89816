// Philox4x32-10 over a rectangle of cells; see reference.py for the definition.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>

#include "ops/parallel.h"
#include "ops/philox.h"

namespace nb = nanobind;

namespace {

using Cells = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kCellsPerThread = 4096;  // fewer are not worth waking a thread

void random_bits(uint64_t key, int64_t first_row, int64_t first_column, Cells out, int num_threads) {
  const int64_t num_rows = int64_t(out.shape(0)), num_columns = int64_t(out.shape(1));
  int64_t* const cell = out.data();
  nb::gil_scoped_release unlocked;
  const int64_t threads = std::clamp<int64_t>(num_rows * num_columns / kCellsPerThread, 1, std::max(num_threads, 1));
  meseta::parallel(int(threads), [=](int64_t thread) {
    const int64_t stop = num_rows * (thread + 1) / threads;
    for (int64_t r = num_rows * thread / threads; r < stop; ++r)
      meseta::random_words(key, uint64_t(first_row) + uint64_t(r), uint64_t(first_column), num_columns, cell + r * num_columns);
  });
}

}  // namespace

void bind_random_rows(nb::module_& m) {
  m.def("random_bits", &random_bits, nb::arg("key"), nb::arg("first_row"), nb::arg("first_column"), nb::arg("out"),
        nb::arg("num_threads"));
}
