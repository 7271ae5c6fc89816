// Encoding and decoding of columns, in tiles of a few rows that fit into the caches.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ops/codec/numbers.h"
#include "ops/columns/moves.h"
#include "ops/parallel.h"
#include "ops/philox.h"
#include "ops/scratch.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

constexpr int64_t kTileNumbers = 8192;
constexpr int64_t kMaxTileRows = 256;
constexpr int64_t kMinTilesPerThread = 4;   // With fewer tiles, another thread does not pay off.

int64_t count_blocks(int64_t width) { return (width + kLanes - 1) / kLanes; }

// Columns of a row that are divided into blocks together.
struct Piece {
  int64_t first, width, first_block;
};

// Positions of the parts of an encoded row.
struct RowLayout {
  int codec = kFp32;
  std::vector<Piece> pieces;
  int64_t num_columns = 0, num_blocks = 0;

  int64_t number_bytes() const { return codec == kFp16 || codec == kBf16 ? 2 : 1; }
  int64_t scales_offset() const { return num_columns + num_columns % 2; }
  int64_t bytes() const { return number_bytes() == 2 ? 2 * num_columns : scales_offset() + 2 * num_blocks; }
};

struct CodecLayouts {
  int exponent;
  std::vector<RowLayout> rows;
};

// Parse the codec, the exponent, and for each matrix the number of its pieces and their widths.
CodecLayouts read_layouts(const std::vector<int64_t>& numbers) {
  if (numbers.size() < 2 || numbers[0] <= kFp32 || numbers[0] > kInt8) throw_invalid_argument("the layout has no valid codec");
  if (numbers[1] < -126 || numbers[1] > 126) throw_invalid_argument("exponent ", numbers[1], " is outside -126..126");
  CodecLayouts layouts{int(numbers[1]), {}};
  for (size_t at = 2; at < numbers.size();) {
    RowLayout row{int(numbers[0]), {}, 0, 0};
    const int64_t count = numbers[at++];
    if (count < 0 || count > int64_t(numbers.size() - at)) throw_invalid_argument(count, " pieces have incomplete widths in the layout");
    for (int64_t p = 0; p < count; ++p) {
      const int64_t width = numbers[at++];
      if (width < 0 || width > (int64_t{1} << 40)) throw_invalid_argument("a piece has ", width, " columns; pass 0 to 2**40");
      row.pieces.push_back({row.num_columns, width, row.num_blocks});
      row.num_columns += width;
      row.num_blocks += count_blocks(width);
    }
    layouts.rows.push_back(row);
  }
  return layouts;
}

int threads_for(int64_t num_tiles, int num_threads) {
  return int(std::clamp<int64_t>(num_tiles / kMinTilesPerThread, 1, std::max(num_threads, 1)));
}

// ---- Encoding

// Source of the random words of a tile: [rows, groups, 4] for each piece.
struct RandomWords {
  const std::vector<int64_t>& described;  // Key and first column of each piece, and the number of the first row.
  const int64_t* rows;                    // Number of each row, or null.

  bool are_drawn() const { return !described.empty(); }
  static int64_t groups(const Piece& piece) { return (piece.width + 3) / 4; }

  // Draw the words of all pieces into `words`.
  void draw(const RowLayout& layout, int64_t first, int64_t last, uint32_t* words) const {
    const size_t count = layout.pieces.size();
    int64_t counted[kMaxTileRows];
    std::iota(counted, counted + (last - first), 0);
    const uint64_t first_row = uint64_t(rows ? 0 : described[2 * count] + first);
    for (size_t p = 0; p < count; ++p) {
      const int64_t width = groups(layout.pieces[p]);
      if (width == 0) continue;
      const CounterRange range{uint64_t(described[p]), first_row, uint32_t(described[count + p] / 4), 0};
      philox_words(range, rows ? rows + first : counted, last - first, width, words);
      words += (last - first) * width * 4;
    }
  }
};

struct Encoder {
  RowLayout layout;
  Factors factors;

