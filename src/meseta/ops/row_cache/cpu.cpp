// Python bindings of row caches, see cache.h. One call pins the rows of all caches that a batch looks up.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>

#include "ops/checks.h"
#include "ops/parallel.h"
#include "ops/row_cache/cache.h"
#include "ops/row_file/handles.h"

namespace nb = nanobind;
using namespace meseta;
using namespace meseta::row_cache;
using row_file::held;
using row_file::to_capsule;

namespace {

using Rows = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Records = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Present = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;
using FailureFields = std::vector<int64_t>;

constexpr const char* kBackingStore = "far side";
constexpr const char* kCache = "row cache";
constexpr const char* kPinned = "pinned rows";
constexpr int64_t kPiece = 4096;    // Minimum number of ids per additional thread.
constexpr int64_t kPutRows = 1024;  // Minimum number of records per additional thread.

// Rows that a batch has pinned, in all caches that it looks up.
struct PinnedBatch {
  std::vector<CachePins> pinned;
  bool is_read_only = false;
};

Numbers array_of(std::vector<int64_t> numbers) {
  auto* kept = new std::vector<int64_t>(std::move(numbers));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return Numbers(kept->data(), {kept->size()}, owner);
}

FailureFields failure_fields(int64_t index, const Failure& f) { return {index, f.kind, f.code, f.row, f.place, f.writing}; }

nb::capsule file_backing_store(nb::capsule log) {
  return to_capsule<RowStore>(std::make_shared<FileRowStore>(held<row_file::RowLog>(log, row_file::kLog)), kBackingStore);
}

nb::capsule memory_backing_store(Records records, Present is_written) {
  if (records.shape(0) != is_written.shape(0)) throw_invalid_argument("memory_backing_store: the numbers of records and flags differ");
  return to_capsule<RowStore>(std::make_shared<MemoryRowStore>(records.data(), is_written.data(), int64_t(records.shape(0)),
                                                  records.shape(1)),
                       kBackingStore);
}

nb::capsule open_row_cache(Slots rows, int64_t num_slots, int64_t num_ghosts, const std::vector<int64_t>& half_lives,
                      nb::capsule backing_store, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& fields) {
  const auto side = held<RowStore>(backing_store, kBackingStore);
  if (num_slots < 1 || num_slots > int64_t(rows.shape(0)) || num_ghosts < 1 || half_lives.empty())
    throw_invalid_argument("open_row_cache: ", num_slots, " slots of ", rows.shape(0), ", ", num_ghosts, " ghost scores; both must be at least 1");
  std::vector<Field> moved;
  size_t at = 0;
  for (const auto& [near, bytes, rows_of] : fields) {
    if (near == 0 || bytes < 1 || rows_of != int64_t(rows.shape(0))) throw_invalid_argument("open_row_cache: a value does not have one row per slot");
    moved.push_back({reinterpret_cast<uint8_t*>(near), size_t(bytes), at});
    at += size_t(bytes);
  }
  if (!moved.empty() && at != side->record_bytes())
    throw_invalid_argument("open_row_cache: a row has ", at, " bytes in the cache, but ", side->record_bytes(), " in the backing store");
  EvictionPolicy policy(num_slots, num_ghosts, half_lives);
  return to_capsule(std::make_shared<RowCache>(num_slots, int64_t(rows.shape(0)) - num_slots, std::move(policy), rows.data(),
                                         side, std::move(moved)),
              kCache);
}

// Release the pins of a batch, and remove rows that were being read.
void release_all(PinnedBatch& batch) {
  for (CachePins& one : batch.pinned) {
    if (one.reading != nullptr) one.reading->wait();
    one.cache->drop_missing(one);
    one.cache->release(one, batch.is_read_only);
  }
}

// Pin ids segment by segment: ids bounds[s]..bounds[s + 1] - 1 belong to caches[cache_indices[s]]. Returns the batch, or
// the reason why nothing is pinned. The reason is (cache, rows, missing rows, slots that others need) if there are not
// enough slots, else (cache, failure).
std::tuple<std::optional<nb::capsule>, FailureFields> pin_rows(const std::vector<nb::capsule>& caches, Rows rows,
                                                        const std::vector<int64_t>& bounds,
                                                        const std::vector<int64_t>& cache_indices, Slots slots, bool read_only,
                                                        int num_threads) {
  if (bounds.size() != cache_indices.size() + 1 || slots.shape(0) != rows.shape(0)) throw_invalid_argument("pin_rows: the sizes of the arrays differ");
  check_bounds("bounds", bounds.data(), int64_t(bounds.size()), int64_t(rows.shape(0)));
  auto batch = std::make_shared<PinnedBatch>();
  batch->is_read_only = read_only;
  batch->pinned.resize(caches.size());
  for (size_t c = 0; c < caches.size(); ++c) {
    batch->pinned[c].cache = held<RowCache>(caches[c], kCache);
    for (size_t other = 0; other < c; ++other)
      if (batch->pinned[other].cache == batch->pinned[c].cache) throw_invalid_argument("pin_rows: cache ", c, " is given twice");
  }
  std::vector<std::pair<PinSegment, const RowCache*>> pieces;
  for (size_t s = 0; s < cache_indices.size(); ++s) {
    if (cache_indices[s] < 0 || cache_indices[s] >= int64_t(caches.size())) throw_invalid_argument("pin_rows: there is no cache ", cache_indices[s]);
    CachePins& one = batch->pinned[size_t(cache_indices[s])];
    const PinSegment segment{rows.data() + bounds[s], slots.data() + bounds[s], bounds[s + 1] - bounds[s]};
    one.segments.push_back(segment);
    for (int64_t first = 0; first < segment.count; first += kPiece)
      pieces.push_back({{segment.rows + first, segment.places + first, std::min(kPiece, segment.count - first)},
                        one.cache.get()});
  }
  const nb::gil_scoped_release unlocked;
  std::vector<std::unique_lock<std::mutex>> locks;  // In the order of the caches, which is the same for all callers.
  for (const CachePins& one : batch->pinned) locks.emplace_back(one.cache->mutex);
  FirstError outside;
  parallel_tasks(num_threads, int64_t(pieces.size()), [&](int64_t p) {
    const auto& [piece, cache] = pieces[size_t(p)];
    for (int64_t i = 0; i < piece.count; ++i)
      if (piece.rows[i] < 0 || piece.rows[i] >= cache->num_rows()) outside.note(piece.rows + i - rows.data());
    cache->find(piece.rows, piece.count, piece.places);
  });
  if (outside.at != FirstError::kNone) throw_invalid_argument("rows[", outside.at.load(), "] is ", rows.data()[outside.at], ", which does not exist");
  const auto count = int64_t(batch->pinned.size());
  std::vector<uint8_t> fits(batch->pinned.size());
  parallel_tasks(num_threads, count, [&](int64_t c) {
    CachePins& one = batch->pinned[size_t(c)];
    fits[size_t(c)] = one.cache->begin(one, read_only);
  });
  for (size_t c = 0; c < fits.size(); ++c) {
    if (fits[c]) continue;
    const CachePins& one = batch->pinned[c];
    const auto num_missing = int64_t(one.missing.size()), num_rows = num_missing + int64_t(one.slots.size());
    const FailureFields why{int64_t(c), num_rows, num_missing, one.cache->num_pinned() - int64_t(one.slots.size())};
    for (CachePins& other : batch->pinned) other.cache->undo(other);
    return {std::nullopt, why};
  }
  std::vector<Failure> failures(batch->pinned.size());
  parallel_tasks(num_threads, count, [&](int64_t c) {
    CachePins& one = batch->pinned[size_t(c)];
    failures[size_t(c)] = one.cache->bring(one, read_only);
    one.segments.clear();
  });
  for (size_t c = 0; c < failures.size(); ++c)
    if (failures[c]) {
      release_all(*batch);
      return {std::nullopt, failure_fields(int64_t(c), failures[c])};
    }
  locks.clear();  // A thread with the interpreter lock may wait for one.
  const nb::gil_scoped_acquire interpreter;
  return {to_capsule(std::move(batch), kPinned), FailureFields{}};
}

// Wait for the rows of a batch, and copy them into their slots. Returns the first failure with its cache, or nothing, and
// (cache, rows, slots) of unwritten rows for each cache that has some.
std::tuple<FailureFields, std::vector<std::tuple<int64_t, Numbers, Numbers>>> wait_for_rows(nb::capsule pinned, int num_threads) {
  const auto batch = held<PinnedBatch>(pinned, kPinned);
  FailureFields failed;
  std::vector<std::vector<int64_t>> rows(batch->pinned.size()), slots(batch->pinned.size());
  {
    const nb::gil_scoped_release unlocked;
    std::vector<std::tuple<const CachePins*, int64_t, int64_t>> pieces;
    for (size_t c = 0; c < batch->pinned.size(); ++c) {
      CachePins& one = batch->pinned[c];
      if (one.is_complete || one.missing.empty()) continue;
      const Failure failure = one.reading == nullptr ? Failure{} : one.reading->wait();
      one.is_complete = true;
      if (failure) {
        const std::lock_guard locked(one.cache->mutex);
        one.cache->drop_missing(one);
        if (failed.empty()) failed = failure_fields(int64_t(c), failure);
        continue;
      }
      if (!one.cache->moves_values()) continue;
      for (int64_t first = 0; first < int64_t(one.missing.size()); first += kPutRows)
        pieces.emplace_back(&one, first, std::min(first + kPutRows, int64_t(one.missing.size())));
      for (size_t i = 0; i < one.missing.size(); ++i)
        if (!one.present[i]) {
          rows[c].push_back(one.missing[i]);
          slots[c].push_back(one.missing_slots()[i]);
        }
    }
    parallel_tasks(num_threads, int64_t(pieces.size()), [&](int64_t p) {
      const auto& [one, first, last] = pieces[size_t(p)];
      one->cache->put(*one, first, last);
    });
    for (CachePins& one : batch->pinned) {
      if (!one.is_complete || !one.cache->moves_values()) continue;
      one.reading.reset();
      one.records.reset();
    }
  }
  std::vector<std::tuple<int64_t, Numbers, Numbers>> absent;
  for (size_t c = 0; c < rows.size(); ++c)
    if (!rows[c].empty()) absent.emplace_back(int64_t(c), array_of(std::move(rows[c])), array_of(std::move(slots[c])));
  return {std::move(failed), std::move(absent)};
}

const CachePins& pinned_at(const PinnedBatch& batch, int64_t index) {
  if (index < 0 || index >= int64_t(batch.pinned.size())) throw_invalid_argument("there is no cache ", index);
  return batch.pinned[size_t(index)];
}

// For a cache without values, return rows and slots of evicted rows to write, rows and slots of fetched rows, their
// records, and whether each was written.
nb::tuple cache_moves(nb::capsule pinned, int64_t index) {
  const CachePins& one = pinned_at(*held<PinnedBatch>(pinned, kPinned), index);
  const size_t count = one.missing.size(), bytes = one.cache->far().record_bytes();
  const nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> records(one.records.get(), {count, bytes}, pinned);
  const nb::ndarray<nb::numpy, bool, nb::ndim<1>> present(one.present.get(), {count}, pinned);
  return nb::make_tuple(array_of(one.evicted_rows), array_of(one.evicted_slots), array_of(one.missing),
                        array_of({one.missing_slots(), one.missing_slots() + count}), records, present);
}

// Return the number of distinct rows that a batch has pinned in a cache, and how many of them were missing.
std::tuple<int64_t, int64_t> num_pinned_rows(nb::capsule pinned, int64_t index) {
  const CachePins& one = pinned_at(*held<PinnedBatch>(pinned, kPinned), index);
  return {int64_t(one.slots.size()), int64_t(one.missing.size())};
}

void unpin_rows(nb::capsule pinned) {
  const auto batch = held<PinnedBatch>(pinned, kPinned);
  const nb::gil_scoped_release unlocked;
  for (CachePins& one : batch->pinned) {
    const std::lock_guard locked(one.cache->mutex);
    one.cache->release(one, batch->is_read_only);
  }
}

void find_in_cache(nb::capsule cache, Rows rows, Slots slots, int num_threads) {
  if (rows.shape(0) != slots.shape(0)) throw_invalid_argument("the numbers of rows and slots differ");
  const auto one = held<RowCache>(cache, kCache);
  const nb::gil_scoped_release unlocked;
  one->find(rows.data(), int64_t(rows.shape(0)), slots.data(), num_threads);
}

Numbers dirty_slots(nb::capsule cache) {
  const auto one = held<RowCache>(cache, kCache);
  const std::lock_guard locked(one->mutex);
  return array_of(one->dirty());
}

void check_slots(const RowCache& cache, const Rows& slots) {
  for (size_t i = 0; i < slots.shape(0); ++i)
    if (slots.data()[i] < 0 || slots.data()[i] >= cache.num_slots())
      throw_invalid_argument("slot ", slots.data()[i], " is outside 0..", cache.num_slots() - 1);
}

FailureFields write_back(nb::capsule cache, Rows slots) {
  const auto one = held<RowCache>(cache, kCache);
  check_slots(*one, slots);
  const nb::gil_scoped_release unlocked;
  const std::lock_guard locked(one->mutex);
  if (!one->moves_values()) throw_invalid_argument("write_back: this cache has no values; write its rows in the caller");
  return failure_fields(0, one->write_back(slots.data(), int64_t(slots.shape(0))));
}

void clean_slots(nb::capsule cache, Rows slots) {
  const auto one = held<RowCache>(cache, kCache);
  check_slots(*one, slots);
  const std::lock_guard locked(one->mutex);
  one->clean(slots.data(), int64_t(slots.shape(0)));
}

FailureFields cache_numbers(nb::capsule cache) {
  const auto one = held<RowCache>(cache, kCache);
  const std::lock_guard locked(one->mutex);
  const CacheCounters& c = one->counters;
  return {int64_t(one->num_bytes()), one->num_pinned(), c.num_lookups, c.num_rows, c.num_misses, c.num_written_back, c.num_read_only};
}

}  // namespace

