// Parser of Criteo's lines: label, 13 whole numbers, 26 strings. It handles lines in their usual form and reports all others,
// so that only one parser, the reference, decides what is invalid.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace {

constexpr int kNumDense = 13, kNumSparse = 26, kMaxDigits = 18;

template <typename T, int dims>
using Array = nb::ndarray<T, nb::ndim<dims>, nb::c_contig, nb::device::cpu>;

// Whether one of eight bytes is below 16, as tab, line feed and carriage return are. May return true for other bytes too.
inline bool may_contain_field_end(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return ((word - 0x1010101010101010ULL) & 0x8080808080808080ULL) != 0;
}

// Return the first byte at or after `p` that ends a field. The text must end with a line feed.
inline const uint8_t* field_end(const uint8_t* p, const uint8_t* end) {
  while (end - p >= 8 && !may_contain_field_end(p)) p += 8;
  while (*p != '\t' && *p != '\n' && *p != '\r') ++p;
  return p;
}

// Read "0" or "1" before a tab. Returns null for anything else.
inline const uint8_t* read_label(const uint8_t* p, const uint8_t* end, float& label) {
  if (end - p < 2 || (p[0] != '0' && p[0] != '1') || p[1] != '\t') return nullptr;
  label = float(p[0] - '0');
  return p + 2;
}

// Read an optional sign and at most 18 digits, or nothing, before a tab. Negative and missing numbers are 0.
inline const uint8_t* read_number(const uint8_t* p, double& number) {
  const bool is_negative = *p == '-';
  p += is_negative;
  int64_t value = 0;
  const uint8_t* const first = p;
  for (; uint8_t(*p - '0') < 10; ++p) {
    if (p - first == kMaxDigits) return nullptr;
    value = value * 10 + (*p - '0');
  }
  if (*p != '\t' || (is_negative && p == first)) return nullptr;
  number = is_negative ? 0.0 : double(value);
  return p + 1;
}

constexpr int64_t kBlock = 256;

// Rows that are buffered before they are written to the columns, which are too far apart for writing single rows.
struct Block {
  float label[kBlock];
  double dense[kNumDense][kBlock];
  int32_t lengths[kNumSparse][kBlock];
  uint32_t starts[kNumSparse][kBlock];
};

struct Columns {
  float* label;
  double* dense;     // [13, n].
  int32_t* offsets;  // [26, n + 1], initially lengths.
  uint32_t* starts;  // [26, n], offsets into the text.
  int64_t num_rows;

  void take(const Block& block, int64_t first, int64_t count) const {
    std::copy_n(block.label, count, label + first);
    for (int k = 0; k < kNumDense; ++k) std::copy_n(block.dense[k], count, dense + k * num_rows + first);
    for (int k = 0; k < kNumSparse; ++k) {
      std::copy_n(block.lengths[k], count, offsets + k * (num_rows + 1) + first + 1);
      std::copy_n(block.starts[k], count, starts + k * num_rows + first);
    }
  }
};

// Read a line into one row of a block. Returns null if the line does not have the usual form.
const uint8_t* read_line(const uint8_t* p, const uint8_t* text, const uint8_t* end, int64_t row, Block& block) {
  p = read_label(p, end, block.label[row]);
  for (int k = 0; p != nullptr && k < kNumDense; ++k) p = read_number(p, block.dense[k][row]);
  if (p == nullptr) return nullptr;
  for (int k = 0; k < kNumSparse; ++k) {
    const uint8_t* const stop = field_end(p, end);
    block.starts[k][row] = uint32_t(p - text);
    block.lengths[k][row] = int32_t(stop - p);
    const bool is_last = k + 1 == kNumSparse;
    if (is_last && *stop == '\r' && stop + 1 < end && stop[1] == '\n') return stop + 2;
    if (*stop != (is_last ? '\n' : '\t')) return nullptr;
    p = stop + 1;
  }
  return p;
}

// Concatenate the strings of one feature, from `at` on. Returns their end.
int64_t gather(const uint8_t* text, const Columns& c, int feature, uint8_t* data, int64_t at) {
  int32_t* const offsets = c.offsets + feature * (c.num_rows + 1);
  const uint32_t* const starts = c.starts + feature * c.num_rows;
  const int64_t first = at;
  offsets[0] = 0;
  for (int64_t row = 0; row < c.num_rows; ++row) {
    const int32_t length = offsets[row + 1];
    if (length == 8) {
      std::memcpy(data + at, text + starts[row], 8);
    } else {
      std::memcpy(data + at, text + starts[row], size_t(length));
    }
    at += length;
    offsets[row + 1] = int32_t(at - first);
  }
  return at;
}

// Parse lines. Returns whether all had the usual form. `data` [size of the text] receives the strings, feature by feature.
// Those of feature k start at firsts[k], to which offsets[k] are relative.
bool parse_tsv(Array<const uint8_t, 1> raw, Array<float, 1> label, Array<double, 2> dense, Array<int32_t, 2> offsets,
               Array<uint8_t, 1> data, Array<int64_t, 1> firsts) {
  const auto num_rows = static_cast<int64_t>(label.shape(0));
  const auto size = static_cast<int64_t>(raw.shape(0));
  if (dense.shape(0) != kNumDense || dense.shape(1) != label.shape(0) || offsets.shape(0) != kNumSparse ||
      offsets.shape(1) != label.shape(0) + 1 || data.shape(0) < raw.shape(0) || firsts.shape(0) != kNumSparse)
    throw std::invalid_argument("parse_tsv: the outputs do not have the shapes of 1 + 13 + 26 columns");
  if (size >= INT32_MAX) throw std::invalid_argument("parse_tsv: a block must be smaller than 2 GiB");
  const uint8_t *const text = raw.data(), *const end = text + size;
  if (size == 0 || end[-1] != '\n') return false;
  nb::gil_scoped_release release;
  std::vector<uint32_t> starts(size_t(kNumSparse) * size_t(num_rows));
  const Columns columns{label.data(), dense.data(), offsets.data(), starts.data(), num_rows};
  const uint8_t* p = text;
  Block block{};
  for (int64_t first = 0; first < num_rows; first += kBlock) {
    const int64_t count = std::min(kBlock, num_rows - first);
    for (int64_t row = 0; row < count; ++row) {
      if (p == end || (p = read_line(p, text, end, row, block)) == nullptr) return false;
    }
    columns.take(block, first, count);
  }
  if (p != end) return false;
  int64_t at = 0;
  for (int k = 0; k < kNumSparse; ++k) {
    firsts.data()[k] = at;
    at = gather(text, columns, k, data.data(), at);
  }
  return true;
}

}  // namespace

void bind_parse_tsv(nb::module_& m) {
  m.def("parse_tsv", &parse_tsv, nb::arg("raw"), nb::arg("label"), nb::arg("dense"), nb::arg("offsets"),
        nb::arg("data"), nb::arg("firsts"));
}