  // `words` are those of the tile, in which this is row `row` of `num_rows`.
  template <int kCodec, bool kDrawn>
  void encode_blocks(const float* values, float scale, const uint32_t* words, int64_t row, int64_t num_rows,
                     uint8_t* out) const {
    uint16_t* scales = reinterpret_cast<uint16_t*>(out + layout.scales_offset());
    if (layout.num_columns % 2) out[layout.num_columns] = 0;
    const auto encode = [scale](const float* from, const uint32_t* bits, uint8_t* codes) {
      if constexpr (kDrawn) return encode_block<kCodec>(from, scale, Stochastic{bits}, codes);
      return encode_block<kCodec>(from, scale, Nearest{}, codes);
    };
    for (const Piece& piece : layout.pieces) {
      const int64_t groups = RandomWords::groups(piece);
      const uint32_t* bits = kDrawn ? words + row * groups * 4 : nullptr;
      const float* from = values + piece.first;
      uint8_t* codes = out + piece.first;
      int64_t c = 0;
      for (; c + kLanes <= piece.width; c += kLanes) *scales++ = encode(from + c, kDrawn ? bits + c : nullptr, codes + c);
      if (c < piece.width) {
        const size_t left = size_t(piece.width - c);
        float part[kLanes] = {};
        uint32_t part_bits[kLanes] = {};
        uint8_t part_codes[kLanes];
        std::copy_n(from + c, left, part);
        if (kDrawn) std::copy_n(bits + c, left, part_bits);
        *scales++ = encode(part, part_bits, part_codes);
        std::copy_n(part_codes, left, codes + c);
      }
      if (kDrawn) words += num_rows * groups * 4;
    }
  }

  template <int kCodec>
  int64_t encode_numbers(const float* values, float scale, uint8_t* bytes) const {
    uint16_t* const out = reinterpret_cast<uint16_t*>(bytes);
    const Factors both{scale, factors.power};
    int64_t beyond = 0, c = 0;
    for (; c + kLanes <= layout.num_columns; c += kLanes) beyond += encode_16<kCodec>(values + c, both, out + c);
    if (c < layout.num_columns) {
      float part[kLanes] = {};
      uint16_t codes[kLanes];
      std::copy_n(values + c, layout.num_columns - c, part);
      beyond += encode_16<kCodec>(part, both, codes);
      std::copy_n(codes, layout.num_columns - c, out + c);
    }
    return beyond;
  }

  // Encode the rows of a tile. Returns how many numbers were too large.
  int64_t encode(const float* values, int64_t stride, float scale, const uint32_t* words, int64_t num_rows,
                 uint8_t* out) const {
    int64_t beyond = 0;
    for (int64_t r = 0; r < num_rows; ++r, values += stride, out += layout.bytes()) {
      if (layout.codec == kFp16) beyond += encode_numbers<kFp16>(values, scale, out);
      if (layout.codec == kBf16) encode_numbers<kBf16>(values, scale, out);
      if (layout.codec == kFp8 && words) encode_blocks<kFp8, true>(values, scale, words, r, num_rows, out);
      if (layout.codec == kFp8 && !words) encode_blocks<kFp8, false>(values, scale, words, r, num_rows, out);
      if (layout.codec == kInt8 && words) encode_blocks<kInt8, true>(values, scale, words, r, num_rows, out);
      if (layout.codec == kInt8 && !words) encode_blocks<kInt8, false>(values, scale, words, r, num_rows, out);
    }
    return beyond;
  }
};

// Whether a column has no move, or its first move adds, so that it must be cleared first.
bool leaves_gaps(const std::vector<Strip<float>>& strips, int64_t num_columns) {
  std::vector<char> is_written(size_t(num_columns), 0);
  for (const Strip<float>& strip : strips) {
    const auto first = is_written.begin() + strip.to;
    if (!strip.add) std::fill_n(first, strip.width, 1);
  }
  const bool any_add = std::any_of(strips.begin(), strips.end(), [](const auto& strip) { return strip.add; });
  return any_add || std::find(is_written.begin(), is_written.end(), 0) != is_written.end();
}

