// Measurement of the rows per second that memory delivers: reads whole rows at given ids with prefetching, nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/parallel.h"

namespace nb = nanobind;

namespace {

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Integers, because any bits can be added at full speed. Halves read as floats would include subnormals.
using Line = uint32_t __attribute__((vector_size(64), aligned(4), may_alias));
using HalfLine = uint32_t __attribute__((vector_size(32), aligned(4), may_alias));

struct UpdateTable {
  const char* rows;
  int64_t row_bytes, num_rows;
};

// Consecutive ids of one feature.
struct Piece {
  UpdateTable table;
  const int64_t* ids;
  int64_t count;
};

template <int kHint, int kBytes>
inline void fetch(const char* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, kHint);
  if (kBytes == 0) __builtin_prefetch(row + bytes - 1, 0, kHint);  // A row may end in one more line.
}

// Sum the 32-bit words of the rows, modulo 2^32. An odd half word at the end counts as 16 bits. kBytes 0 means row_bytes.
template <int kHint, int kBytes>
uint32_t gather(const Piece& piece, int64_t distance, int64_t burst) {
  const int64_t bytes = kBytes > 0 ? kBytes : piece.table.row_bytes;
  const auto row_of = [&](int64_t i) { return piece.table.rows + piece.ids[i] * bytes; };
  // Four sums, so that additions do not depend on the previous one.
  Line sum[4] = {};
  HalfLine half_sum = {};
  uint32_t rest = 0;
  for (int64_t i = 0, next = 0; i < piece.count; ++i) {
    if (i + distance >= next)
      for (const int64_t stop = std::min(i + distance + burst, piece.count); next < stop; ++next)
        fetch<kHint, kBytes>(row_of(next), bytes);
    const char* row = row_of(i);
    int64_t at = 0;
    if constexpr (kBytes >= 64) {
#pragma GCC unroll 8
      for (int line = 0; line < kBytes / 64; ++line) sum[line % 4] += *reinterpret_cast<const Line*>(row + 64 * line);
      at = kBytes / 64 * 64;
    } else if constexpr (kBytes == 0) {
      for (; at + 256 <= bytes; at += 256)
        for (int line = 0; line < 4; ++line) sum[line] += *reinterpret_cast<const Line*>(row + at + 64 * line);
      for (; at + 64 <= bytes; at += 64) sum[0] += *reinterpret_cast<const Line*>(row + at);
    }
    if (at + 32 <= bytes) {
      half_sum += *reinterpret_cast<const HalfLine*>(row + at);
      at += 32;
    }
    if constexpr (kBytes == 0) {
      for (; at < bytes; at += 4) {
        uint32_t word = 0;
        std::memcpy(&word, row + at, size_t(std::min<int64_t>(4, bytes - at)));
        rest += word;
      }
    }
  }
  for (int lane = 0; lane < 16; ++lane) rest += sum[0][lane] + sum[1][lane] + sum[2][lane] + sum[3][lane];
  for (int lane = 0; lane < 8; ++lane) rest += half_sum[lane];
  return rest;
}

template <int kHint>
uint32_t gather_rows(const Piece& piece, int64_t distance, int64_t burst) {
  switch (piece.table.row_bytes) {
    case 32:
      return gather<kHint, 32>(piece, distance, burst);
    case 64:
      return gather<kHint, 64>(piece, distance, burst);
    case 128:
      return gather<kHint, 128>(piece, distance, burst);
    case 256:
      return gather<kHint, 256>(piece, distance, burst);
    case 512:
      return gather<kHint, 512>(piece, distance, burst);
    default:
      return gather<kHint, 0>(piece, distance, burst);
  }
}

uint32_t gather_rows(const Piece& piece, int level, int64_t distance, int64_t burst) {
  if (level == 1) return gather_rows<3>(piece, distance, burst);
  if (level == 2) return gather_rows<2>(piece, distance, burst);
  return gather_rows<1>(piece, distance, burst);
}

// Segment s reads table s % F. It is divided such that each thread has several pieces, as the tasks of the lookup.
std::vector<Piece> cut(const std::vector<UpdateTable>& tables, const int64_t* ids, const std::vector<int64_t>& bounds,
                       int num_threads) {
  const int64_t longest = std::max<int64_t>((bounds.back() - bounds.front()) / (32 * int64_t(num_threads)), 1024);
  std::vector<Piece> pieces;
  for (size_t s = 0; s + 1 < bounds.size(); ++s)
    for (int64_t at = bounds[s]; at < bounds[s + 1]; at += longest)
      pieces.push_back({tables[s % tables.size()], ids + at, std::min(longest, bounds[s + 1] - at)});
  return pieces;
}

void check(const std::vector<UpdateTable>& tables, Ids ids, const std::vector<int64_t>& bounds) {
  if (tables.empty() || bounds.empty() || (bounds.size() - 1) % tables.size() != 0)
    throw std::invalid_argument("bounds must have one entry more than a multiple of the number of tables");
  for (const UpdateTable& table : tables)
    if (table.row_bytes < 1 || table.num_rows < 1) throw std::invalid_argument("a table has no rows or no columns");
  if (bounds.front() != 0 || bounds.back() != int64_t(ids.shape(0)))
    throw std::invalid_argument("bounds must start at 0 and end with the number of ids");
  for (size_t s = 0; s + 1 < bounds.size(); ++s) {
    if (bounds[s] > bounds[s + 1]) throw std::invalid_argument("bounds must not decrease");
    const uint64_t num_rows = uint64_t(tables[s % tables.size()].num_rows);
    for (int64_t i = bounds[s]; i < bounds[s + 1]; ++i)
      if (uint64_t(ids.data()[i]) >= num_rows)
        throw std::invalid_argument("id " + std::to_string(ids.data()[i]) + " at " + std::to_string(i) +
                                    " is outside 0.." + std::to_string(num_rows - 1));
  }
}

// Measure reading. `tables` has (address, bytes per row, rows) of each table, which the caller keeps alive. All checks
// precede the start of the clock.
std::pair<uint32_t, double> gather_limit(const std::vector<int64_t>& tables, Ids ids,
                                         const std::vector<int64_t>& bounds, int level, int64_t distance,
                                         int64_t burst, int num_threads) {
  std::vector<UpdateTable> all;
  for (size_t i = 0; i + 3 <= tables.size(); i += 3)
    all.push_back({reinterpret_cast<const char*>(tables[i]), tables[i + 1], tables[i + 2]});
  nb::gil_scoped_release unlocked;
  check(all, ids, bounds);
  if (distance < 0 || burst < 1 || num_threads < 1 || level < 1 || level > 3)
    throw std::invalid_argument("distance must not be negative, burst and num_threads at least 1, level 1, 2 or 3");
  const std::vector<Piece> pieces = cut(all, ids.data(), bounds, num_threads);
  std::atomic<uint32_t> sum{0};
  const auto start = std::chrono::steady_clock::now();
  meseta::parallel_tasks(num_threads, int64_t(pieces.size()),
                         [&](int64_t index) { sum += gather_rows(pieces[size_t(index)], level, distance, burst); });
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return {sum.load(), elapsed.count()};
}

}  // namespace

void bind_gather_limit(nb::module_& m) {
  m.def("gather_limit", &gather_limit, nb::arg("tables"), nb::arg("ids"), nb::arg("bounds"), nb::arg("level"),
        nb::arg("distance"), nb::arg("burst"), nb::arg("num_threads"));
}
