// Rows in fewer bits and back; the layouts are described in __init__.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/checks.h"
#include "ops/parallel.h"
#include "ops/philox.h"
#include "ops/quantize/short_floats.h"
#include "ops/simd.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

enum Format { kInt8, kInt4, kE4m3, kE5m2, kFp16, kBf16 };

int64_t row_bytes(int format, int64_t dim) {
  if (format == kInt8) return dim + 8;
  if (format == kInt4) return (dim + 1) / 2 + 4;
  return format == kE4m3 || format == kE5m2 ? dim + 4 : 2 * dim;
}

constexpr Short kShorts[] = {{}, {}, kShortE4m3, kShortE5m2, kShortHalf, kShortBfloat};  // by format

uint16_t half_bits(float value) {
  if (std::isnan(value)) return 0x7E00;
  if (std::isinf(value)) return value < 0 ? 0xFC00 : 0x7C00;
  return uint16_t(to_short(value, kShorts[kFp16], Nearest{}, 0));
}

struct Span {
  float low, high;
};

// Floats in the order of these integers, which the compiler compares many at a time.
inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }

Span span_of(const float* row, int64_t dim, int64_t index) {
  int32_t lowest = std::numeric_limits<int32_t>::max(), highest = std::numeric_limits<int32_t>::min();
  uint32_t largest = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const uint32_t bits = float_to_bits(row[c]);
    lowest = std::min(lowest, ordered(int32_t(bits)));
    highest = std::max(highest, ordered(int32_t(bits)));
    largest = std::max(largest, bits & 0x7FFFFFFFu);
  }
  if (dim == 0) return {0, 0};
  const float low = bits_to_float(uint32_t(ordered(lowest))), high = bits_to_float(uint32_t(ordered(highest)));
  if (largest >= 0x7F800000u || !std::isfinite(high - low))
    refuse("row ", index, " holds a value that is not finite, or its range is not; clean it, or take fp16 or bf16");
  return {low + 0.0f, high + 0.0f};  // no negative zero
}

template <typename Round>
void quantize_int(const float* __restrict row, int64_t dim, int64_t index, bool nibbles, const Round& round,
                  uint8_t* __restrict out) {
  const Span span = span_of(row, dim, index);
  float scale, offset, inverse;
  if (!nibbles) {
    offset = span.low;
    scale = (span.high - span.low) / 255.0f;
    inverse = 255.0f / (span.high - span.low + 1e-8f);
  } else {
    offset = to_float(Half{half_bits(span.low)});
    scale = to_float(Half{half_bits((span.high - offset) / 15.0f)});
    if (!std::isfinite(offset) || !std::isfinite(scale))
      refuse("row ", index, " spans ", span.low, "..", span.high, ", which float16 scales do not reach; take int8");
    if (scale == 0.0f || std::isinf(1.0f / scale)) scale = 1.0f;
    inverse = 1.0f / scale;
  }
  const float top = nibbles ? 15.0f : 255.0f;
  const auto code = [&](int64_t c) {
    return uint8_t(int32_t(std::min(std::max(round((row[c] - offset) * inverse, c), 0.0f), top)));
  };
  if (!nibbles) {
    for (int64_t c = 0; c < dim; ++c) out[c] = code(c);
    std::memcpy(out + dim, &scale, 4);
    std::memcpy(out + dim + 4, &offset, 4);
    return;
  }
  for (int64_t c = 0; c < dim; c += 2) out[c / 2] = uint8_t(code(c) | (c + 1 < dim ? code(c + 1) << 4 : 0));
  const uint16_t tail[2] = {half_bits(scale), half_bits(offset)};
  std::memcpy(out + (dim + 1) / 2, tail, 4);
}

template <typename Round>
void quantize_fp8(const float* __restrict row, int64_t dim, int64_t index, const Short& shape, const Round& round,
                  uint8_t* __restrict out) {
  const Short form = shape;
  const Span span = span_of(row, dim, index);
  const float largest = from_short(form.largest, form), reach = std::max(std::fabs(span.low), std::fabs(span.high));
  const float scale = reach == 0.0f ? 1.0f : std::max(reach / largest, 0x1p-126f);
  for (int64_t c = 0; c < dim; ++c)
    out[c] = uint8_t(to_short(std::clamp(row[c] / scale, -largest, largest), form, round, c));
  std::memcpy(out + dim, &scale, 4);
}

template <typename Round>
void quantize_16(const float* __restrict row, int64_t dim, bool half, const Round& round, uint8_t* __restrict out) {
  const Short form = kShorts[half ? kFp16 : kBf16];
  for (int64_t c = 0; c < dim; ++c) {
    const uint32_t bits = float_to_bits(row[c]);
    const uint32_t magnitude = bits & 0x7FFFFFFFu, quiet = magnitude > 0x7F800000u ? 0x40u : 0u;
    const uint32_t special = half ? (bits >> 16 & 0x8000u) | 0x7C00u | quiet << 3 : bits >> 16 | quiet;
    const uint32_t finite = to_short(magnitude < 0x7F800000u ? row[c] : 0.0f, form, round, c);
    const uint16_t code = uint16_t(magnitude < 0x7F800000u ? finite : special);
    std::memcpy(out + 2 * c, &code, 2);
  }
}

struct Job {
  int64_t num_rows, dim;
  int format;
  const std::vector<int64_t>& origin;  // key, first row, first column; empty: nearest
};