// Encode columns. `out` is (address, rows, bytes per row). `sources` and `moves` are those of place_columns. `layout` is
// described at unpack_layouts, `random` at RandomWords (empty for rounding to nearest). `counted` has the addresses of
// the row numbers and of the count of clamped numbers, or 0.
void encode_columns(std::array<int64_t, 3> out, const std::vector<int64_t>& sources, const std::vector<int64_t>& moves,
                    const std::vector<int64_t>& layout, double scale, const std::vector<int64_t>& random,
                    std::array<uintptr_t, 2> counted, int num_threads) {
  nb::gil_scoped_release unlocked;
  const CodecLayouts layouts = read_layouts(layout);
  if (layouts.rows.size() != 1) throw_invalid_argument(layouts.rows.size(), " layouts for one encoded matrix; pass one");
  const Encoder encoder{layouts.rows[0], {float(scale), power_of_two(layouts.exponent)}};
  const RowLayout& row = encoder.layout;
  const auto [address, num_rows, bytes] = out;
  if (bytes != row.bytes()) throw_invalid_argument("rows have ", bytes, " bytes, but the layout has ", row.bytes());
  const RandomWords words{random, reinterpret_cast<const int64_t*>(counted[0])};
  if (words.are_drawn() && random.size() != 2 * row.pieces.size() + 1) throw_invalid_argument(random.size(), " numbers for rounding; pass a key and a column per piece, and the first row");
  const std::vector<Strip<float>> strips = checked_strips<float>(sources, moves, row.num_columns);
  const bool is_whole = strips.size() == 1 && strips[0].width == row.num_columns && !strips[0].add;
  const bool has_gaps = !is_whole && leaves_gaps(strips, row.num_columns);
  const int64_t padded = row.num_columns + 4 * int64_t(row.pieces.size());
  const int64_t tile = std::clamp<int64_t>(kTileNumbers / std::max<int64_t>(row.num_columns, 1), 1, kMaxTileRows);
  const int64_t num_tiles = row.num_columns ? (num_rows + tile - 1) / tile : 0;
  std::atomic<int64_t> beyond{0};
  parallel_tasks(threads_for(num_tiles, num_threads), num_tiles, [&, address = address, num_rows = num_rows](int64_t t) {
    const int64_t first = t * tile, last = std::min(first + tile, num_rows);
    uint32_t* const bits = words.are_drawn() ? scratch<uint32_t>(size_t(tile * padded)) : nullptr;
    if (bits) words.draw(row, first, last, bits);
    uint8_t* const to = reinterpret_cast<uint8_t*>(address) + first * row.bytes();
    if (is_whole) {
      const float* from = strips[0].from + first * strips[0].stride;
      beyond += encoder.encode(from, strips[0].stride, encoder.factors.scale, bits, last - first, to);
      return;
    }
    float* const values = scratch<float>(size_t(tile * row.num_columns));
    if (has_gaps) std::fill_n(values, (last - first) * row.num_columns, 0.0f);
    place_strips<false>(strips, first, last, values, row.num_columns, encoder.factors.scale);
    beyond += encoder.encode(values, row.num_columns, 1.0f, bits, last - first, to);
  });
  if (counted[1]) *reinterpret_cast<int64_t*>(counted[1]) += beyond;
}

// ---- Decoding

// Columns of one matrix that share a scale. For 16-bit codecs, any columns.
struct Run {
  const uint8_t* codes;   // Codes of the first row.
  const uint8_t* scales;  // Scale in the first row, or null for 16-bit codecs.
  int64_t row_bytes, to, width;
  bool add;
};

std::vector<Run> make_runs(const ColumnMove& move, const uint8_t* matrix, const RowLayout& layout) {
  if (layout.number_bytes() == 2)
    return {{matrix + 2 * move.from, nullptr, layout.bytes(), move.to, move.width, move.add}};
  std::vector<Run> runs;
  for (const Piece& piece : layout.pieces) {
    const int64_t last = std::min(move.from + move.width, piece.first + piece.width);
    for (int64_t c = std::max(move.from, piece.first); c < last;) {
      const int64_t block = (c - piece.first) / kLanes, end = std::min(piece.first + (block + 1) * kLanes, last);
      const uint8_t* const scale = matrix + layout.scales_offset() + 2 * (piece.first_block + block);
      runs.push_back({matrix + c, scale, layout.bytes(), move.to + c - move.from, end - c, move.add});
      c = end;
    }
  }
  return runs;
}

template <int kCodec, bool kAdd>
inline void decode_lanes(const uint8_t* __restrict codes, int64_t count, float unit, float scale, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = decode_number<kCodec>(codes[i]) * unit * scale;
    out[i] = kAdd ? out[i] + value : value;
  }
}

