// Distinct ids of several groups by radix sort. See reference.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/checks.h"
#include "ops/packing.h"
#include "ops/parallel.h"
#include "ops/scratch.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

using Words = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Exists for the tests of radix.h only.
void sort_bits(Words entries, int first_bit, int last_bit) {
  if (first_bit < 0 || first_bit > 63 || last_bit > 64)
    throw_invalid_argument("radix_sort: bits ", first_bit, "..", last_bit, " are not within 0..64");
  const size_t n = entries.shape(0);
  const uint64_t* sorted = radix_sort(entries.data(), scratch<uint64_t>(n), n, first_bit, last_bit);
  if (sorted != entries.data()) std::copy_n(sorted, n, entries.data());
}

struct Outputs {
  int64_t* rows;     // [nnz], of which the first ones are written.
  int64_t* inverse;  // [nnz].
  int64_t* counts;   // As rows.
  int64_t* bounds;   // [groups + 1], positions in rows.
};

template <typename Id, typename Entry>
const Entry* sort_group(const Id* ids, int64_t start, int64_t count, const Packing& p, Entry* entries, Entry* other) {
  for (int64_t i = 0; i < count; ++i) entries[i] = Packed<Entry>::make(p, ids[start + i], i);
  const auto [first_bit, last_bit] = Packed<Entry>::bits(p);
  return radix_sort(entries, other, size_t(count), first_bit, last_bit);
}

template <typename Entry>
int64_t count_rows(const Entry* sorted, int64_t count, const Packing& p) {
  int64_t rows = count > 0;
  for (int64_t i = 1; i < count; ++i) rows += Packed<Entry>::row(p, sorted[i]) != Packed<Entry>::row(p, sorted[i - 1]);
  return rows;
}

template <typename Entry>
void write_group(const Entry* sorted, int64_t start, int64_t count, const Packing& p, int64_t at, const Outputs& out) {
  for (int64_t i = 0; i < count; ++at) {
    const uint64_t row = Packed<Entry>::row(p, sorted[i]);
    const int64_t begin = i;
    for (; i < count && Packed<Entry>::row(p, sorted[i]) == row; ++i)
      out.inverse[start + Packed<Entry>::position(p, sorted[i])] = at;
    out.rows[at] = p.id(row);
    out.counts[at] = i - begin;
  }
}

template <typename Id>
Packing find_packing(const Id* ids, int64_t count) {
  int64_t low = count > 0 ? ids[0] : 0, high = low;
  for (int64_t i = 0; i < count; ++i) {
    low = std::min<int64_t>(low, ids[i]);
    high = std::max<int64_t>(high, ids[i]);
  }
  return {low, high, count};
}

template <typename Id, typename Entry>
int64_t run(const Id* ids, const std::vector<int64_t>& bounds, const std::vector<Packing>& packings, const Outputs& out,
            int num_threads) {
  const int64_t num_groups = int64_t(packings.size()), total = bounds.back() - bounds.front();
  Entry* const entries = scratch<Entry, 0>(size_t(total));
  Entry* const other = scratch<Entry, 1>(size_t(total));
  std::vector<const Entry*> sorted(packings.size());
  const auto start_of = [&](int64_t g) { return bounds[size_t(g)]; };
  const auto size_of = [&](int64_t g) { return bounds[size_t(g) + 1] - bounds[size_t(g)]; };
  const int threads = total < 4096 ? 1 : num_threads;
  parallel_tasks(threads, num_groups, [&](int64_t g) {
    const int64_t offset = start_of(g) - bounds.front();
    const Packing& p = packings[size_t(g)];
    sorted[size_t(g)] = sort_group(ids, start_of(g), size_of(g), p, entries + offset, other + offset);
    out.bounds[g + 1] = count_rows(sorted[size_t(g)], size_of(g), p);
  });
  out.bounds[0] = 0;
  for (int64_t g = 0; g < num_groups; ++g) out.bounds[g + 1] += out.bounds[g];
  parallel_tasks(threads, num_groups, [&](int64_t g) {
    write_group(sorted[size_t(g)], start_of(g) - bounds.front(), size_of(g), packings[size_t(g)], out.bounds[g], out);
  });
  return out.bounds[num_groups];
}

template <typename Id>
int64_t unique_ids(const Id* ids, const std::vector<int64_t>& bounds, const Outputs& out, int num_threads) {
  std::vector<Packing> packings;
  bool fit = true;
  for (size_t g = 0; g + 1 < bounds.size(); ++g) {
    packings.push_back(find_packing(ids + bounds[g], bounds[g + 1] - bounds[g]));
    fit &= packings.back().fits();
  }
  return fit ? run<Id, uint64_t>(ids, bounds, packings, out, num_threads)
             : run<Id, KeyedEntry>(ids, bounds, packings, out, num_threads);
}

// Find distinct ids. Group g has ids[bounds[g]] .. ids[bounds[g + 1] - 1]. `outputs` has the addresses of rows, inverse,
// counts and bounds. Returns the number of distinct ids.
int64_t unique(uintptr_t ids, int64_t num_ids, bool wide, const std::vector<int64_t>& bounds,
               std::array<uintptr_t, 4> outputs, int num_threads) {
  nb::gil_scoped_release unlocked;
  check_bounds("bounds", bounds.data(), int64_t(bounds.size()), num_ids);
  const auto address = [&](size_t i) { return reinterpret_cast<int64_t*>(outputs[i]); };
  const Outputs out{address(0), address(1), address(2), address(3)};
  return wide ? unique_ids(reinterpret_cast<const int64_t*>(ids), bounds, out, num_threads)
              : unique_ids(reinterpret_cast<const int32_t*>(ids), bounds, out, num_threads);
}

}  // namespace

void bind_unique(nb::module_& m) {
  m.def("radix_sort", &sort_bits, nb::arg("entries"), nb::arg("first_bit"), nb::arg("last_bit"));
  m.def("unique", &unique, nb::arg("ids"), nb::arg("num_ids"), nb::arg("wide"), nb::arg("bounds"), nb::arg("outputs"),
        nb::arg("num_threads"));
}
