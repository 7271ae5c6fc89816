// Lookup of single rows as floats. The next rows are prefetched.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/checks.h"
#include "ops/parallel.h"
#include "ops/row_lines.h"
#include "ops/simd.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

struct GradientSource {
  const void* table;
  int64_t num_rows, dim;
  float* out;
};

struct Task {
  size_t feature;
  int64_t first, last;  // Ids.
};

template <typename T>
void copy_row(const T* row, float* out, int64_t dim) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) store(out + c, load(row + c));
  if (c < dim) store(out + c, load(row + c, int(dim - c)), int(dim - c));
}

// Copy the rows of ids [first, last). `start` is the first id of the feature.
template <typename T, typename Id>
void copy_rows(const GradientSource& f, const Id* ids, int64_t start, const Task& task, FirstError& mistake) {
  const RowLines rows(f.table, f.dim * int64_t(sizeof(T)));
  const int64_t ahead = rows.ahead();
  for (int64_t i = task.first; i < std::min(task.first + ahead, task.last); ++i) rows.fetch(ids[i]);
  for (int64_t i = task.first; i < task.last; ++i) {
    if (i + ahead < task.last) rows.fetch(ids[i + ahead]);
    const uint64_t id = uint64_t(int64_t(ids[i]));
    if (id >= uint64_t(f.num_rows)) {
      mistake.note(i);
      continue;
    }
    copy_row(static_cast<const T*>(f.table) + int64_t(id) * f.dim, f.out + (i - start) * f.dim, f.dim);
  }
}

template <typename Id>
void run(const std::vector<GradientSource>& features, int kind, const Id* ids, const std::vector<int64_t>& bounds,
         int num_threads) {
  std::vector<Task> tasks;
  for (size_t f = 0; f < features.size(); ++f) {
    const int64_t piece = std::max<int64_t>(65536 / (features[f].dim + 16), 64);
    for (int64_t first = bounds[f]; first < bounds[f + 1]; first += piece)
      tasks.push_back({f, first, std::min(first + piece, bounds[f + 1])});
  }
  FirstError mistake;
  parallel_tasks(num_threads, int64_t(tasks.size()), [&](int64_t t) {
    const Task& task = tasks[size_t(t)];
    const GradientSource& feature = features[task.feature];
    const int64_t start = bounds[task.feature];
    if (kind == 0) copy_rows<float>(feature, ids, start, task, mistake);
    if (kind == 1) copy_rows<Half>(feature, ids, start, task, mistake);
    if (kind == 2) copy_rows<Bfloat>(feature, ids, start, task, mistake);
  });
  const int64_t at = mistake.at.load();
  if (at == FirstError::kNone) return;
  const size_t f = size_t(std::upper_bound(bounds.begin(), bounds.end(), at) - bounds.begin()) - 1;
  throw_invalid_argument("id ", ids[at], " for table ", f, ", at position ", at - bounds[f], " of its ids, is outside 0..",
         features[f].num_rows - 1);
}

// Look up rows. `tables` has (address, rows, columns, address of the output) of each feature.
void row_lookup(const std::vector<int64_t>& tables, int kind, uintptr_t ids, int64_t num_ids, bool wide,
                const std::vector<int64_t>& bounds, int num_threads) {
  nb::gil_scoped_release unlocked;
  std::vector<GradientSource> features;
  for (size_t i = 0; i + 4 <= tables.size(); i += 4)
    features.push_back({reinterpret_cast<const void*>(tables[i]), tables[i + 1], tables[i + 2],
                        reinterpret_cast<float*>(tables[i + 3])});
  if (bounds.size() != features.size() + 1)
    throw_invalid_argument(bounds.size(), " bounds for ", features.size(), " tables; pass F + 1 bounds");
  check_bounds("bounds", bounds.data(), int64_t(bounds.size()), num_ids);
  wide ? run(features, kind, reinterpret_cast<const int64_t*>(ids), bounds, num_threads)
       : run(features, kind, reinterpret_cast<const int32_t*>(ids), bounds, num_threads);
}

}  // namespace

void bind_row_lookup(nb::module_& m) {
  m.def("row_lookup", &row_lookup, nb::arg("tables"), nb::arg("kind"), nb::arg("ids"), nb::arg("num_ids"),
        nb::arg("wide"), nb::arg("bounds"), nb::arg("num_threads"));
}
