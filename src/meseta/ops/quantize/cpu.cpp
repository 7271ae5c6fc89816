// Quantization and dequantization of rows. __init__.py describes the layouts.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "ops/checks.h"
#include "ops/parallel.h"
#include "ops/philox.h"
#include "ops/quantize/adaptive.h"
#include "ops/quantize/codes.h"
#include "ops/quantize/grid.h"
#include "ops/quantize/scales.h"
#include "ops/quantize/short_floats.h"
#include "ops/simd.h"
#include "ops/transpose.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

enum Format { kInt8, kInt4, kInt3, kInt2, kE4m3, kE5m2, kFp16, kBf16 };

constexpr int kBits[] = {8, 4, 3, 2};  // By format.

int64_t row_bytes(int format, int64_t dim) {
  if (format == kInt8) return dim + 8;
  if (format <= kInt2) return packed_bytes(dim, kBits[format]) + 4;
  return format == kE4m3 || format == kE5m2 ? dim + 4 : 2 * dim;
}

constexpr Short kShorts[] = {{}, {}, {}, {}, kShortE4m3, kShortE5m2, kShortHalf, kShortBfloat};  // By format.

// Write the bytes of a row of int8, int4, int3 or int2. `scratch` has padded(dim) codes, with zeros at the end.
void write_codes(const uint8_t* scratch, int64_t dim, int format, const Scales& scales, uint8_t* out) {
  if (format == kInt8) {
    std::copy_n(scratch, dim, out);  // `scratch` is null if there are no columns.
    std::memcpy(out + dim, &scales.scale, 4);
    std::memcpy(out + dim + 4, &scales.offset, 4);
    return;
  }
  pack_codes(scratch, dim, kBits[format], out);
  const uint16_t tail[2] = {half_bits(scales.scale), half_bits(scales.offset)};
  std::memcpy(out + packed_bytes(dim, kBits[format]), tail, 4);
}

[[noreturn]] void throw_unrepresentable_range(int64_t index, const ValueRange& span) {
  throw_invalid_argument("row ", index, " spans ", span.low, "..", span.high, ", beyond the range of float16 scales; use int8");
}

[[noreturn]] void throw_unrepresentable_value(int64_t index, const ValueRange& span, const QuantizationGrid& grid) {
  throw_invalid_argument("row ", index, " spans ", span.low, "..", span.high, ", but the adaptive range of these rows is limited to ", grid.largest,
         "; ", grid.largest == 65504.0f ? "use int8" : "use bf16");
}

template <typename Round>
void quantize_int(const float* __restrict row, int64_t dim, int64_t index, int format, const Round& round,
                  uint8_t* __restrict scratch, uint8_t* __restrict out) {
  const ValueRange span = value_range(row, dim, index);
  const float top = float((1 << kBits[format]) - 1);
  Scales scales;
  float inverse;
  if (format == kInt8) {
    scales = {(span.high - span.low) / 255.0f, span.low};
    inverse = 255.0f / (span.high - span.low + 1e-8f);
  } else {
    scales.offset = to_half(span.low);
    scales.scale = to_half((span.high - scales.offset) / top);
    if (!std::isfinite(scales.offset) || !std::isfinite(scales.scale)) throw_unrepresentable_range(index, span);
    if (scales.scale == 0.0f || std::isinf(1.0f / scales.scale)) scales.scale = 1.0f;
    inverse = 1.0f / scales.scale;
  }
  for (int64_t c = 0; c < dim; ++c)
    scratch[c] = uint8_t(int32_t(std::min(std::max(round((row[c] - scales.offset) * inverse, c), 0.0f), top)));
  write_codes(scratch, dim, format, scales, out);
}

template <typename Round>
void quantize_fp8(const float* __restrict row, int64_t dim, int64_t index, const Short& shape, const Round& round,
                  uint8_t* __restrict out) {
  const Short form = shape;
  const ValueRange span = value_range(row, dim, index);
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
  const std::vector<int64_t>& origin;  // Key, first row and first column. Empty for rounding to nearest.
  bool adaptive;
};

