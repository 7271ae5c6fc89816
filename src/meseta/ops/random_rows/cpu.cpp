// Philox4x32-10 over a rectangle of cells; see reference.py for the definition.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "ops/parallel.h"

namespace nb = nanobind;

namespace {

using Words = std::array<uint32_t, 4>;

Words philox(Words c, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{c[0]} * 0xD2511F53u;
    const uint64_t p1 = uint64_t{c[2]} * 0xCD9E8D57u;
    c = {uint32_t(p1 >> 32) ^ c[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k1, uint32_t(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

using Cells = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kCellsPerThread = 4096;  // fewer are not worth waking a thread

void fill_row(uint64_t key, uint64_t row, uint64_t first_column, int64_t num_columns, int64_t* cell) {
  Words words{};
  for (int64_t c = 0; c < num_columns; ++c) {
    const uint64_t column = first_column + uint64_t(c);
    if (c == 0 || column % 4 == 0)
      words = philox({uint32_t(row), uint32_t(row >> 32), uint32_t(column / 4), 0u}, uint32_t(key), uint32_t(key >> 32));
    cell[c] = words[column % 4];
  }
}

void random_bits(uint64_t key, int64_t first_row, int64_t first_column, Cells out, int num_threads) {
  const int64_t num_rows = int64_t(out.shape(0)), num_columns = int64_t(out.shape(1));
  int64_t* const cell = out.data();
  nb::gil_scoped_release unlocked;
  const int64_t threads = std::clamp<int64_t>(num_rows * num_columns / kCellsPerThread, 1, std::max(num_threads, 1));
  meseta::parallel(int(threads), [=](int64_t thread) {
    const int64_t stop = num_rows * (thread + 1) / threads;
    for (int64_t r = num_rows * thread / threads; r < stop; ++r)
      fill_row(key, uint64_t(first_row + r), uint64_t(first_column), num_columns, cell + r * num_columns);
  });
}

}  // namespace

void bind_random_rows(nb::module_& m) {
  m.def("random_bits", &random_bits, nb::arg("key"), nb::arg("first_row"), nb::arg("first_column"), nb::arg("out"),
        nb::arg("num_threads"));
}
