// Pooled lookup of all features in one call. See reference.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/parallel.h"
#include "ops/row_lines.h"
#include "ops/simd.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

constexpr int64_t kStreamFloats = 1 << 18;  // 1 MB.
constexpr int64_t kPrefetchDistance = 64;              // Number of ids whose rows are being prefetched.

struct GradientSource {
  const void* table;
  int64_t num_rows;
  int64_t dim;
  int64_t first_column;  // Column of the output.
  bool weighted, mean;
};

struct Batch {
  const void* ids;
  const int64_t* offsets;  // [num_features * num_bags + 1].
  const float* weights;    // May be null.
  int64_t num_ids, num_bags;
  float* out;
  int64_t out_stride;
  bool streams;  // Whether whole cache lines are written past the caches.
};

// Position of the first invalid input. The smallest position wins, whichever thread reports first.
struct FirstError {
  std::atomic<int64_t> at{std::numeric_limits<int64_t>::max()};
  void note(int64_t position) {
    int64_t seen = at.load();
    while (position < seen && !at.compare_exchange_weak(seen, position)) {
    }
  }
};

// Pool bags [first, last) of one feature: `N` vectors of each row, starting at column `c0`. The last vector has `tail`
// lanes.
template <typename T, typename Id, int N, bool kTail>
void sum_bags(const GradientSource& f, const Batch& batch, const int64_t* offsets, int64_t first, int64_t last, int64_t c0,
              int tail, FirstError& mistake) {
  const Id* ids = static_cast<const Id*>(batch.ids);
  const T* table = static_cast<const T*>(f.table);
  const int64_t end = offsets[last];
  const RowLines rows(table, f.dim * int64_t(sizeof(T)));
  constexpr int kLines = (N * kLanes * int(sizeof(T)) + 63) / 64;
  const int64_t burst = rows.lines() == 2 ? 8 : 32;
  const auto read = [&](const T* row, int j) {
    return kTail && j == N - 1 ? load(row + 16 * j, tail) : load(row + 16 * j);
  };
  // Prefetch many rows together. A prefetch waits for the translation of its address, and these waits overlap: b_uni took
  // 6.1 ms instead of 7.4, and bags of one id with 16 columns a fifth less. Rows of two lines become slower if all of
  // them are cold.
  int64_t next = offsets[first];
  const auto reach = [&](int64_t i) {
    if (c0 != 0 || i + kPrefetchDistance < next) return;
    for (const int64_t stop = std::min(i + kPrefetchDistance + burst, end); next < stop; ++next) rows.fetch<kLines>(ids[next]);
  };
  for (int64_t bag = first; bag < last; ++bag) {
    Vec sum[N];
    for (int j = 0; j < N; ++j) sum[j] = zero();
    const int64_t stop = offsets[bag + 1];
    for (int64_t i = offsets[bag]; i < stop; ++i) {
      reach(i);
      const uint64_t id = uint64_t(int64_t(ids[i]));
      if (id >= uint64_t(f.num_rows)) {
        mistake.note(i);
        continue;
      }
      const T* row = table + int64_t(id) * f.dim + c0;
      if (f.weighted) {
        const Vec weight = broadcast(batch.weights[i]);
        for (int j = 0; j < N; ++j) sum[j] = sum[j] + read(row, j) * weight;
      } else {
        for (int j = 0; j < N; ++j) sum[j] = sum[j] + read(row, j);
      }
    }
    if (f.mean && stop - offsets[bag] > 1) {
      const Vec count = broadcast(float(stop - offsets[bag]));
      for (int j = 0; j < N; ++j) sum[j] = sum[j] / count;
    }
    float* out = batch.out + bag * batch.out_stride + f.first_column + c0;
    if (batch.streams && !kTail) {
      for (int j = 0; j < N; ++j) stream(out + 16 * j, sum[j]);
      continue;
    }
    for (int j = 0; j < N - 1; ++j) store(out + 16 * j, sum[j]);
    if (kTail) {
      store(out + 16 * (N - 1), sum[N - 1], tail);
    } else {
      store(out + 16 * (N - 1), sum[N - 1]);
    }
  }
}

template <typename T, typename Id, int N>
void sum_columns(const GradientSource& f, const Batch& batch, const int64_t* offsets, int64_t first, int64_t last, int64_t c0,
                 int64_t width, FirstError& mistake) {
  if (width > 16 * (N - 1) && width < 16 * N) {
    sum_bags<T, Id, N, true>(f, batch, offsets, first, last, c0, int(width - 16 * (N - 1)), mistake);
  } else if (width == 16 * N) {
    sum_bags<T, Id, N, false>(f, batch, offsets, first, last, c0, 16, mistake);
  } else if constexpr (N > 1) {
    sum_columns<T, Id, N - 1>(f, batch, offsets, first, last, c0, width, mistake);
  }
}

struct Task {
  const GradientSource* feature;
  const int64_t* offsets;  // Offsets of the feature, [num_bags + 1].
  int64_t first, last;
};

template <typename T, typename Id>
void run(const std::vector<Task>& tasks, const Batch& batch, int num_threads, FirstError& mistake) {
  parallel_tasks(num_threads, int64_t(tasks.size()), [&](int64_t index) {
    const Task& task = tasks[size_t(index)];
    for (int64_t c0 = 0; c0 < task.feature->dim; c0 += 128)
      sum_columns<T, Id, 8>(*task.feature, batch, task.offsets, task.first, task.last, c0,
                            std::min<int64_t>(128, task.feature->dim - c0), mistake);
    if (batch.streams) stream_fence();
  });
}