template <typename Round>
void quantize_row(const float* row, const Job& job, int64_t index, const Round& round, uint8_t* scratch, uint8_t* out) {
  if (job.format <= kInt2) {
    quantize_int(row, job.dim, index, job.format, round, scratch, out);
  } else if (job.format == kE4m3 || job.format == kE5m2) {
    quantize_fp8(row, job.dim, index, kShorts[job.format], round, out);
  } else {
    quantize_16(row, job.dim, job.format == kFp16, round, out);
  }
}

// Return int8 scales for the full range, with levels that need no rounding in float.
Scales whole_range(const ValueRange& span, const QuantizationGrid& grid) {
  const double unit = level_unit(span.reach(), grid.part, grid.smallest);
  const double offset = std::floor(span.low / unit) * unit;
  const double steps = std::ceil((double(span.high) - offset) / 255.0 / unit);
  return {float(std::max(steps, 1.0) * unit), float(offset)};
}

// Write the codes of a row to `scratch`. Returns the scale and offset that the dequantized row leads to.
Scales stabilize_scales(const float* row, int64_t dim, const ValueRange& span, const QuantizationGrid& grid, Scales scales, float* restored,
              uint8_t* scratch) {
  if (span.low == span.high) {
    std::fill(scratch, scratch + dim, uint8_t(1));
    return scales;
  }
  for (int turn = 0;; ++turn) {
    const float* values = turn ? restored : row;
    const float inverse = 1.0f / scales.scale, top = float(grid.top);
    for (int64_t c = 0; c < dim; ++c) scratch[c] = uint8_t(int32_t(nearest_code(values[c], scales, inverse, top)));
    int lowest = grid.top, step = 0;
    for (int64_t c = 0; c < dim; ++c) lowest = std::min<int>(lowest, scratch[c]);
    for (int64_t c = 0; c < dim && step != 1; ++c) step = std::gcd(step, scratch[c] - lowest);
    if (step == 0) {
      std::fill(scratch, scratch + dim, uint8_t(1));
      const double unit = level_unit(span.reach(), grid.part, grid.smallest);
      return constant_scales(float(std::nearbyint((double(span.low) + span.high) / 2 / unit) * unit) + 0.0f, grid);
    }
    if (turn || (lowest == 0 && step == 1)) return scales;
    for (int64_t c = 0; c < dim; ++c) restored[c] = float(scratch[c]) * scales.scale + scales.offset;
    const auto [low, high] = std::minmax_element(restored, restored + dim);
    scales = grid_scales(restored, dim, {*low, *high}, grid).value();
  }
}

template <typename T>
void quantize_adaptive(const T* rows, const Job& job, int64_t first, int64_t last, uint8_t* out) {
  const int64_t dim = job.dim;
  const QuantizationGrid grid = make_grid<T>(kBits[job.format]);
  const int64_t stride = (dim + kLanes - 1) / kLanes * kLanes;
  std::vector<float> block(static_cast<size_t>(kLanes * stride)), restored(static_cast<size_t>(dim));
  std::vector<uint8_t> scratch(static_cast<size_t>(padded(dim)));
  std::vector<Line> columns(static_cast<size_t>(stride));
  for (int64_t base = first; base < last; base += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, last - base));
    ValueRange spans[kLanes];
    std::optional<Scales> scales[kLanes];
    bool search = false;
    for (int i = 0; i < count; ++i) {
      float* row = block.data() + i * stride;
      for (int64_t c = 0; c < dim; ++c) row[c] = to_float(rows[(base + i) * dim + c]);
      spans[i] = value_range(row, dim, base + i);
      scales[i] = grid_scales(row, dim, spans[i], grid);
      if (!scales[i] && spans[i].reach() > grid.largest) throw_unrepresentable_value(base + i, spans[i], grid);
      search |= !scales[i] && grid.halves;
    }
    float steps[kLanes], offsets[kLanes];
    if (search) {
      for (int64_t c = 0; c < dim; c += kLanes) transpose(block.data() + c, stride, columns[size_t(c)].x, kLanes);
      const RangeCandidate best = AdaptiveRange(columns.data()->x, dim, grid).search();
      store(steps, best.scale);
      store(offsets, best.offset);
    }
    for (int i = 0; i < count; ++i) {
      const float* row = block.data() + i * stride;
      if (!scales[i]) scales[i] = grid.halves ? Scales{steps[i], offsets[i]} : whole_range(spans[i], grid);
      scales[i] = stabilize_scales(row, dim, spans[i], grid, *scales[i], restored.data(), scratch.data());
      write_codes(scratch.data(), dim, job.format, *scales[i], out + (base + i) * row_bytes(job.format, dim));
    }
  }
}

