// Dot products of all pairs of vectors of a sample, with sixteen samples in the lanes of a register. See reference.py.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/parallel.h"
#include "ops/simd.h"
#include "ops/transpose.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

#if defined(__AVX512F__)
constexpr int kTile = 4;  // 16 sums and 8 operands fit into 32 registers.
#else
constexpr int kTile = 2;
#endif
constexpr int kSquare = kLanes * kLanes;

struct Shape {
  int64_t num_samples, num_features, dim;  // Features without x.
  int64_t vectors() const { return num_features + 1; }
  int64_t padded() const { return (vectors() + kTile - 1) / kTile * kTile; }
  int64_t pairs() const { return vectors() * num_features / 2; }
  int64_t pooled_width() const { return num_features * dim; }
  int64_t width() const { return dim + pairs(); }
  // Return the number of samples in the group after the one that starts at `first`.
  int next(int64_t first) const { return int(std::clamp<int64_t>(num_samples - first - kLanes, 0, kLanes)); }
};

// Prefetch the data of the next group at the same position: 64 bytes of each of sixteen rows. The hardware prefetcher does
// not detect this pattern.
template <typename T>
void fetch_next(const T* at, int64_t stride, int count) {
  for (int s = 0; s < count; ++s) prefetch(at + (kLanes + s) * stride);
}
template <typename T>
void fetch_next_to_write(const T* at, int64_t stride, int count) {
  for (int s = 0; s < count; ++s) prefetch_write(at + (kLanes + s) * stride);
}

// Return the position of the product of vectors i > j.
inline int64_t place(int64_t i, int64_t j) { return i * (i - 1) / 2 + j; }

// Gather samples [first, first + rows) and columns [column, column + columns) of all vectors, with samples in lanes:
// lanes[16 columns][padded vectors][16 samples]. Samples and columns outside the range are zero, and so are the vectors that
// pad the last tile.
template <typename X>
void gather(const Shape& shape, const X* x, const float* pooled, int64_t first, int rows, int64_t column, float* lanes) {
  const int columns = int(std::min<int64_t>(kLanes, shape.dim - column));
  const int64_t width = shape.pooled_width(), stride = shape.padded() * kLanes;
  transpose_in(x + first * shape.dim + column, shape.dim, rows, columns, lanes, stride);
  const float* from = pooled + first * width + column;
  for (int64_t f = 0; f < shape.num_features; ++f, from += shape.dim) {
    fetch_next(from, width, shape.next(first));
    transpose_in(from, width, rows, columns, lanes + (f + 1) * kLanes, stride);
  }
}

// Compute a tile of products of vectors i.. and j... Those on and above the diagonal are skipped.
template <bool kDiagonal>
void multiply_tile(const Shape& shape, const float* lanes, int64_t i, int64_t j, bool first_columns, float* sums) {
  const int64_t vectors = shape.vectors(), stride = shape.padded() * kLanes;
  const auto kept = [&](int r, int c) { return (!kDiagonal || r > c) && i + r < vectors; };
  Vec sum[kTile][kTile];
  for (int r = 0; r < kTile; ++r)
    for (int c = 0; c < kTile; ++c)
      sum[r][c] = kept(r, c) && !first_columns ? load(sums + place(i + r, j + c) * kLanes) : zero();
  for (int d = 0; d < kLanes; ++d) {
    const float* at = lanes + d * stride;
    Vec a[kTile], b[kTile];
    for (int r = 0; r < kTile; ++r) a[r] = load(at + (i + r) * kLanes);
    for (int c = 0; c < kTile; ++c) b[c] = load(at + (j + c) * kLanes);
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c)
        if (!kDiagonal || r > c) sum[r][c] = sum[r][c] + a[r] * b[c];
  }
  for (int r = 0; r < kTile; ++r)
    for (int c = 0; c < kTile; ++c)
      if (kept(r, c)) store(sums + place(i + r, j + c) * kLanes, sum[r][c]);
}

// Write the products of one group, with samples in lanes, to the rows of `out`.
template <typename X>
void scatter_pairs(const Shape& shape, const float* sums, int64_t first, int rows, X* out) {
  alignas(64) float square[kSquare];
  X* to = out + first * shape.width() + shape.dim;
  for (int64_t p = 0; p < shape.pairs(); p += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, shape.pairs() - p);
    fetch_next_to_write(to + p, shape.width(), shape.next(first));
    if constexpr (sizeof(X) == sizeof(float)) {
      if (rows == kLanes && count == kLanes) {
        transpose(sums + p * kLanes, kLanes, to + p, shape.width());
        continue;
      }
    }
    transpose(sums + p * kLanes, kLanes, square, kLanes);
    for (int s = 0; s < rows; ++s) write(to + s * shape.width() + p, square + s * kLanes, count);
  }
}