template <typename Round>
void quantize_row(const float* row, const Job& job, int64_t index, const Round& round, uint8_t* out) {
  if (job.format == kInt8 || job.format == kInt4) {
    quantize_int(row, job.dim, index, job.format == kInt4, round, out);
  } else if (job.format == kE4m3 || job.format == kE5m2) {
    quantize_fp8(row, job.dim, index, kShorts[job.format], round, out);
  } else {
    quantize_16(row, job.dim, job.format == kFp16, round, out);
  }
}

template <typename T>
void quantize_piece(const T* rows, const Job& job, int64_t first, int64_t last, uint8_t* out) {
  const bool stochastic = !job.origin.empty();
  std::vector<float> row(static_cast<size_t>(job.dim));
  std::vector<uint32_t> bits(stochastic ? static_cast<size_t>(job.dim) : 0);
  for (int64_t r = first; r < last; ++r) {
    for (int64_t c = 0; c < job.dim; ++c) row[size_t(c)] = to_float(rows[r * job.dim + c]);
    uint8_t* to = out + r * row_bytes(job.format, job.dim);
    if (stochastic) {
      random_words(uint64_t(job.origin[0]), uint64_t(job.origin[1]) + uint64_t(r), uint64_t(job.origin[2]), job.dim, bits.data());
      quantize_row(row.data(), job, r, Stochastic{bits.data()}, to);
    } else {
      quantize_row(row.data(), job, r, Nearest{}, to);
    }
  }
}

void dequantize_row(const uint8_t* __restrict codes, int format, int64_t dim, const float* eighths,
                    float* __restrict out) {
  if (format == kFp16 || format == kBf16) {
    for (int64_t c = 0; c < dim; ++c) {
      uint16_t code;
      std::memcpy(&code, codes + 2 * c, 2);
      out[c] = format == kFp16 ? to_float(Half{code}) : to_float(Bfloat{code});
    }
    return;
  }
  float scale = 0, offset = 0;
  if (format == kInt4) {
    uint16_t tail[2];
    std::memcpy(tail, codes + (dim + 1) / 2, 4);
    scale = to_float(Half{tail[0]});
    offset = to_float(Half{tail[1]});
    for (int64_t c = 0; c + 1 < dim; c += 2) {
      out[c] = float(codes[c / 2] & 15) * scale + offset;
      out[c + 1] = float(codes[c / 2] >> 4) * scale + offset;
    }
    if (dim % 2) out[dim - 1] = float(codes[dim / 2] & 15) * scale + offset;
    return;
  }
  std::memcpy(&scale, codes + dim, 4);
  if (format == kInt8) {
    std::memcpy(&offset, codes + dim + 4, 4);
    for (int64_t c = 0; c < dim; ++c) out[c] = float(codes[c]) * scale + offset;
  } else {
    for (int64_t c = 0; c < dim; ++c) out[c] = eighths[codes[c]] * scale;
  }
}

// body(first, last) for pieces of the rows.
template <typename Body>
void over_rows(int64_t num_rows, int64_t dim, int num_threads, Body&& body) {
  const int64_t piece = std::max<int64_t>(16384 / std::max<int64_t>(dim, 1), 1);
  const int64_t pieces = (num_rows + piece - 1) / piece;
  parallel_tasks(num_threads, pieces, [&](int64_t p) { body(p * piece, std::min((p + 1) * piece, num_rows)); });
}

// `kind`: 0 float, 1 half, 2 bfloat. `shape`: rows and columns.
void quantize_rows(uintptr_t rows, int kind, std::array<int64_t, 2> shape, int format,
                   const std::vector<int64_t>& origin, uintptr_t codes, int num_threads) {
  nb::gil_scoped_release unlocked;
  const Job job{shape[0], shape[1], format, origin};
  auto* out = reinterpret_cast<uint8_t*>(codes);
  over_rows(job.num_rows, job.dim, num_threads, [&](int64_t first, int64_t last) {
    if (kind == 0) quantize_piece(reinterpret_cast<const float*>(rows), job, first, last, out);
    if (kind == 1) quantize_piece(reinterpret_cast<const Half*>(rows), job, first, last, out);
    if (kind == 2) quantize_piece(reinterpret_cast<const Bfloat*>(rows), job, first, last, out);
  });
}

void dequantize_rows(uintptr_t codes, std::array<int64_t, 2> shape, int format, uintptr_t rows, int num_threads) {
  nb::gil_scoped_release unlocked;
  float eighths[256] = {};
  if (format == kE4m3 || format == kE5m2)
    for (uint32_t code = 0; code < 256; ++code) {
      const bool finite = (code & 0x7F) <= kShorts[format].largest, infinite = format == kE5m2 && (code & 0x7F) == 0x7C;
      const float beyond = infinite ? (code & 0x80 ? -INFINITY : INFINITY) : NAN;
      eighths[code] = finite ? from_short(code, kShorts[format]) : beyond;
    }
  const int64_t bytes = row_bytes(format, shape[1]);
  over_rows(shape[0], shape[1], num_threads, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      dequantize_row(reinterpret_cast<const uint8_t*>(codes) + r * bytes, format, shape[1], eighths,
                     reinterpret_cast<float*>(rows) + r * shape[1]);
  });
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize_rows", &quantize_rows, nb::arg("rows"), nb::arg("kind"), nb::arg("shape"), nb::arg("format"),
        nb::arg("origin"), nb::arg("codes"), nb::arg("num_threads"));
  m.def("dequantize_rows", &dequantize_rows, nb::arg("codes"), nb::arg("shape"), nb::arg("format"), nb::arg("rows"),
        nb::arg("num_threads"));
}
