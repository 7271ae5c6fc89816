// Row update: sums the gradients of a batch per touched row, and runs the optimizer's program once on each row, without a
// gradient tensor in between. See reference.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/checks.h"
#include "ops/parallel.h"
#include "ops/row_update/entries.h"
#include "ops/row_update/executor.h"
#include "ops/row_update/marks.h"
#include "ops/row_update/sums.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

struct Task {
  const UpdateTable* table;
  int64_t first_row, last_row;
  double cost;
};

// Memory of one thread, kept between steps.
struct Scratch {
  Buffer<uint64_t> entries, other;
  Buffer<uint32_t> counts, samples;
  Buffer<float> lines;
};

void expand_samples(const UpdateTable& table, const UpdateBatch& batch, uint32_t* samples) {
  for (const GradientSource& f : table.features)
    for (int64_t bag = 0; bag < batch.num_bags; ++bag)
      samples = std::fill_n(samples, f.offsets[bag + 1] - f.offsets[bag], uint32_t(bag));
}

struct Run {
  const uint64_t *first, *last;
};

// Sum and update the rows of sorted entries, a chunk at a time. The rows of the next chunk are prefetched meanwhile.
template <typename T, typename Find>
void update_sorted(const Find& find, Executor<T>& executor, const uint64_t* entries, int64_t n, int payload_bits,
                   const Task& task, uint32_t step) {
  constexpr int64_t kBurst = 16;
  const int64_t dim = task.table->target.dim, capacity = executor.capacity(), width = executor.width();
  float* sums = executor.sums();
  std::vector<const float*> gradients(static_cast<size_t>(capacity));
  std::vector<Run> runs(static_cast<size_t>(2 * capacity));
  std::vector<int64_t> rows(static_cast<size_t>(2 * capacity));
  const TableTarget& target = task.table->target;
  // If about every word of marks has a row here, words are accessed in order, and rows are marked immediately, with a few
  // instructions that wait for nothing. Otherwise rows are appended to the log if there is one. Without a log, their words
  // are prefetched with the rows, and rows are marked in groups.
  const bool dense = n * kRowsPerWord >= task.last_row - task.first_row && target.row_ids == nullptr;
  const bool marks_at_once = dense && target.marks != nullptr, logs = !dense && target.log != nullptr;
  const bool marks_later = !marks_at_once && !logs;
  const uint64_t *next = entries, *end = entries + n;
  // Find the limits of some runs from `slot` on, and prefetch their rows together: a prefetch waits for the translation of
  // its address, and many such waits overlap. Returns the number of runs.
  const auto delimit = [&](int64_t slot, int64_t most) {
    int64_t count = 0;
    bool all_marked = true;
    for (; count < most && next < end; ++count) {
      const uint64_t row = *next >> payload_bits;
      const uint64_t* first = next;
      while (next < end && *next >> payload_bits == row) ++next;
      runs[size_t(slot + count)] = {first, next};
      const int64_t at = task.first_row + int64_t(row);
      rows[size_t(slot + count)] = at;
      if (marks_at_once) all_marked &= is_marked(target, at);
    }
    if (!all_marked) mark_rows(target, rows.data() + slot, count, true);
    if (logs) log_rows(target, rows.data() + slot, count);
    if (marks_later) prefetch_marks(target, rows.data() + slot, count);
    executor.prefetch_rows(rows.data() + slot, count);
    return count;
  };
  GradientPrefetcher<Find> fetcher{find, entries, end, dim};
  int64_t half = 0, count = delimit(0, capacity);
  while (count > 0) {
    const int64_t other = capacity - half;
    int64_t coming = 0;
    for (int64_t k = 0; k < count; ++k) {
      if (k % kBurst == 0) {
        coming += delimit(other + coming, std::min(kBurst, capacity - coming));
        if (marks_later) mark_rows(target, rows.data() + half + k, std::min(kBurst, count - k), true);
      }
      const Run& run = runs[size_t(half + k)];
      fetcher.reach(run.first);
      if (!Find::kWeighted && run.last - run.first == 1) {
        gradients[size_t(k)] = find.gradient(*run.first);
      } else {
        sum_row(find, fetcher, run.first, run.last, dim, sums + k * width);
        gradients[size_t(k)] = sums + k * width;
      }
    }
    executor.run(rows.data() + half, gradients.data(), count, step);
    half = other;
    count = coming;
  }
}