void bind_row_cache(nb::module_& m) {
  m.def("file_backing_store", &file_backing_store, nb::arg("log"));
  m.def("memory_backing_store", &memory_backing_store, nb::arg("records"), nb::arg("is_written"));
  m.def("open_row_cache", &open_row_cache, nb::arg("rows"), nb::arg("num_slots"), nb::arg("num_ghosts"), nb::arg("half_lives"),
        nb::arg("backing_store"), nb::arg("fields"));
  m.def("pin_rows", &pin_rows, nb::arg("caches"), nb::arg("rows"), nb::arg("bounds"), nb::arg("cache_indices"), nb::arg("slots"),
        nb::arg("read_only"), nb::arg("num_threads"));
  m.def("wait_for_rows", &wait_for_rows, nb::arg("pinned"), nb::arg("num_threads"));
  m.def("cache_moves", &cache_moves, nb::arg("pinned"), nb::arg("index"));
  m.def("num_pinned_rows", &num_pinned_rows, nb::arg("pinned"), nb::arg("index"));
  m.def("unpin_rows", &unpin_rows, nb::arg("pinned"));
  m.def("find_in_cache", &find_in_cache, nb::arg("cache"), nb::arg("rows"), nb::arg("slots"), nb::arg("num_threads"));
  m.def("dirty_slots", &dirty_slots, nb::arg("cache"));
  m.def("write_back_slots", &write_back, nb::arg("cache"), nb::arg("slots"));
  m.def("clean_slots", &clean_slots, nb::arg("cache"), nb::arg("slots"));
  m.def("row_cache_numbers", &cache_numbers, nb::arg("cache"));
}
