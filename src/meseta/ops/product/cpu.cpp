// Matrix products that are bitwise identical for any number of threads. The division of the work depends on the shape only,
// and one kernel adds each element of the result from the first term to the last.
//
// This file is compiled with fused multiply-adds if the instruction set has them (CMakeLists.txt). A product may therefore
// differ between instruction sets in its last bits.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ops/parallel.h"
#include "ops/simd.h"
#include "ops/transpose.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

// One register of the instruction set, and the number of rows of two registers in the innermost loop.
#if defined(__AVX512F__)
constexpr int kBytes = 64, kRows = 12;
#elif defined(__AVX2__)
constexpr int kBytes = 32, kRows = 6;
#else
constexpr int kBytes = 16, kRows = 4;
#endif
constexpr int64_t kTileRows = 96, kTileColumns = 128;  // Rows and columns of the result per task.
constexpr int64_t kDepth = 256;                        // Terms that are packed at a time.
constexpr int64_t kMinUncutTiles = 16, kMaxParts = 16;      // With fewer tiles, the sum is also divided.
constexpr int64_t kLine = 2048;                        // Columns per task if the result has one row.
constexpr int64_t kMinParallelProducts = 1 << 15;                    // With fewer multiplications, one thread is used.

template <typename S>
using Register __attribute__((vector_size(kBytes))) = S;
template <typename S>
constexpr int64_t kWidth = 2 * kBytes / int64_t(sizeof(S));

template <typename T>
struct Sum {
  using Type = float;
};
template <>
struct Sum<double> {
  using Type = double;
};

inline double widen(double value) { return value; }
inline float widen(float value) { return value; }
inline float widen(Bfloat value) { return to_float(value); }
using meseta::write;  // Writes floats to float and Bfloat.
inline void write(double* to, const double* from, int64_t n) { std::copy_n(from, n, to); }

template <typename T>
struct Problem {
  int64_t batch, M, N, K;
  const T* a;
  std::array<int64_t, 3> a_strides;  // Strides of batch, row and term.
  const T* b;
  std::array<int64_t, 3> b_strides;  // Strides of batch, term and column.
  const T* bias;                     // [N], or null.
  T* out;                            // [batch, M, N].
};

// Add the product of a [depth, kRows] and b [depth, kWidth] to sums [kRows, kWidth].
template <typename S>
inline void add_products(int64_t depth, const S* a, const S* b, S* sums, int64_t stride) {
  using V = Register<S>;
  constexpr int64_t half = kWidth<S> / 2;
  V total[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(&total[r][0], sums + r * stride, kBytes);
    std::memcpy(&total[r][1], sums + r * stride + half, kBytes);
  }
  for (int64_t k = 0; k < depth; ++k) {
    V left, right;
    std::memcpy(&left, b + k * kWidth<S>, kBytes);
    std::memcpy(&right, b + k * kWidth<S> + half, kBytes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const S factor = a[k * kRows + r];
      total[r][0] += factor * left;
      total[r][1] += factor * right;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(sums + r * stride, &total[r][0], kBytes);
    std::memcpy(sums + r * stride + half, &total[r][1], kBytes);
  }
}

// Pack panels of `size` rows or columns, term by term, padded with zeros.
template <int64_t size, typename T, typename S>
void pack(const T* from, int64_t count, int64_t stride, int64_t depth, int64_t term_stride, S* to) {
  for (int64_t first = 0; first < count; first += size, to += size * depth) {
    const int64_t n = std::min(size, count - first);
    const T* panel = from + first * stride;
    if (n < size) std::fill(to, to + size * depth, S(0));
    if (stride == 1) {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t i = 0; i < n; ++i) to[k * size + i] = widen(panel[k * term_stride + i]);
    } else {
      for (int64_t i = 0; i < n; ++i)
        for (int64_t k = 0; k < depth; ++k) to[k * size + i] = widen(panel[i * stride + k * term_stride]);
    }
  }
}

template <typename S>
struct Buffers {
  std::vector<S> a = std::vector<S>(size_t(kTileRows * kDepth));
  std::vector<S> b = std::vector<S>(size_t(kTileColumns * kDepth));
  std::vector<S> sums = std::vector<S>(size_t(kTileRows * kTileColumns));
};

// Add terms [begin, end) of the tile that starts at (row, column) to buffers.sums.
template <typename T, typename S>
void add_tile(const Problem<T>& p, int64_t item, int64_t row, int64_t column, int64_t begin, int64_t end,
              Buffers<S>& buffers) {
  const int64_t rows = std::min(kTileRows, p.M - row), columns = std::min(kTileColumns, p.N - column);
  std::fill(buffers.sums.begin(), buffers.sums.end(), S(0));
  for (int64_t first = begin; first < end; first += kDepth) {
    const int64_t depth = std::min(kDepth, end - first);
    pack<kRows>(p.a + item * p.a_strides[0] + row * p.a_strides[1] + first * p.a_strides[2], rows, p.a_strides[1], depth,
                p.a_strides[2], buffers.a.data());
    pack<kWidth<S>>(p.b + item * p.b_strides[0] + first * p.b_strides[1] + column * p.b_strides[2], columns,
                    p.b_strides[2], depth, p.b_strides[1], buffers.b.data());
    for (int64_t c = 0; c < columns; c += kWidth<S>)
      for (int64_t r = 0; r < rows; r += kRows)
        add_products(depth, buffers.a.data() + r * depth, buffers.b.data() + c * depth,
                     buffers.sums.data() + r * kTileColumns + c, kTileColumns);
  }
}