template <typename X>
void forward(const Shape& shape, const X* x, const float* pooled, X* out, int num_threads) {
  const int64_t groups = (shape.num_samples + kLanes - 1) / kLanes;
  parallel(num_threads, [&](int thread) {
    std::vector<Line> lane_memory(size_t(shape.padded() * kLanes)), sum_memory(size_t(shape.pairs() + kLanes));
    float *lanes = lines(lane_memory), *sums = lines(sum_memory);
    for (int64_t group = groups * thread / num_threads; group < groups * (thread + 1) / num_threads; ++group) {
      const int64_t first = group * kLanes;
      const int rows = int(std::min<int64_t>(kLanes, shape.num_samples - first));
      for (int64_t column = 0; column < shape.dim; column += kLanes) {
        gather(shape, x, pooled, first, rows, column, lanes);
        for (int64_t i = 0; i < shape.padded(); i += kTile) {
          for (int64_t j = 0; j < i; j += kTile)
            multiply_tile<false>(shape, lanes, i, j, column == 0, sums);
          multiply_tile<true>(shape, lanes, i, i, column == 0, sums);
        }
      }
      scatter_pairs(shape, sums, first, rows, out);
      for (int64_t s = first; s < first + rows; ++s)
        std::memcpy(out + s * shape.width(), x + s * shape.dim, size_t(shape.dim) * sizeof(X));
    }
  });
}

// Compute result[r][d] = sum over j of gradient(i + r, j) * vector j [d], for kTile vectors and 16 columns. `square` has
// the gradients of the tile as [vectors j][kTile][16 samples].
inline void multiply_back(const Shape& shape, const float* lanes, const float* square, float* result) {
  const int64_t stride = shape.padded() * kLanes;
  for (int d = 0; d < kLanes; d += kTile) {
    Vec sum[kTile][kTile];
    for (auto& row : sum)
      for (Vec& one : row) one = zero();
    const float *from = lanes + d * stride, *gradient = square;
    for (int64_t j = 0; j < shape.vectors(); ++j, from += kLanes, gradient += kTile * kLanes) {
      Vec g[kTile], v[kTile];
      for (int r = 0; r < kTile; ++r) g[r] = load(gradient + r * kLanes);
      for (int c = 0; c < kTile; ++c) v[c] = load(from + c * stride);
      for (int r = 0; r < kTile; ++r)
        for (int c = 0; c < kTile; ++c) sum[r][c] = sum[r][c] + g[r] * v[c];
    }
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < kTile; ++c) store(result + r * kSquare + (d + c) * kLanes, sum[r][c]);
  }
}

// Convert the gradients of pairs, [pairs][16 samples], to the tiles that multiply_back reads. The gradients of a vector
// with itself and of padding are zero.
inline void spread(const Shape& shape, const float* pairs, float* square) {
  for (int64_t i = 0; i < shape.padded(); i += kTile)
    for (int64_t j = 0; j < shape.vectors(); ++j)
      for (int64_t v = i; v < i + kTile; ++v, square += kLanes) {
        const bool pair = v != j && v < shape.vectors();
        store(square, pair ? load(pairs + place(std::max(v, j), std::min(v, j)) * kLanes) : zero());
      }
}

template <typename X>
struct Backward {
  Shape shape;
  const X* gradient;
  const X* x;
  const float* pooled;
  X* x_gradient;
  float* pooled_gradient;

  // Write columns [column, column + 16) of the gradient of vector v, with samples in lanes, to its rows.
  void scatter(const float* lanes, int64_t v, int64_t first, int rows, int64_t column) const {
    const int64_t count = std::min<int64_t>(kLanes, shape.dim - column), width = shape.pooled_width();
    alignas(64) float square[kSquare];
    if (v > 0) {
      float* to = pooled_gradient + first * width + (v - 1) * shape.dim + column;
      fetch_next_to_write(to, width, shape.next(first));
      if (rows == kLanes && count == kLanes) return transpose(lanes, kLanes, to, width);
      transpose(lanes, kLanes, square, kLanes);
      for (int s = 0; s < rows; ++s) write(to + s * width, square + s * kLanes, count);
      return;
    }
    transpose(lanes, kLanes, square, kLanes);
    for (int s = 0; s < rows; ++s) {
      const X* direct = gradient + (first + s) * shape.width() + column;
      for (int64_t c = 0; c < count; ++c) square[s * kLanes + c] += to_float(direct[c]);
      write(x_gradient + (first + s) * shape.dim + column, square + s * kLanes, count);
    }
  }

