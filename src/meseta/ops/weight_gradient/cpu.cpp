// Dot products of rows and the gradients of their bags. The next rows are prefetched.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
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
  int64_t num_rows, dim, column;
  bool weighted, mean;
};

struct Batch {
  const int64_t* offsets;
  int64_t num_bags, width;
  const float* gradient;
  float* out;
};

struct Task {
  size_t feature;
  int64_t first, last;  // Bags.
};

template <typename T>
float dot(const float* gradient, const T* row, int64_t dim) {
  float total = 0;
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) total += sum_lanes(load(gradient + c) * load(row + c));
  if (c < dim) total += sum_lanes(load(gradient + c, int(dim - c)) * load(row + c, int(dim - c)));
  return total;
}

template <typename T, typename Id>
void run_bags(const GradientSource& f, const Batch& batch, const Id* ids, const Task& task, FirstError& mistake) {
  const int64_t* offsets = batch.offsets + int64_t(task.feature) * batch.num_bags;
  const RowLines rows(f.table, f.dim * int64_t(sizeof(T)));
  const int64_t ahead = rows.ahead(), end = offsets[task.last];
  std::vector<float> divided(size_t(f.mean ? f.dim : 0));
  for (int64_t i = offsets[task.first]; i < std::min(offsets[task.first] + ahead, end); ++i) rows.fetch(ids[i]);
  for (int64_t bag = task.first; bag < task.last; ++bag) {
    const float* gradient = batch.gradient + bag * batch.width + f.column;
    const int64_t stop = offsets[bag + 1], count = stop - offsets[bag];
    if (f.mean && count > 1) {
      for (int64_t c = 0; c < f.dim; ++c) divided[size_t(c)] = gradient[c] / float(count);
      gradient = divided.data();
    }
    for (int64_t i = offsets[bag]; i < stop; ++i) {
      if (i + ahead < end) rows.fetch(ids[i + ahead]);
      const uint64_t id = uint64_t(int64_t(ids[i]));
      if (id < uint64_t(f.num_rows)) {
        batch.out[i] = dot(gradient, static_cast<const T*>(f.table) + int64_t(id) * f.dim, f.dim);
      } else {
        mistake.note(i);
      }
    }
  }
}

template <typename Id>
void run(const std::vector<GradientSource>& features, int kind, const Batch& batch, const Id* ids, int num_threads) {
  std::vector<Task> tasks;
  for (size_t f = 0; f < features.size(); ++f) {
    if (!features[f].weighted) continue;
    const int64_t* offsets = batch.offsets + int64_t(f) * batch.num_bags;
    const int64_t cost = (offsets[batch.num_bags] - offsets[0] + batch.num_bags) * (features[f].dim + 16);
    const int64_t pieces = std::clamp<int64_t>(cost / 131072, 1, std::max<int64_t>(batch.num_bags, 1));
    for (int64_t p = 0; p < pieces; ++p)
      tasks.push_back({f, batch.num_bags * p / pieces, batch.num_bags * (p + 1) / pieces});
  }
  FirstError mistake;
  parallel_tasks(num_threads, int64_t(tasks.size()), [&](int64_t t) {
    const Task& task = tasks[size_t(t)];
    const GradientSource& feature = features[task.feature];
    if (kind == 0) run_bags<float>(feature, batch, ids, task, mistake);
    if (kind == 1) run_bags<Half>(feature, batch, ids, task, mistake);
    if (kind == 2) run_bags<Bfloat>(feature, batch, ids, task, mistake);
  });
  const int64_t at = mistake.at.load();
  if (at == FirstError::kNone) return;
  const int64_t* end = batch.offsets + int64_t(features.size()) * batch.num_bags + 1;
  const int64_t bag = std::upper_bound(batch.offsets, end, at) - batch.offsets - 1;
  const int64_t f = bag / batch.num_bags;
  throw_invalid_argument("id ", ids[at], " of feature ", f, ", sample ", bag % batch.num_bags, ", is outside 0..",
         features[size_t(f)].num_rows - 1);
}

// Compute weight gradients. `tables` has (address, rows, columns, flags) of each feature, with flags 1 weighted and 2
// mean. `ids` is (address, count, whether they are int64). `offsets` is (address, bags per feature). `gradient` is [bags,
// sum of columns], and `out` has a float per id.
void weight_gradient(const std::vector<int64_t>& tables, int kind, std::array<int64_t, 3> ids,
                     std::array<int64_t, 2> offsets, uintptr_t gradient, uintptr_t out, int num_threads) {
  nb::gil_scoped_release unlocked;
  std::vector<GradientSource> features;
  int64_t column = 0;
  for (size_t i = 0; i + 4 <= tables.size(); i += 4) {
    features.push_back({reinterpret_cast<const void*>(tables[i]), tables[i + 1], tables[i + 2], column,
                        (tables[i + 3] & 1) != 0, (tables[i + 3] & 2) != 0});
    column += tables[i + 2];
  }
  const Batch batch{reinterpret_cast<const int64_t*>(offsets[0]), offsets[1], column,
                    reinterpret_cast<const float*>(gradient), reinterpret_cast<float*>(out)};
  check_bounds("offsets", batch.offsets, int64_t(features.size()) * batch.num_bags + 1, ids[1]);
  if (batch.num_bags == 0) return;
  ids[2] ? run(features, kind, batch, reinterpret_cast<const int64_t*>(ids[0]), num_threads)
         : run(features, kind, batch, reinterpret_cast<const int32_t*>(ids[0]), num_threads);
}

}  // namespace

void bind_weight_gradient(nb::module_& m) {
  m.def("weight_gradient", &weight_gradient, nb::arg("tables"), nb::arg("kind"), nb::arg("ids"), nb::arg("offsets"),
        nb::arg("gradient"), nb::arg("out"), nb::arg("num_threads"));
}