template <int kCodec>
void decode_block(const Run& run, int64_t row, const Factors& factors, float* out) {
  const uint8_t* const codes = run.codes + row * run.row_bytes;
  Bfloat unit;
  std::memcpy(&unit, run.scales + row * run.row_bytes, 2);
  const float u = to_float(unit), scale = factors.scale;
  if (run.add) {
    decode_lanes<kCodec, true>(codes, run.width, u, scale, out);
  } else if (run.width == kLanes) {
    decode_lanes<kCodec, false>(codes, kLanes, u, scale, out);
  } else {
    decode_lanes<kCodec, false>(codes, run.width, u, scale, out);
  }
}

template <typename T>
void decode_16(const Run& run, int64_t row, const Factors& factors, float* out) {
  const T* const from = reinterpret_cast<const T*>(run.codes + row * run.row_bytes);
  const Vec power = broadcast(factors.power), scale = broadcast(factors.scale);
  int64_t c = 0;
  for (; c + kLanes <= run.width; c += kLanes) {
    const Vec value = load(from + c) * power * scale;
    store(out + c, run.add ? load(out + c) + value : value);
  }
  if (c < run.width) {
    const int left = int(run.width - c);
    const Vec value = load(from + c, left) * power * scale;
    store(out + c, run.add ? load(out + c, left) + value : value, left);
  }
}

// Decode columns. `out` is (address, rows, columns, row stride). `sources` has the address of each encoded matrix, whose
// rows are contiguous. `moves` are those of place_columns, and `layout` is described at unpack_layouts.
void decode_columns(std::array<int64_t, 4> out, const std::vector<uintptr_t>& sources,
                    const std::vector<int64_t>& moves, const std::vector<int64_t>& layout, double scale,
                    int num_threads) {
  nb::gil_scoped_release unlocked;
  const CodecLayouts layouts = read_layouts(layout);
  if (layouts.rows.size() != sources.size()) throw_invalid_argument(layouts.rows.size(), " layouts for ", sources.size(), " matrices; pass one per matrix");
  const auto [address, num_rows, num_columns, stride] = out;
  std::vector<int64_t> widths;
  for (const RowLayout& row : layouts.rows) widths.push_back(row.num_columns);
  std::vector<Run> runs;
  int64_t numbers = 1;
  for (const ColumnMove& move : checked_moves(moves, widths, num_columns)) {
    const auto* matrix = reinterpret_cast<const uint8_t*>(sources[size_t(move.source)]);
    const std::vector<Run> some = make_runs(move, matrix, layouts.rows[size_t(move.source)]);
    runs.insert(runs.end(), some.begin(), some.end());
    numbers += move.width;
  }
  const bool is_half = layout[0] == kFp16;
  const Factors factors{float(scale), is_half ? power_of_two(-layouts.exponent) : 1.0f};
  const int64_t tile = std::clamp<int64_t>(kTileNumbers / numbers, 1, kMaxTileRows);
  const int64_t num_tiles = runs.empty() ? 0 : (num_rows + tile - 1) / tile;
  const auto decode = layout[0] == kFp8    ? decode_block<kFp8>
                      : layout[0] == kInt8 ? decode_block<kInt8>
                      : is_half            ? decode_16<Half>
                                           : decode_16<Bfloat>;
  float* const to = reinterpret_cast<float*>(address);
  parallel_tasks(threads_for(num_tiles, num_threads), num_tiles, [&, num_rows = num_rows, stride = stride](int64_t t) {
    for (int64_t row = t * tile; row < std::min((t + 1) * tile, num_rows); ++row)
      for (const Run& run : runs) decode(run, row, factors, to + row * stride + run.to);
  });
}

}  // namespace

void bind_codec(nb::module_& m) {
  m.def("encode_columns", &encode_columns, nb::arg("out"), nb::arg("sources"), nb::arg("moves"), nb::arg("layout"),
        nb::arg("scale"), nb::arg("random"), nb::arg("counted"), nb::arg("num_threads"));
  m.def("decode_columns", &decode_columns, nb::arg("out"), nb::arg("sources"), nb::arg("moves"), nb::arg("layout"),
        nb::arg("scale"), nb::arg("num_threads"));
}
