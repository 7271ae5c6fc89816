// Sums of the gradient contributions to each touched row, in the order that reference.py defines.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/checks.h"
#include "ops/packing.h"
#include "ops/parallel.h"
#include "ops/scratch.h"
#include "ops/simd.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutIds = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Rows = nb::ndarray<const T, nb::ndim<2>, nb::device::cpu>;
template <typename T>
using OutRows = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Scale = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kMinParallelContributions = 4096;  // With fewer contributions, threads cost more than they save.
constexpr int64_t kPrefetchDistance = 8;     // Number of contributions whose gradients are being prefetched.

template <typename T>
struct Contributions {
  const int64_t* id;
  const int64_t* source;
  const int64_t* block;
  int64_t count;
  const T* gradient;
  int64_t row_stride;
  const T* scale;  // May be null.
  int64_t dim;

  void fetch(int64_t i) const { prefetch(gradient + source[i] * row_stride); }
  void copy(int64_t i, T* __restrict out) const {
    const T* __restrict g = gradient + source[i] * row_stride;
    if (scale == nullptr) {
      std::copy_n(g, dim, out);
    } else {
      for (int64_t d = 0; d < dim; ++d) out[d] = scale[i] * g[d];
    }
  }
  void add(int64_t i, T* __restrict out) const {
    const T* __restrict g = gradient + source[i] * row_stride;
    if (scale == nullptr) {
      for (int64_t d = 0; d < dim; ++d) out[d] += g[d];
    } else {
      const T factor = scale[i];
      for (int64_t d = 0; d < dim; ++d) out[d] += factor * g[d];
    }
  }
};

template <typename T>
Packing find_packing(const Contributions<T>& c, int64_t num_sources) {
  int64_t low = c.id[0], high = c.id[0];
  uint64_t source = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    low = std::min(low, c.id[i]);
    high = std::max(high, c.id[i]);
    source = std::max(source, uint64_t(c.source[i]));
  }
  if (source >= uint64_t(num_sources))
    throw_invalid_argument("source ", int64_t(source), " is outside 0..", num_sources - 1, ", the rows of the gradient");
  return {low, high, c.count};
}

// Return the first row of threads 1, 2, ..., relative to the smallest row, such that all threads have about as many
// contributions.
template <typename T>
std::vector<uint64_t> cut_rows(const Contributions<T>& c, const Packing& p, int num_threads) {
  std::vector<uint64_t> rows(size_t(num_threads) + 1, ~uint64_t{0}), sample;
  rows[0] = 0;
  if (num_threads == 1) return rows;
  for (int64_t i = 0; i < c.count; i += std::max<int64_t>(c.count / 1024, 1)) sample.push_back(p.row(c.id[i]));
  std::sort(sample.begin(), sample.end());
  for (int t = 1; t < num_threads; ++t) rows[size_t(t)] = sample[sample.size() * size_t(t) / size_t(num_threads)];
  return rows;
}

// Sorted entries of one thread in its scratch memory, and the start of each of its rows.
template <typename SlotMapEntry>
struct ThreadShare {
  const SlotMapEntry* sorted = nullptr;
  std::vector<int64_t> starts;
};

template <typename T, typename Entry>
void collect(const Contributions<T>& c, const Packing& packing, const std::vector<uint64_t>& cuts, int thread,
             ThreadShare<Entry>& share) {
  const Packing p = packing;
  const uint64_t from = cuts[size_t(thread)], to = cuts[size_t(thread) + 1];
  const bool rest = size_t(thread) + 2 == cuts.size();  // Includes the last row, which no limit exceeds.
  Entry* const entries = scratch<Entry, 0>(size_t(c.count) + 1);  // Entries of other threads are written after the end.
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    entries[kept] = Packed<Entry>::make(p, c.id[i], i);
    kept += p.row(c.id[i]) >= from && (rest || p.row(c.id[i]) < to);
  }
  const auto [first_bit, last_bit] = Packed<Entry>::bits(p);
  share.sorted = radix_sort(entries, scratch<Entry, 1>(size_t(kept)), size_t(kept), first_bit, last_bit);
  for (int64_t i = 0; i < kept; ++i)
    if (i == 0 || Packed<Entry>::row(p, share.sorted[i]) != Packed<Entry>::row(p, share.sorted[i - 1]))
      share.starts.push_back(i);
  share.starts.push_back(kept);
}

