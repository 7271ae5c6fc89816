// Philox4x32-10 over a rectangle of cells, as words or as uniform numbers; see reference.py for the definition.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/parallel.h"
#include "ops/random_rows/generator.h"

namespace nb = nanobind;

namespace {

template <typename T>
using Cells = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kCellsPerThread = 4096;  // fewer are not worth waking a thread
constexpr int kCounters = 16, kBlock = 4 * kCounters;  // a block is the words of so many counters

struct Origin {
  uint64_t key, row, column;
};

// Rows first..last-1 of `out`: sixteen counters at a time, which go on from one row to the next. A counter is four
// columns, of which the first and the last of a row may lie half outside.
template <typename T, typename Convert>
void fill_rows(const Origin& origin, int64_t first, int64_t last, int64_t width, T* out, Convert convert) {
  const int64_t skipped = int64_t(origin.column % 4), groups = (skipped + width + 3) / 4;
  const uint64_t first_group = origin.column / 4;
  const bool whole = skipped == 0 && width % 4 == 0;
  int64_t row = first, group = 0;
  meseta::Philox16 generator = {};
  for (int64_t left = (last - first) * groups; left > 0; left -= kCounters) {
    const int lanes = int(std::min<int64_t>(kCounters, left));
    const int64_t block_row = row, block_group = group;
    for (int i = 0; i < lanes; ++i) {
      const uint64_t logical = origin.row + uint64_t(row);
      generator.counters[0][i] = logical;
      generator.counters[1][i] = logical >> 32;
      generator.counters[2][i] = first_group + uint64_t(group);
      if (++group == groups) group = 0, ++row;
    }
    uint32_t words[kBlock];
    generator.run(origin.key, words);
    T values[kBlock];
    for (int i = 0; i < kBlock; ++i) values[i] = convert(words[i]);
    if (whole) {
      std::memcpy(out + block_row * width + 4 * block_group, values, size_t(lanes) * 4 * sizeof(T));
      continue;
    }
    int64_t r = block_row, g = block_group;
    for (int i = 0; i < lanes; ++i) {
      const int64_t column = 4 * g - skipped, from = std::max<int64_t>(column, 0), to = std::min(column + 4, width);
      std::memcpy(out + r * width + from, values + 4 * i + (from - column), size_t(to - from) * sizeof(T));
      if (++g == groups) g = 0, ++r;
    }
  }
}

template <typename T, typename Convert>
void fill(const Origin& origin, const Cells<T>& out, int num_threads, Convert convert) {
  const int64_t num_rows = int64_t(out.shape(0)), width = int64_t(out.shape(1));
  T* const cells = out.data();
  if (width == 0) return;
  nb::gil_scoped_release unlocked;
  const int64_t threads = std::clamp<int64_t>(num_rows * width / kCellsPerThread, 1, std::max(num_threads, 1));
  meseta::parallel(int(threads), [&](int64_t thread) {
    fill_rows(origin, num_rows * thread / threads, num_rows * (thread + 1) / threads, width, cells, convert);
  });
}

void random_bits(uint64_t key, uint64_t first_row, uint64_t first_column, Cells<int64_t> out, int num_threads) {
  fill(Origin{key, first_row, first_column}, out, num_threads, [](uint32_t word) { return int64_t(word); });
}

template <typename T>
void uniform_rows(uint64_t key, uint64_t first_row, uint64_t first_column, double scale, Cells<T> out, int num_threads) {
  fill(Origin{key, first_row, first_column}, out, num_threads,
       [scale](uint32_t word) { return T((double(int32_t(word >> 8)) * 0x1p-23 - 1.0) * scale); });
}

}  // namespace

void bind_random_rows(nb::module_& m) {
  m.def("random_bits", &random_bits, nb::arg("key"), nb::arg("first_row"), nb::arg("first_column"), nb::arg("out"),
        nb::arg("num_threads"));
  const auto bind_uniform = [&m](auto function) {
    m.def("uniform_rows", function, nb::arg("key"), nb::arg("first_row"), nb::arg("first_column"), nb::arg("scale"),
          nb::arg("out").noconvert(), nb::arg("num_threads"));
  };
  bind_uniform(&uniform_rows<float>);
  bind_uniform(&uniform_rows<double>);
}