template <typename T, typename Id>
void run_task(const Task& task, const UpdateBatch& batch, Executor<T>& executor, Scratch& scratch) {
  const UpdateTable& table = *task.table;
  const RowRange range{uint64_t(task.first_row), uint64_t(task.last_row - task.first_row)};
  const DigitCounts counts(range.count, uint64_t(table.num_ids), scratch.counts);
  const int64_t n = count_digits<Id>(table, batch, range, counts);
  if (n == 0) return;
  counts.to_starts();
  const int64_t num_features = int64_t(table.features.size()), num_bags = batch.num_bags * num_features;
  const bool copies = n >= 2 * num_bags || (num_features > 1 && 2 * n >= num_bags);
  const bool by_position = table.needs_positions || (num_features > 1 && !copies);
  const int payload_bits = by_position ? table.position_bits : table.line_bits;
  const uint64_t mask = (uint64_t{1} << payload_bits) - 1;
  scratch.entries.reserve(size_t(n) + 1);
  scratch.other.reserve(size_t(n));
  scatter_first_pass<Id>(table, batch, range, by_position, payload_bits, counts, scratch.entries.data());
  const uint64_t* sorted = scatter_remaining_passes(counts, n, payload_bits, scratch.entries.data(), scratch.other.data());
  executor.shape(table.target);
  UpdateTable own = table;
  if (copies) gather_lines(own, batch.num_bags, scratch.lines);
  if (by_position) {
    scratch.samples.reserve(size_t(table.num_ids));
    expand_samples(table, batch, scratch.samples.data());
    const PositionPayload find{own, batch, scratch.samples.data(), mask};
    update_sorted<T>(find, executor, sorted, n, payload_bits, task, batch.step);
  } else {
    const LinePayload find{own.features[0].gradient, own.features[0].stride, mask};
    update_sorted<T>(find, executor, sorted, n, payload_bits, task, batch.step);
  }
}

