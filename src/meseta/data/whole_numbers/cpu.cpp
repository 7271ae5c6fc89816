// Canonical spelling of whole numbers in the strings of an Arrow array: 12 for 12.0, +12, 1.2e1 and " 12 ".
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace nb = nanobind;

namespace {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int kMaxDigits = 20;  // Digits of 2^64 - 1.
constexpr int64_t kExponentLimit = int64_t{1} << 40;

enum class Kind {
  kOther,      // Not a whole number.
  kUnchanged,  // Canonical, or kept: leading zeros, more than 64 bits.
  kRespelled,
};

struct Text {
  Kind kind;
  bool is_negative = false;
  uint64_t magnitude = 0;
};

inline bool is_digit(uint8_t byte) { return uint8_t(byte - '0') < 10; }

inline bool is_space(uint8_t byte) { return byte == ' ' || uint8_t(byte - '\t') < 5; }

// Whether the first 1 to 8 bytes are digits. 8 bytes must be readable.
inline bool are_digits(const uint8_t* p, int64_t num_bytes) {
  static_assert(std::endian::native == std::endian::little);
  constexpr uint64_t kHigh = 0xF0F0F0F0F0F0F0F0, kSixes = 0x0606060606060606, kThrees = 0x3333333333333333;
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  // A digit has 3 in its upper half, also after 6 was added. A carry affects only bytes after one that is not a digit.
  const uint64_t halves = (word & kHigh) | ((word + kSixes) & kHigh) >> 4;
  return ((halves ^ kThrees) << (64 - 8 * num_bytes)) == 0;
}

// Whether the text is the canonical spelling of a number of up to 18 digits, as most values are. Returns false for some
// canonical texts, such as negative numbers and the last bytes before `limit`, which is the end of readable memory.
inline bool is_canonical(const uint8_t* p, const uint8_t* end, const uint8_t* limit) {
  const int64_t num_bytes = end - p;
  if (uint64_t(num_bytes - 1) >= 18 || (*p == '0' && num_bytes > 1)) return false;
  if (num_bytes <= 8) return limit - p >= 8 && are_digits(p, num_bytes);
  for (; end - p > 8; p += 8) {
    if (!are_digits(p, 8)) return false;
  }
  return are_digits(end - 8, 8);
}

// Digits of a number without decimal point, leading and trailing zeros. Its value is digits * 10^exponent.
struct Digits {
  const uint8_t *first, *point, *last;  // `point` is the position of the decimal point, or `last`.
  int64_t exponent;

  int64_t size() const { return last - first - (point > first && point < last ? 1 : 0); }

