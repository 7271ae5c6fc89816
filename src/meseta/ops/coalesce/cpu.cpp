// Sums of gradient contributions per touched row, in the order that reference.py defines.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutIds = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Rows = nb::ndarray<const T, nb::ndim<2>, nb::device::cpu>;
template <typename T>
using OutRows = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Scale = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Entry = std::pair<int64_t, int64_t>;  // (row, position)

template <typename T>
struct Contributions {
  const int64_t* source;
  const int64_t* block;
  const T* gradient;
  int64_t row_stride;
  const T* scale;  // may be null
  int64_t dim;

  void copy(int64_t i, T* out) const {
    const T* g = gradient + source[i] * row_stride;
    if (scale == nullptr) {
      std::memcpy(out, g, size_t(dim) * sizeof(T));
    } else {
      for (int64_t d = 0; d < dim; ++d) out[d] = scale[i] * g[d];
    }
  }
  void add(int64_t i, T* out) const {
    const T* g = gradient + source[i] * row_stride;
    if (scale == nullptr) {
      for (int64_t d = 0; d < dim; ++d) out[d] += g[d];
    } else {
      for (int64_t d = 0; d < dim; ++d) out[d] += scale[i] * g[d];
    }
  }
};

// One row: runs of equal block are summed first, then added to the row from left to right.
template <typename T>
void sum_row(const Contributions<T>& c, const Entry* first, const Entry* last, T* row, T* scratch) {
  bool started = false;
  while (first != last) {
    T* sum = started ? scratch : row;
    const int64_t block = c.block[first->second];
    c.copy(first++->second, sum);
    while (first != last && c.block[first->second] == block) c.add(first++->second, sum);
    if (started) {
      for (int64_t d = 0; d < c.dim; ++d) row[d] += scratch[d];
    }
    started = true;
  }
}

template <typename T>
int64_t coalesce(Ids ids, Ids source, Ids block, Rows<T> gradient, std::optional<Scale<T>> scale, OutIds rows,
                 OutRows<T> sums, int num_threads) {
  const int64_t nnz = int64_t(ids.shape(0));
  if (int64_t(source.shape(0)) != nnz || int64_t(block.shape(0)) != nnz || (scale && int64_t(scale->shape(0)) != nnz))
    throw std::invalid_argument("coalesce: ids, source, block and scale must have one length");
  const Contributions<T> c{source.data(),      block.data(),
                           gradient.data(),    gradient.stride(0),
                           scale ? scale->data() : nullptr, int64_t(gradient.shape(1))};
  const int64_t* id = ids.data();
  int64_t* row_id = rows.data();
  T* out = sums.data();
  nb::gil_scoped_release unlocked;

  // The position breaks ties, so an unstable sort keeps the order of contributions.
  std::vector<Entry> order(static_cast<size_t>(nnz));
  for (int64_t i = 0; i < nnz; ++i) order[size_t(i)] = {id[i], i};
  std::sort(order.begin(), order.end());
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < nnz; ++i) {
    if (i == 0 || order[size_t(i)].first != order[size_t(i) - 1].first) {
      row_id[starts.size()] = order[size_t(i)].first;
      starts.push_back(i);
    }
  }
  const int64_t num_rows = int64_t(starts.size());
  starts.push_back(nnz);
#pragma omp parallel num_threads(num_threads) if (nnz > 4096)
  {
    std::vector<T> scratch(static_cast<size_t>(c.dim));
#pragma omp for schedule(dynamic, 64)
    for (int64_t r = 0; r < num_rows; ++r)
      sum_row(c, order.data() + starts[size_t(r)], order.data() + starts[size_t(r) + 1], out + r * c.dim,
              scratch.data());
  }
  return num_rows;
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