// Add terms [begin, end) of columns [column, column + columns) of a result with one row. b is stored row by row.
template <typename T, typename S>
void add_line(const Problem<T>& p, int64_t item, int64_t column, int64_t columns, int64_t begin, int64_t end, S* sums) {
  const T* a = p.a + item * p.a_strides[0];
  const T* b = p.b + item * p.b_strides[0] + column;
  int64_t k = begin;
  for (; k + 4 <= end; k += 4) {
    S factor[4];
    const T* line[4];
    for (int i = 0; i < 4; ++i) {
      factor[i] = widen(a[(k + i) * p.a_strides[2]]);
      line[i] = b + (k + i) * p.b_strides[1];
    }
    for (int64_t c = 0; c < columns; ++c) {
      S sum = sums[c];
      sum += factor[0] * widen(line[0][c]);
      sum += factor[1] * widen(line[1][c]);
      sum += factor[2] * widen(line[2][c]);
      sum += factor[3] * widen(line[3][c]);
      sums[c] = sum;
    }
  }
  for (; k < end; ++k) {
    const S factor = widen(a[k * p.a_strides[2]]);
    const T* line = b + k * p.b_strides[1];
    for (int64_t c = 0; c < columns; ++c) sums[c] += factor * widen(line[c]);
  }
}

template <typename T, typename S>
void finish(const Problem<T>& p, const S* sums, int64_t column, int64_t columns, T* out) {
  S line[kLine];
  for (int64_t c = 0; c < columns; ++c) line[c] = p.bias ? sums[c] + widen(p.bias[column + c]) : sums[c];
  write(out, line, columns);
}

template <typename T>
void run(const Problem<T>& p, int num_threads) {
  using S = typename Sum<T>::Type;
  const bool is_line = p.M == 1 && p.b_strides[2] == 1;
  const int64_t tile_rows = is_line ? 1 : kTileRows, tile_columns = is_line ? kLine : kTileColumns;
  const int64_t down = (p.M + tile_rows - 1) / tile_rows, across = (p.N + tile_columns - 1) / tile_columns;
  const int64_t tiles = p.batch * down * across;
  // Divide the sum into parts, which are added in order. Their number depends on the shape only, and their length is a
  // multiple of kDepth.
  const int64_t wanted = tiles < kMinUncutTiles ? std::min(kMaxParts, std::max<int64_t>(p.K / (2 * kDepth), 1)) : 1;
  const int64_t length = std::max((p.K / wanted + kDepth - 1) / kDepth * kDepth, kDepth);
  const int64_t parts = wanted == 1 ? 1 : (p.K + length - 1) / length;
  const int64_t size = p.batch * p.M * p.N;
  std::vector<S> partial(size_t(parts > 1 ? parts * size : 0));
  if (size * p.K < kMinParallelProducts) num_threads = 1;
  parallel_tasks(num_threads, tiles * parts, [&](int64_t task) {
    static thread_local Buffers<S> buffers;
    const int64_t part = task / tiles, tile = task % tiles, item = tile / (down * across);
    const int64_t row = tile / across % down * tile_rows, column = tile % across * tile_columns;
    const int64_t rows = std::min(tile_rows, p.M - row), columns = std::min(tile_columns, p.N - column);
    const int64_t begin = part * length, end = parts == 1 ? p.K : std::min(begin + length, p.K);
    if (is_line) {
      std::fill_n(buffers.sums.begin(), columns, S(0));
      add_line(p, item, column, columns, begin, end, buffers.sums.data());
    } else {
      add_tile(p, item, row, column, begin, end, buffers);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const S* sums = buffers.sums.data() + r * kTileColumns;
      const int64_t at = (item * p.M + row + r) * p.N + column;
      if (parts > 1) {
        std::copy_n(sums, columns, partial.data() + part * size + at);
      } else {
        finish(p, sums, column, columns, p.out + at);
      }
    }
  });
  if (parts == 1) return;
  for (int64_t part = 1; part < parts; ++part)
    for (int64_t i = 0; i < size; ++i) partial[size_t(i)] += partial[size_t(part * size + i)];
  for (int64_t line = 0; line < p.batch * p.M; ++line)
    for (int64_t column = 0; column < p.N; column += kLine)
      finish(p, partial.data() + line * p.N + column, column, std::min(kLine, p.N - column), p.out + line * p.N + column);
}

template <typename T>
void run_addresses(std::array<int64_t, 4> shape, std::array<uintptr_t, 4> addresses, std::array<int64_t, 3> a_strides,
                   std::array<int64_t, 3> b_strides, int num_threads) {
  run(Problem<T>{shape[0], shape[1], shape[2], shape[3], reinterpret_cast<const T*>(addresses[0]), a_strides,
                 reinterpret_cast<const T*>(addresses[1]), b_strides, reinterpret_cast<const T*>(addresses[2]),
                 reinterpret_cast<T*>(addresses[3])},
      num_threads);
}

// Multiply matrices. `shape` is (batch, rows, columns, terms). `addresses` are those of a [batch, rows, terms], b [batch,
// terms, columns], bias [columns] or 0, and the contiguous result. `kind` is 0 for float, 1 for double, 2 for bfloat, whose
// sums are floats. Strides are in elements.
void product(int kind, std::array<int64_t, 4> shape, std::array<uintptr_t, 4> addresses, std::array<int64_t, 3> a_strides,
             std::array<int64_t, 3> b_strides, int num_threads) {
  nb::gil_scoped_release unlocked;
  const auto of = kind == 0 ? run_addresses<float> : kind == 1 ? run_addresses<double> : run_addresses<Bfloat>;
  of(shape, addresses, a_strides, b_strides, num_threads);
}

}  // namespace

void bind_product(nb::module_& m) {
  m.def("product", &product, nb::arg("kind"), nb::arg("shape"), nb::arg("addresses"), nb::arg("a_strides"),
        nb::arg("b_strides"), nb::arg("num_threads"));
}