// Divide tables into row ranges of about equal work, several per thread, the largest first.
std::vector<Task> cut(const std::vector<UpdateTable>& tables, int num_threads) {
  const auto cost = [](const UpdateTable& t) { return double(t.num_ids) * double(t.target.dim + 32); };
  double total = 0;
  for (const UpdateTable& t : tables) total += cost(t);
  const double piece = std::max(num_threads == 1 ? total : total / (4.0 * num_threads), 65536.0);
  std::vector<Task> tasks;
  for (const UpdateTable& t : tables) {
    if (t.num_ids == 0) continue;
    if (t.target.num_rows == 0) throw std::invalid_argument("a table without rows has ids");
    const int64_t rows = t.target.num_rows, pieces = std::clamp<int64_t>(int64_t(cost(t) / piece + 0.5), 1, rows);
    for (int64_t p = 0; p < pieces; ++p) {
      // Rows of different tasks must not share a word of marks.
      const auto border = [&](int64_t q) {
        return q == pieces ? rows : (rows / pieces * q + std::min(q, rows % pieces)) / kRowsPerWord * kRowsPerWord;
      };
      tasks.push_back({&t, border(p), border(p + 1), cost(t) / double(pieces)});
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  return tasks;
}

template <typename T, typename Id>
void run(const std::vector<Task>& tasks, const UpdateBatch& batch, const RowProgram& program, int num_threads) {
  std::atomic<int64_t> next{0};
  parallel(std::min<int>(num_threads, int(tasks.size())), [&](int) {
    static thread_local Scratch scratch;
    Executor<T> executor(program);
    for (int64_t task = next.fetch_add(1); task < int64_t(tasks.size()); task = next.fetch_add(1))
      run_task<T, Id>(tasks[size_t(task)], batch, executor, scratch);
  });
}

template <typename T>
void run(const std::vector<Task>& tasks, const UpdateBatch& batch, const RowProgram& program, int num_threads) {
  batch.wide_ids ? run<T, int64_t>(tasks, batch, program, num_threads)
                 : run<T, int32_t>(tasks, batch, program, num_threads);
}

// Parse the tables of a call: (weight, rows, columns, first row, first column, key, row ids or 0, marks or 0, words of
// marks with or without a log) of each.
constexpr size_t kTableFields = 9;
std::vector<UpdateTable> read_tables(const std::vector<uint64_t>& fields, const std::vector<uint64_t>& states,
                               size_t num_states, const float* uniforms, size_t num_uniforms) {
  std::vector<UpdateTable> tables;
  for (size_t t = 0; t * kTableFields + kTableFields <= fields.size(); ++t) {
    const uint64_t* x = fields.data() + t * kTableFields;
    UpdateTable table{};
    table.target = {reinterpret_cast<void*>(x[0]), int64_t(x[1]), int64_t(x[2]), int64_t(x[3]), int64_t(x[4]),
                    x[5],                          {},            uniforms + t * num_uniforms,
                    reinterpret_cast<const int64_t*>(x[6]),
                    reinterpret_cast<uint32_t*>(x[7]),
                    int64_t(x[8]),                 nullptr,       0};
    TableTarget& target = table.target;
    const int64_t words = (target.num_rows + kRowsPerWord - 1) / kRowsPerWord;
    if (target.marks != nullptr && target.row_ids == nullptr && target.num_marks > words) {
      target.log = target.marks + words;
      target.log_capacity = target.num_marks - words - 1;
      target.num_marks = words;
    }
    if (table.target.dim < 1) throw std::invalid_argument("a table has no columns");
    for (size_t s = 0; s < num_states; ++s)
      table.target.state.push_back(reinterpret_cast<float*>(states.at(t * num_states + s)));
    tables.push_back(std::move(table));
  }
  return tables;
}

// Choose how entries of a table are packed. Throws if they do not fit into 64 bits.
void pack(UpdateTable& table, const UpdateBatch& batch) {
  for (const GradientSource& f : table.features) {
    table.num_ids += f.offsets[batch.num_bags] - f.offsets[0];
    table.needs_positions |= f.weighted || f.per_id;
  }
  table.sample_bits = std::max<int>(kBlockBits, std::bit_width(uint64_t(batch.num_bags)));
  table.line_bits = table.sample_bits + std::bit_width(table.features.size());
  table.position_bits = std::bit_width(uint64_t(table.num_ids));
  const int payload_bits = std::max(table.line_bits, table.position_bits);
  if (payload_bits + std::bit_width(uint64_t(table.target.num_rows)) > 64 || table.num_ids > UINT32_MAX)
    throw std::invalid_argument("a table of " + std::to_string(table.target.num_rows) + " rows with " +
                                std::to_string(table.num_ids) + " ids is too large for one update");
}

// Parse the features of a call: (position in the offsets, table, matrix, first column, per id, weighted) of each. Matrices
// of gradients have (address, rows, columns, row stride in floats) each.
constexpr size_t kFeatureFields = 6, kMatrixFields = 4;

void add_features(std::vector<UpdateTable>& tables, const std::vector<int64_t>& fields, const std::vector<uint64_t>& matrices,
                  const UpdateBatch& batch, int64_t num_offsets) {
  for (size_t i = 0; i + kFeatureFields <= fields.size(); i += kFeatureFields) {
    const int64_t position = fields[i], t = fields[i + 1], m = fields[i + 2], column = fields[i + 3];
    if (t < 0 || m < 0 || t >= int64_t(tables.size()) || m >= int64_t(matrices.size() / kMatrixFields))
      throw_invalid_argument("feature ", position, " refers to table ", t, " and gradient ", m, ", which do not exist");
    if (position < 0 || position >= (num_offsets - 1) / batch.num_bags)
      throw_invalid_argument("feature ", position, " with ", batch.num_bags, " samples is outside the ", num_offsets, " offsets");
    UpdateTable& table = tables[size_t(t)];
    const int64_t* offsets = batch.offsets + position * batch.num_bags;
    const bool per_id = fields[i + 4] != 0;
    const uint64_t* matrix = matrices.data() + size_t(m) * kMatrixFields;
    const int64_t lines = per_id ? offsets[batch.num_bags] - offsets[0] : batch.num_bags, width = table.target.dim;
    if (int64_t(matrix[1]) != lines || column < 0 || column > int64_t(matrix[2]) - width)
      throw_invalid_argument("feature ", position, " needs ", lines, " gradients of ", width, " columns from column ", column,
             " on, but its matrix is [", matrix[1], ", ", matrix[2], "]");
    table.features.push_back({reinterpret_cast<const float*>(matrix[0]) + column, int64_t(matrix[3]), per_id,
                              fields[i + 5] != 0 && batch.weights != nullptr, offsets});
  }
}

template <typename Id>
void check_ids(const std::vector<UpdateTable>& tables, const UpdateBatch& batch) {
  const Id* ids = static_cast<const Id*>(batch.ids);
  for (const UpdateTable& table : tables)
    for (const GradientSource& f : table.features)
      for (int64_t i = f.offsets[0]; i < f.offsets[batch.num_bags]; ++i)
        if (ids[i] < 0 || ids[i] >= table.target.num_rows)
          throw_invalid_argument("id ", ids[i], " is outside 0..", table.target.num_rows - 1);
}

// Update rows. `kind` is 0 for float, 1 for half, 2 for bfloat, and 3 for types that the core only checks.
void row_update(const std::vector<uint64_t>& table_fields, const std::vector<uint64_t>& states, int kind,
                const std::vector<bool>& state_is_row, uintptr_t code, int64_t num_instructions, uintptr_t uniforms,
                int num_uniforms, const std::vector<int64_t>& features, const std::vector<uint64_t>& matrices,
                uintptr_t ids, int64_t num_ids, bool wide_ids, uintptr_t offsets, int64_t num_offsets, int64_t num_bags,
                uintptr_t weights, uint32_t step, int num_threads) {
  nb::gil_scoped_release unlocked;
  const RowProgram program(reinterpret_cast<const int32_t*>(code), num_instructions, state_is_row, num_uniforms, 0, 0);
  const UpdateBatch batch{reinterpret_cast<const void*>(ids), wide_ids, reinterpret_cast<const int64_t*>(offsets), num_ids,
                    num_bags,                           reinterpret_cast<const float*>(weights), step};
  if (num_bags <= 0) return;
  check_bounds("offsets", batch.offsets, num_offsets, num_ids);
  std::vector<UpdateTable> tables = read_tables(table_fields, states, state_is_row.size(),
                                          reinterpret_cast<const float*>(uniforms), size_t(num_uniforms));
  add_features(tables, features, matrices, batch, num_offsets);
  if (kind > 2) return wide_ids ? check_ids<int64_t>(tables, batch) : check_ids<int32_t>(tables, batch);
  for (UpdateTable& table : tables) pack(table, batch);
  std::vector<UpdateTable*> full;
  for (UpdateTable& table : tables)
    if (!log_has_capacity(table.target, table.num_ids)) full.push_back(&table);
  if (!full.empty())
    parallel_tasks(num_threads, int64_t(full.size()), [&](int64_t t) {
      flush_log(full[size_t(t)]->target, full[size_t(t)]->num_ids);
    });
  const std::vector<Task> tasks = cut(tables, num_threads);
  if (kind == 0) run<float>(tasks, batch, program, num_threads);
  else if (kind == 1) run<Half>(tasks, batch, program, num_threads);
  else run<Bfloat>(tasks, batch, program, num_threads);
}

template <typename T>
void apply(const RowProgram& program, const TableTarget& target, const int64_t* rows, const float* gradient, int64_t num_rows,
           const float* stats, float* summands, uint32_t step, int num_threads) {
  constexpr int64_t kPiece = 4096;
  const int64_t blocks = (target.dim + kLanes - 1) / kLanes;
  parallel_tasks(num_threads, (num_rows + kPiece - 1) / kPiece, [&](int64_t piece) {
    Executor<T> executor(program);
    executor.shape(target);
    std::vector<const float*> gradients(static_cast<size_t>(executor.capacity()));
    const int64_t end = std::min((piece + 1) * kPiece, num_rows);
    for (int64_t at = piece * kPiece; at < end; at += executor.capacity()) {
      const int64_t n = std::min(executor.capacity(), end - at);
      executor.prefetch_rows(rows + at, n);
      if (summands == nullptr) prefetch_marks(target, rows + at, n);
      for (int64_t k = 0; k < n; ++k) gradients[size_t(k)] = gradient + (at + k) * target.dim;
      if (summands == nullptr) mark_rows(target, rows + at, n, false);
      executor.run(rows + at, gradients.data(), n, step, stats == nullptr ? nullptr : stats + at, num_rows,
                   summands == nullptr ? nullptr : summands + at * blocks, num_rows);
    }
  });
}

// Run the program on unique, sorted rows [U] with summed gradients [U, D]. It uses statistics [S, U] of the whole rows, or
// writes the block sums of summands [S, U, blocks].
void row_apply(const std::vector<uint64_t>& table_fields, const std::vector<uint64_t>& states, int kind,
               const std::vector<bool>& state_is_row, uintptr_t code, int64_t num_instructions, uintptr_t uniforms,
               int num_uniforms, int num_stats, int num_sums, uintptr_t rows, uintptr_t gradient, int64_t num_rows, uintptr_t stats,
               uintptr_t summands, uint32_t step, int num_threads) {
  nb::gil_scoped_release unlocked;
  const RowProgram program(reinterpret_cast<const int32_t*>(code), num_instructions, state_is_row, num_uniforms,
                        num_stats, num_sums);
  const std::vector<UpdateTable> tables = read_tables(table_fields, states, state_is_row.size(),
                                                reinterpret_cast<const float*>(uniforms), size_t(num_uniforms));
  const TableTarget& target = tables.at(0).target;
  const auto* row = reinterpret_cast<const int64_t*>(rows);
  for (int64_t i = 0; i < num_rows; ++i)
    if (row[i] < 0 || row[i] >= target.num_rows || (i > 0 && row[i] <= row[i - 1]))
      throw std::invalid_argument("row " + std::to_string(row[i]) + " must be in 0.." +
                                  std::to_string(target.num_rows - 1) + " and greater than the previous row");
  const auto* g = reinterpret_cast<const float*>(gradient);
  const auto* given = reinterpret_cast<const float*>(stats);
  auto* out = reinterpret_cast<float*>(summands);
  if (kind == 0) apply<float>(program, target, row, g, num_rows, given, out, step, num_threads);
  else if (kind == 1) apply<Half>(program, target, row, g, num_rows, given, out, step, num_threads);
  else apply<Bfloat>(program, target, row, g, num_rows, given, out, step, num_threads);
}

}  // namespace

void bind_row_update(nb::module_& m) {
  m.def("row_update", &row_update, nb::arg("tables"), nb::arg("states"), nb::arg("kind"), nb::arg("state_is_row"),
        nb::arg("code"), nb::arg("num_instructions"), nb::arg("uniforms"), nb::arg("num_uniforms"),
        nb::arg("features"), nb::arg("matrices"), nb::arg("ids"), nb::arg("num_ids"), nb::arg("wide_ids"), nb::arg("offsets"),
        nb::arg("num_offsets"), nb::arg("num_bags"), nb::arg("weights"), nb::arg("step"), nb::arg("num_threads"));
  m.def("row_apply", &row_apply, nb::arg("tables"), nb::arg("states"), nb::arg("kind"), nb::arg("state_is_row"),
        nb::arg("code"), nb::arg("num_instructions"), nb::arg("uniforms"), nb::arg("num_uniforms"),
        nb::arg("num_stats"), nb::arg("num_sums"), nb::arg("rows"), nb::arg("gradient"), nb::arg("num_rows"), nb::arg("stats"),
        nb::arg("summands"), nb::arg("step"), nb::arg("num_threads"));
}