template <typename T>
void quantize_piece(const T* rows, const Job& job, int64_t first, int64_t last, uint8_t* out) {
  if (job.adaptive) return quantize_adaptive(rows, job, first, last, out);
  const bool stochastic = !job.origin.empty();
  std::vector<float> row(static_cast<size_t>(job.dim));
  std::vector<uint8_t> scratch(static_cast<size_t>(padded(job.dim)));
  std::vector<uint32_t> bits(stochastic ? static_cast<size_t>(job.dim) : 0);
  for (int64_t r = first; r < last; ++r) {
    for (int64_t c = 0; c < job.dim; ++c) row[size_t(c)] = to_float(rows[r * job.dim + c]);
    uint8_t* to = out + r * row_bytes(job.format, job.dim);
    if (stochastic) {
      random_words(uint64_t(job.origin[0]), uint64_t(job.origin[1]) + uint64_t(r), uint64_t(job.origin[2]), job.dim, bits.data());
      quantize_row(row.data(), job, r, Stochastic{bits.data()}, scratch.data(), to);
    } else {
      quantize_row(row.data(), job, r, Nearest{}, scratch.data(), to);
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
  if (format != kInt8 && format <= kInt2) {
    const int bits = kBits[format];
    uint16_t tail[2];
    std::memcpy(tail, codes + packed_bytes(dim, bits), 4);
    scale = to_float(Half{tail[0]});
    offset = to_float(Half{tail[1]});
    constexpr int64_t kPiece = 64;
    for (int64_t c = 0; c < dim; c += kPiece) {
      uint8_t piece[kPiece];
      const int64_t count = std::min(kPiece, dim - c);
      unpack_codes(codes + c * bits / 8, count, bits, piece);
      for (int64_t i = 0; i < count; ++i) out[c + i] = float(piece[i]) * scale + offset;
    }
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

// Run body(first, last) for chunks of rows.
template <typename Body>
void for_row_chunks(int64_t num_rows, int64_t dim, int num_threads, Body&& body) {
  const int64_t piece = std::max<int64_t>(16384 / std::max<int64_t>(dim, 1), 1);
  const int64_t pieces = (num_rows + piece - 1) / piece;
  parallel_tasks(num_threads, pieces, [&](int64_t p) { body(p * piece, std::min((p + 1) * piece, num_rows)); });
}

// Quantize rows. `kind` is 0 for float, 1 for half, 2 for bfloat. `shape` is (rows, columns).
void quantize_rows(uintptr_t rows, int kind, std::array<int64_t, 2> shape, int format, bool adaptive,
                   const std::vector<int64_t>& origin, uintptr_t codes, int num_threads) {
  nb::gil_scoped_release unlocked;
  const Job job{shape[0], shape[1], format, origin, adaptive};
  auto* out = reinterpret_cast<uint8_t*>(codes);
  for_row_chunks(job.num_rows, job.dim, num_threads, [&](int64_t first, int64_t last) {
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
  for_row_chunks(shape[0], shape[1], num_threads, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      dequantize_row(reinterpret_cast<const uint8_t*>(codes) + r * bytes, format, shape[1], eighths,
                     reinterpret_cast<float*>(rows) + r * shape[1]);
  });
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize_rows", &quantize_rows, nb::arg("rows"), nb::arg("kind"), nb::arg("shape"), nb::arg("format"),
        nb::arg("adaptive"), nb::arg("origin"), nb::arg("codes"), nb::arg("num_threads"));
  m.def("dequantize_rows", &dequantize_rows, nb::arg("codes"), nb::arg("shape"), nb::arg("format"), nb::arg("rows"),
        nb::arg("num_threads"));
}