// Sum runs of equal block first, and then add their sums to the row from left to right.
template <typename T, typename Entry>
void sum_rows(const Contributions<T>& c, const Packing& p, const ThreadShare<Entry>& share, int64_t* row_id, T* out) {
  const auto at = [&](int64_t i) { return Packed<Entry>::position(p, share.sorted[i]); };
  std::vector<T> block_sum(static_cast<size_t>(c.dim));
  const int64_t num_rows = int64_t(share.starts.size()) - 1, last = share.starts.back();
  for (int64_t r = 0; r < num_rows; ++r, out += c.dim) {
    const int64_t start = share.starts[size_t(r)], stop = share.starts[size_t(r) + 1];
    row_id[r] = p.id(Packed<Entry>::row(p, share.sorted[start]));
    for (int64_t i = start; i < stop;) {
      const int64_t block = c.block[at(i)];
      T* const sum = i == start ? out : block_sum.data();
      c.copy(at(i), sum);
      for (++i; i < stop && c.block[at(i)] == block; ++i) {
        if (i + kPrefetchDistance < last) c.fetch(at(i + kPrefetchDistance));
        c.add(at(i), sum);
      }
      if (sum != out)
        for (int64_t d = 0; d < c.dim; ++d) out[d] += sum[d];
    }
    if (stop + kPrefetchDistance < last) c.fetch(at(stop + kPrefetchDistance));
  }
}

template <typename Entry, typename T>
int64_t run(const Contributions<T>& c, const Packing& p, int64_t* rows, T* sums, int num_threads) {
  const std::vector<uint64_t> cuts = cut_rows(c, p, num_threads);
  std::vector<ThreadShare<Entry>> shares(static_cast<size_t>(num_threads));
  parallel(num_threads, [&](int t) { collect(c, p, cuts, t, shares[size_t(t)]); });
  std::vector<int64_t> first(size_t(num_threads) + 1, 0);
  for (size_t t = 0; t < shares.size(); ++t) first[t + 1] = first[t] + int64_t(shares[t].starts.size()) - 1;
  parallel(num_threads, [&](int t) {
    sum_rows(c, p, shares[size_t(t)], rows + first[size_t(t)], sums + first[size_t(t)] * c.dim);
  });
  return first.back();
}

template <typename T>
int64_t coalesce(Ids ids, Ids source, Ids block, Rows<T> gradient, std::optional<Scale<T>> scale, OutIds rows,
                 OutRows<T> sums, int num_threads) {
  const int64_t nnz = int64_t(ids.shape(0)), dim = int64_t(gradient.shape(1));
  if (int64_t(source.shape(0)) != nnz || int64_t(block.shape(0)) != nnz || (scale && int64_t(scale->shape(0)) != nnz))
    throw_invalid_argument("ids, source, block and scale must have the same length, got ", nnz, ", ", source.shape(0), " and ",
           block.shape(0), scale ? " and " + std::to_string(scale->shape(0)) : "");
  if (int64_t(rows.shape(0)) < nnz || int64_t(sums.shape(0)) < nnz || int64_t(sums.shape(1)) != dim)
    throw_invalid_argument("outputs must have space for ", nnz, " rows of ", dim);
  if (nnz > 0 && dim > 1 && gradient.stride(1) != 1) throw_invalid_argument("the last dimension of gradient must be contiguous");
  const Contributions<T> c{ids.data(),        source.data(),      block.data(),
                           nnz,               gradient.data(),    gradient.stride(0),
                           scale ? scale->data() : nullptr, dim};
  nb::gil_scoped_release unlocked;
  if (nnz == 0) return 0;
  const Packing p = find_packing(c, int64_t(gradient.shape(0)));
  const int threads = nnz < kMinParallelContributions ? 1 : std::max(num_threads, 1);
  return p.fits() ? run<uint64_t>(c, p, rows.data(), sums.data(), threads)
                  : run<KeyedEntry>(c, p, rows.data(), sums.data(), threads);
}

template <typename T>
void bind(nb::module_& m, const char* name) {
  m.def(name, &coalesce<T>, nb::arg("ids"), nb::arg("source"), nb::arg("block"), nb::arg("gradient"),
        nb::arg("scale").none(), nb::arg("rows"), nb::arg("sums"), nb::arg("num_threads"));
}

}  // namespace

void bind_coalesce(nb::module_& m) {
  bind<float>(m, "coalesce_float32");
  bind<double>(m, "coalesce_float64");
}
