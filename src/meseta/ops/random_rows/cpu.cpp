// Philox4x32-10 for a rectangle of cells, as words or as uniform numbers. See reference.py for the definition.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>

#include "ops/parallel.h"
#include "ops/philox.h"

namespace nb = nanobind;

namespace {

template <typename T>
using Cells = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kCellsPerThread = 4096;  // With fewer cells, another thread does not pay off.

struct Origin {
  uint64_t key, row, column;
};

// Run body(first row of `out`, end of the rows, cells) for the share of each thread.
template <typename T, typename Body>
void for_row_ranges(const Cells<T>& out, int num_threads, Body body) {
  const int64_t num_rows = int64_t(out.shape(0)), width = int64_t(out.shape(1));
  T* const cells = out.data();
  if (width == 0) return;
  nb::gil_scoped_release unlocked;
  const int64_t threads = std::clamp<int64_t>(num_rows * width / kCellsPerThread, 1, std::max(num_threads, 1));
  meseta::parallel(int(threads), [&](int64_t thread) {
    const int64_t first = num_rows * thread / threads, last = num_rows * (thread + 1) / threads;
    body(first, last, cells + first * width);
  });
}

template <typename T, typename Convert>
void fill(const Origin& origin, const Cells<T>& out, int num_threads, Convert convert) {
  const int64_t width = int64_t(out.shape(1));
  for_row_ranges(out, num_threads, [&](int64_t first, int64_t last, T* cells) {
    meseta::random_words(origin.key, origin.row + uint64_t(first), last - first, origin.column, width, cells, convert);
  });
}

struct Uniform {
  double scale;
  double operator()(uint32_t word) const { return (double(int32_t(word >> 8)) * 0x1p-23 - 1.0) * scale; }
};

void random_bits(uint64_t key, uint64_t first_row, uint64_t first_column, Cells<int64_t> out, int num_threads) {
  fill(Origin{key, first_row, first_column}, out, num_threads, [](uint32_t word) { return int64_t(word); });
}

template <typename T>
void uniform_rows(uint64_t key, uint64_t first_row, uint64_t first_column, double scale, Cells<T> out, int num_threads) {
  const Uniform uniform{scale};
  fill(Origin{key, first_row, first_column}, out, num_threads, [&](uint32_t word) { return T(uniform(word)); });
}

template <typename T>
void uniform_rows_at(uint64_t key, nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> rows,
                     uint64_t first_column, double scale, Cells<T> out, int num_threads) {
  if (rows.shape(0) != out.shape(0)) throw std::invalid_argument("the number of row numbers differs from the number of rows");
  const Uniform uniform{scale};
  const int64_t width = int64_t(out.shape(1));
  const int64_t* const numbers = rows.data();
  for_row_ranges(out, num_threads, [&](int64_t first, int64_t last, T* cells) {
    for (int64_t r = first; r < last; ++r, cells += width)
      meseta::random_words(key, uint64_t(numbers[r]), 1, first_column, width, cells,
                           [&](uint32_t word) { return T(uniform(word)); });
  });
}

}  // namespace

void bind_random_rows(nb::module_& m) {
  m.def("random_bits", &random_bits, nb::arg("key"), nb::arg("first_row"), nb::arg("first_column"), nb::arg("out"),
        nb::arg("num_threads"));
  const auto bind_uniform = [&m](auto function) {
    m.def("uniform_rows", function, nb::arg("key"), nb::arg("first_row"), nb::arg("first_column"), nb::arg("scale"),
          nb::arg("out").noconvert(), nb::arg("num_threads"));
  };
  const auto bind_uniform_of = [&m](auto function) {
    m.def("uniform_rows_at", function, nb::arg("key"), nb::arg("rows"), nb::arg("first_column"), nb::arg("scale"),
          nb::arg("out").noconvert(), nb::arg("num_threads"));
  };
  bind_uniform_of(&uniform_rows_at<float>);
  bind_uniform_of(&uniform_rows_at<double>);
  bind_uniform(&uniform_rows<float>);
  bind_uniform(&uniform_rows<double>);
}