  // Compute the value without its sign. Returns false if it needs more than 64 bits.
  bool magnitude(uint64_t& value) const {
    if (size() + exponent > kMaxDigits) return false;
    value = 0;
    const auto append = [&value](uint64_t digit) {
      return !__builtin_mul_overflow(value, uint64_t{10}, &value) && !__builtin_add_overflow(value, digit, &value);
    };
    for (const uint8_t* p = first; p != last; ++p) {
      if (p != point && !append(*p - '0')) return false;
    }
    for (int64_t zero = 0; zero < exponent; ++zero) {
      if (!append(0)) return false;
    }
    return true;
  }
};

// Read [eE][+-]digits up to `end`. Returns false for anything else. Large exponents are limited: no text has as many digits.
inline bool read_exponent(const uint8_t* p, const uint8_t* end, int64_t& exponent) {
  if (p == end) return true;
  if ((*p | 0x20) != 'e' || ++p == end) return false;
  const bool is_negative = *p == '-';
  if (*p == '-' || *p == '+') ++p;
  if (p == end) return false;
  int64_t value = 0;
  for (; p != end; ++p) {
    if (!is_digit(*p)) return false;
    value = std::min(value * 10 + (*p - '0'), kExponentLimit);
  }
  exponent = is_negative ? -value : value;
  return true;
}

Text read_text(const uint8_t* p, const uint8_t* end, const uint8_t* limit) {
  if (is_canonical(p, end, limit)) return {Kind::kUnchanged};
  const uint8_t* const begin = p;
  const int64_t num_bytes = end - p;
  while (p != end && is_space(*p)) ++p;
  while (p != end && is_space(end[-1])) --end;
  const bool has_minus = p != end && *p == '-';
  if (p != end && (*p == '-' || *p == '+')) ++p;
  const uint8_t* const whole = p;
  while (p != end && is_digit(*p)) ++p;
  const uint8_t* const point = p;
  if (p != end && *p == '.') {
    ++p;
    while (p != end && is_digit(*p)) ++p;
  }
  const uint8_t* const last = p;
  const int64_t num_fraction = last > point ? last - point - 1 : 0;
  if (point - whole + num_fraction == 0) return {Kind::kOther};
  int64_t exponent = 0;
  if (!read_exponent(p, end, exponent)) return {Kind::kOther};
  Digits digits{whole, point, last, exponent - num_fraction};
  while (digits.first != last && (*digits.first == '0' || digits.first == point)) ++digits.first;
  const bool is_zero = digits.first == last;
  if (!is_zero) {
    for (; digits.last[-1] == '0' || digits.last - 1 == point; --digits.last) digits.exponent += digits.last - 1 != point;
    digits.point = std::min(point, digits.last);
    if (digits.exponent < 0) return {Kind::kOther};
  }
  if (point - whole > 1 && *whole == '0') return {Kind::kUnchanged};
  uint64_t magnitude = 0;
  if (!is_zero && !digits.magnitude(magnitude)) return {Kind::kUnchanged};
  if (has_minus && magnitude > uint64_t{1} << 63) return {Kind::kUnchanged};
  const bool is_negative = has_minus && !is_zero;
  // Text that consists of digits only is canonical.
  const bool has_usual_sign = has_minus ? is_negative && whole == begin + 1 : whole == begin;
  if (has_usual_sign && point == begin + num_bytes) return {Kind::kUnchanged};
  return {Kind::kRespelled, is_negative, magnitude};
}

template <typename Offset>
std::pair<const uint8_t*, const uint8_t*> checked_bounds(Array<const uint8_t>& data, Array<const Offset>& offsets, size_t i) {
  const int64_t start = offsets.data()[i], stop = offsets.data()[i + 1], size = data.shape(0);
  if (start < 0 || stop < start || stop > size) {
    throw std::invalid_argument("whole_numbers: string " + std::to_string(i) + " spans bytes " + std::to_string(start) +
                                ".." + std::to_string(stop) + " of a buffer of " + std::to_string(size));
  }
  return {data.data() + start, data.data() + stop};
}

template <typename Offset>
std::pair<int64_t, int64_t> scan(Array<const uint8_t> data, Array<const Offset> offsets) {
  int64_t num_respelled = 0, num_others = 0;
  nb::gil_scoped_release release;
  for (size_t i = 0; i + 1 < offsets.shape(0); ++i) {
    const auto [start, stop] = checked_bounds(data, offsets, i);
    const Kind kind = read_text(start, stop, data.data() + data.shape(0)).kind;
    num_respelled += kind == Kind::kRespelled;
    num_others += kind == Kind::kOther;
  }
  return {num_respelled, num_others};
}

template <typename Offset>
int64_t respell(Array<const uint8_t> data, Array<const Offset> offsets, Array<uint8_t> out, Array<int64_t> out_offsets) {
  if (out_offsets.shape(0) != offsets.shape(0)) {
    throw std::invalid_argument("whole_numbers: n strings need n + 1 offsets, before and after");
  }
  char* const begin = reinterpret_cast<char*>(out.data());
  char* const end = begin + out.shape(0);
  char* p = begin;
  nb::gil_scoped_release release;
  out_offsets.data()[0] = 0;
  for (size_t i = 0; i + 1 < offsets.shape(0); ++i) {
    const auto [start, stop] = checked_bounds(data, offsets, i);
    const Text text = read_text(start, stop, data.data() + data.shape(0));
    const int64_t num_bytes = text.kind == Kind::kRespelled ? kMaxDigits + 1 : stop - start;
    if (end - p < num_bytes) throw std::invalid_argument("whole_numbers: the output has too few bytes");
    if (text.kind == Kind::kRespelled) {
      if (text.is_negative) *p++ = '-';
      p = std::to_chars(p, end, text.magnitude).ptr;
    } else if (num_bytes) {
      std::memcpy(p, start, num_bytes);
      p += num_bytes;
    }
    out_offsets.data()[i + 1] = p - begin;
  }
  return p - begin;
}

template <typename Offset>
void bind(nb::module_& m) {
  m.def("scan_whole_numbers", &scan<Offset>, nb::arg("data"), nb::arg("offsets"));
  m.def("respell_whole_numbers", &respell<Offset>, nb::arg("data"), nb::arg("offsets"), nb::arg("out"),
        nb::arg("out_offsets"));
}

}  // namespace

void bind_whole_numbers(nb::module_& m) {
  bind<int32_t>(m);
  bind<int64_t>(m);
}