// Divide the work into tasks with about equal numbers of bytes, several per thread, so that a thread with cold rows does
// not delay the end.
std::vector<Task> cut(const std::vector<GradientSource>& features, const Batch& batch, int num_threads) {
  std::vector<Task> tasks;
  double total = 0;
  const auto cost = [&](size_t f) {
    const int64_t* offsets = batch.offsets + int64_t(f) * batch.num_bags;
    return double(offsets[batch.num_bags] - offsets[0] + batch.num_bags) * double(features[f].dim + 32);
  };
  for (size_t f = 0; f < features.size(); ++f) total += cost(f);
  const double piece = std::max(total / (16.0 * num_threads), 32768.0);
  for (size_t f = 0; f < features.size(); ++f) {
    const int64_t* offsets = batch.offsets + int64_t(f) * batch.num_bags;
    const int64_t pieces = std::clamp<int64_t>(int64_t(cost(f) / piece), 1, std::max<int64_t>(batch.num_bags, 1));
    for (int64_t p = 0; p < pieces; ++p)
      tasks.push_back({&features[f], offsets, batch.num_bags * p / pieces, batch.num_bags * (p + 1) / pieces});
  }
  return tasks;
}

// Check that the offsets of all features start at 0 or later, do not decrease, and end within the ids.
void check_offsets(const int64_t* offsets, int64_t count, int64_t num_ids) {
  bool sorted = offsets[0] >= 0 && offsets[count - 1] <= num_ids;
  for (int64_t i = 1; i < count; ++i) sorted &= offsets[i - 1] <= offsets[i];
  if (sorted) return;
  for (int64_t i = 0; i < count; ++i) {
    if (offsets[i] < 0 || offsets[i] > num_ids || (i > 0 && offsets[i] < offsets[i - 1]))
      throw std::invalid_argument("offsets[" + std::to_string(i) + "] is " + std::to_string(offsets[i]) +
                                  "; offsets must not decrease and must be in 0.." + std::to_string(num_ids));
  }
}

void check_ids(const std::vector<GradientSource>& features, const Batch& batch, bool wide_ids, const FirstError& mistake) {
  const int64_t at = mistake.at.load();
  if (at == std::numeric_limits<int64_t>::max()) return;
  const int64_t count = int64_t(features.size()) * batch.num_bags + 1;
  const int64_t bag = std::upper_bound(batch.offsets, batch.offsets + count, at) - batch.offsets - 1;
  const int64_t id =
      wide_ids ? static_cast<const int64_t*>(batch.ids)[at] : static_cast<const int32_t*>(batch.ids)[at];
  const int64_t f = bag / batch.num_bags;
  throw std::invalid_argument("id " + std::to_string(id) + " of feature " + std::to_string(f) + ", sample " +
                              std::to_string(bag % batch.num_bags) + ", is outside 0.." +
                              std::to_string(features[size_t(f)].num_rows - 1));
}

// Pool rows. `tables` has (address, rows, columns, flags) of each feature, with flags 1 weighted and 2 mean. `kind` is 0
// for float, 1 for half, 2 for bfloat. Tensors must be contiguous, and the caller must keep them alive.
void pooled_lookup(const std::vector<int64_t>& tables, int kind, uintptr_t ids, int64_t num_ids, bool wide_ids,
                   uintptr_t offsets, int64_t num_bags, uintptr_t weights, uintptr_t out, int64_t out_stride,
                   int num_threads) {
  nb::gil_scoped_release unlocked;
  Batch batch{reinterpret_cast<const void*>(ids),
                    reinterpret_cast<const int64_t*>(offsets),
                    reinterpret_cast<const float*>(weights),
                    num_ids,
                    num_bags,
                    reinterpret_cast<float*>(out),
                    out_stride,
                    // Reading the old content of a large output would cost as much as reading rows.
                    out % 64 == 0 && out_stride % 16 == 0 && num_bags * out_stride >= kStreamFloats};
  std::vector<GradientSource> features;
  int64_t column = 0;
  for (size_t i = 0; i + 4 <= tables.size(); i += 4) {
    const int64_t flags = tables[i + 3];
    features.push_back({reinterpret_cast<const void*>(tables[i]), tables[i + 1], tables[i + 2], column,
                        (flags & 1) != 0 && weights != 0, (flags & 2) != 0});
    column += tables[i + 2];
  }
  for (const GradientSource& feature : features) batch.streams &= feature.first_column % 16 == 0;
  if (features.empty() || num_bags == 0) return;
  check_offsets(batch.offsets, int64_t(features.size()) * num_bags + 1, num_ids);
  const std::vector<Task> tasks = cut(features, batch, num_threads);
  FirstError mistake;
  if (kind == 0) {
    wide_ids ? run<float, int64_t>(tasks, batch, num_threads, mistake)
             : run<float, int32_t>(tasks, batch, num_threads, mistake);
  } else if (kind == 1) {
    wide_ids ? run<Half, int64_t>(tasks, batch, num_threads, mistake)
             : run<Half, int32_t>(tasks, batch, num_threads, mistake);
  } else {
    wide_ids ? run<Bfloat, int64_t>(tasks, batch, num_threads, mistake)
             : run<Bfloat, int32_t>(tasks, batch, num_threads, mistake);
  }
  check_ids(features, batch, wide_ids, mistake);
}

}  // namespace

void bind_pooled_lookup(nb::module_& m) {
  m.def("pooled_lookup", &pooled_lookup, nb::arg("tables"), nb::arg("kind"), nb::arg("ids"), nb::arg("num_ids"),
        nb::arg("wide_ids"), nb::arg("offsets"), nb::arg("num_bags"), nb::arg("weights"), nb::arg("out"),
        nb::arg("out_stride"), nb::arg("num_threads"));
}