  void run(int num_threads) const {
    const int64_t groups = (shape.num_samples + kLanes - 1) / kLanes;
    parallel(num_threads, [&](int thread) {
      std::vector<Line> lane_memory(size_t(shape.padded() * kLanes)), pair_memory(size_t(shape.pairs() + kLanes));
      std::vector<Line> square_memory(size_t(shape.padded() * shape.vectors())), tile_memory(kTile * kLanes);
      float *lanes = lines(lane_memory), *pairs = lines(pair_memory);
      float *square = lines(square_memory), *tile = lines(tile_memory);
      for (int64_t group = groups * thread / num_threads; group < groups * (thread + 1) / num_threads; ++group) {
        const int64_t first = group * kLanes;
        const int rows = int(std::min<int64_t>(kLanes, shape.num_samples - first));
        const X* from = gradient + first * shape.width() + shape.dim;
        for (int64_t p = 0; p < shape.pairs(); p += kLanes) {
          fetch_next(from + p, shape.width(), shape.next(first));
          transpose_in(from + p, shape.width(), rows, int(std::min<int64_t>(kLanes, shape.pairs() - p)),
                       pairs + p * kLanes, kLanes);
        }
        spread(shape, pairs, square);
        for (int64_t column = 0; column < shape.dim; column += kLanes) {
          gather(shape, x, pooled, first, rows, column, lanes);
          for (int64_t i = 0; i < shape.padded(); i += kTile) {
            multiply_back(shape, lanes, square + i * shape.vectors() * kLanes, tile);
            for (int64_t v = i; v < std::min(i + kTile, shape.vectors()); ++v)
              scatter(tile + (v - i) * kSquare, v, first, rows, column);
          }
        }
      }
    });
  }
};

template <typename X>
void forward_of(const Shape& shape, uintptr_t x, uintptr_t pooled, uintptr_t out, int num_threads) {
  forward(shape, reinterpret_cast<const X*>(x), reinterpret_cast<const float*>(pooled), reinterpret_cast<X*>(out),
          num_threads);
}

template <typename X>
void backward_of(const Shape& shape, uintptr_t gradient, uintptr_t x, uintptr_t pooled, uintptr_t x_gradient,
                 uintptr_t pooled_gradient, int num_threads) {
  const Backward<X> backward{shape,
                             reinterpret_cast<const X*>(gradient),
                             reinterpret_cast<const X*>(x),
                             reinterpret_cast<const float*>(pooled),
                             reinterpret_cast<X*>(x_gradient),
                             reinterpret_cast<float*>(pooled_gradient)};
  backward.run(num_threads);
}

// x [num_samples, dim] and out [num_samples, dim + pairs] are bfloat or float, pooled [num_samples, num_features * dim] is
// float. Tensors must be contiguous, and the caller must keep them alive.
void dot_interaction(int64_t num_samples, int64_t num_features, int64_t dim, bool bfloat, uintptr_t x, uintptr_t pooled,
                     uintptr_t out, int num_threads) {
  nb::gil_scoped_release unlocked;
  const auto run = bfloat ? forward_of<Bfloat> : forward_of<float>;
  run({num_samples, num_features, dim}, x, pooled, out, num_threads);
}

void dot_interaction_backward(int64_t num_samples, int64_t num_features, int64_t dim, bool bfloat, uintptr_t gradient,
                              uintptr_t x, uintptr_t pooled, uintptr_t x_gradient, uintptr_t pooled_gradient,
                              int num_threads) {
  nb::gil_scoped_release unlocked;
  const auto run = bfloat ? backward_of<Bfloat> : backward_of<float>;
  run({num_samples, num_features, dim}, gradient, x, pooled, x_gradient, pooled_gradient, num_threads);
}

}  // namespace

void bind_dot_interaction(nb::module_& m) {
  m.def("dot_interaction", &dot_interaction, nb::arg("num_samples"), nb::arg("num_features"), nb::arg("dim"),
        nb::arg("bfloat"), nb::arg("x"), nb::arg("pooled"), nb::arg("out"), nb::arg("num_threads"));
  m.def("dot_interaction_backward", &dot_interaction_backward, nb::arg("num_samples"), nb::arg("num_features"),
        nb::arg("dim"), nb::arg("bfloat"), nb::arg("gradient"), nb::arg("x"), nb::arg("pooled"), nb::arg("x_gradient"),
        nb::arg("pooled_gradient"), nb::arg("num_threads"));
}
