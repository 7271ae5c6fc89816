// Hashes of ids, reduced to rows. The loops are written such that compilers vectorize them.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>

#include "ops/checks.h"
#include "ops/mix.h"
#include "ops/parallel.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

constexpr int64_t kPiece = 16384;

template <typename Id, bool kXxh, bool kSmall>
void hash_piece(const Id* ids, int64_t count, uint64_t num_rows, uint64_t seed, int64_t* rows) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t id = uint64_t(int64_t(ids[i]));
    const uint64_t hash = kXxh ? xxh64_of_word(id, seed) : splitmix64(id + seed * 0x9E3779B97F4A7C15u);
    rows[i] = int64_t(kSmall ? reduce_small(hash, num_rows) : reduce(hash, num_rows));
  }
}

template <typename Id>
void hash_all(const Id* ids, int64_t count, uint64_t num_rows, uint64_t seed, bool xxh, int64_t* rows,
              int num_threads) {
  const bool small = num_rows < (uint64_t{1} << 32);
  auto* const function = xxh ? (small ? hash_piece<Id, true, true> : hash_piece<Id, true, false>)
                             : (small ? hash_piece<Id, false, true> : hash_piece<Id, false, false>);
  parallel_tasks(count <= kPiece ? 1 : num_threads, (count + kPiece - 1) / kPiece, [&](int64_t piece) {
    const int64_t first = piece * kPiece;
    function(ids + first, std::min(kPiece, count - first), num_rows, seed, rows + first);
  });
}

void hash_ids(uintptr_t ids, int64_t count, bool wide, int64_t num_rows, uint64_t seed, bool xxh, uintptr_t rows,
              int num_threads) {
  if (num_rows < 1) throw_invalid_argument("num_rows must be at least 1, got ", num_rows);
  nb::gil_scoped_release unlocked;
  auto* out = reinterpret_cast<int64_t*>(rows);
  wide ? hash_all(reinterpret_cast<const int64_t*>(ids), count, uint64_t(num_rows), seed, xxh, out, num_threads)
       : hash_all(reinterpret_cast<const int32_t*>(ids), count, uint64_t(num_rows), seed, xxh, out, num_threads);
}

}  // namespace

void bind_hash_ids(nb::module_& m) {
  m.def("hash_ids", &hash_ids, nb::arg("ids"), nb::arg("count"), nb::arg("wide"), nb::arg("num_rows"),
        nb::arg("seed"), nb::arg("xxh"), nb::arg("rows"), nb::arg("num_threads"));
}
