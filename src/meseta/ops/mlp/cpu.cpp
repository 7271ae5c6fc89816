// Backward pass through ReLU and bias in one pass: mask the gradient, transpose it for the weight gradient, and sum it for
// the bias. See reference.py.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/parallel.h"
#include "ops/simd.h"
#include "ops/transpose.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
// gcc warns about the undefined source in its headers for casts between widths (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace nb = nanobind;
using namespace meseta;

namespace {

constexpr int64_t kBlock = 256;  // Samples are added within blocks, and then the blocks: the order of the reference.

template <typename T>
struct ReluBackwardPass {
  int64_t num_samples, width;
  const T* gradient;
  const T* output;     // Output of the layer, or null without ReLU.
  T* masked;           // May be null, or the gradient itself.
  T* transposed;       // [width, num_samples], may be null.
  float* block_sums;   // [blocks, width], initially zero.

  // Process samples [first, first + rows) and columns [column, column + columns), at most sixteen each.
  void square(int64_t first, int rows, int64_t column, int columns, float* sums) const {
    alignas(64) float tile[kLanes * kLanes];
    if (rows < kLanes) std::fill(tile + rows * kLanes, tile + kLanes * kLanes, 0.0f);
    Vec sum = load(sums + column, columns);
    const bool whole = columns == kLanes;
    for (int r = 0; r < rows; ++r) {
      const int64_t at = (first + r) * width + column;
      Vec g = whole ? load(gradient + at) : load(gradient + at, columns);
      if (output != nullptr) g = where_positive(whole ? load(output + at) : load(output + at, columns), g, zero());
      sum = sum + g;
      store(tile + r * kLanes, g);
      if (masked == nullptr) continue;
      if constexpr (sizeof(T) == sizeof(float)) {
        whole ? store(masked + at, g) : store(masked + at, g, columns);
      } else {
        write(masked + at, tile + r * kLanes, columns);
      }
    }
    whole ? store(sums + column, sum) : store(sums + column, sum, columns);
    if (transposed == nullptr) return;
    T* to = transposed + column * num_samples + first;
    if (column + 2 * kLanes <= width)  // The next square writes to sixteen other pages.
      for (int c = kLanes; c < 2 * kLanes; ++c) prefetch_write(to + c * num_samples);
    if constexpr (sizeof(T) == sizeof(float)) {
      if (whole && rows == kLanes) return transpose(tile, kLanes, to, num_samples);
    }
    alignas(64) float turned[kLanes * kLanes];
    transpose(tile, kLanes, turned, kLanes);
    for (int c = 0; c < columns; ++c) write(to + c * num_samples, turned + c * kLanes, rows);
  }

  void block(int64_t index) const {
    const int64_t end = std::min((index + 1) * kBlock, num_samples);
    for (int64_t first = index * kBlock; first < end; first += kLanes)
      for (int64_t column = 0; column < width; column += kLanes)
        square(first, int(std::min<int64_t>(kLanes, end - first)), column,
               int(std::min<int64_t>(kLanes, width - column)), block_sums + index * width);
  }
};

template <typename T>
void run(int64_t num_samples, int64_t width, uintptr_t gradient, uintptr_t output, uintptr_t masked,
         uintptr_t transposed, float* bias_gradient, int num_threads) {
  const int64_t blocks = (num_samples + kBlock - 1) / kBlock;
  std::vector<float> sums(size_t(blocks * width), 0.0f);
  const ReluBackwardPass<T> pass{num_samples,
                     width,
                     reinterpret_cast<const T*>(gradient),
                     reinterpret_cast<const T*>(output),
                     reinterpret_cast<T*>(masked),
                     reinterpret_cast<T*>(transposed),
                     sums.data()};
  parallel(num_threads, [&](int thread) {
    for (int64_t b = blocks * thread / num_threads; b < blocks * (thread + 1) / num_threads; ++b) pass.block(b);
  });
  std::fill(bias_gradient, bias_gradient + width, 0.0f);
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t c = 0; c < width; ++c) bias_gradient[c] += sums[size_t(b * width + c)];
}

// gradient, output and masked [num_samples, width] and transposed [width, num_samples] are bfloat or float. bias_gradient
// [width] is float. output, masked and transposed may be 0. Tensors must be contiguous.
void relu_backward(int64_t num_samples, int64_t width, bool bfloat, uintptr_t gradient, uintptr_t output,
                   uintptr_t masked, uintptr_t transposed, uintptr_t bias_gradient, int num_threads) {
  nb::gil_scoped_release unlocked;
  const auto of = bfloat ? run<Bfloat> : run<float>;
  of(num_samples, width, gradient, output, masked, transposed, reinterpret_cast<float*>(bias_gradient), num_threads);
}

}  // namespace

void bind_mlp(nb::module_& m) {
  m.def("relu_backward", &relu_backward, nb::arg("num_samples"), nb::arg("width"), nb::arg("bfloat"),
        nb::arg("gradient"), nb::arg("output"), nb::arg("masked"), nb::arg("transposed"), nb::arg("bias_gradient"),
        nb::arg("num_threads"));
}
