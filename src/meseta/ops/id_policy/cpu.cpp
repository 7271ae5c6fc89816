// Id policies. Out-of-range ids are counted at memory speed, and ids are rewritten only if there are any.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/checks.h"
#include "ops/mix.h"
#include "ops/parallel.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

constexpr int64_t kPiece = 32768;  // Number of ids that one thread counts at a time.

struct Piece {
  size_t feature;
  int64_t first, last;
};

template <typename Id>
int64_t count_piece(const Id* ids, int64_t count, int64_t num_rows) {
  int64_t outside = 0;
  if constexpr (sizeof(Id) == 4) {
    if (num_rows > std::numeric_limits<int32_t>::max()) {
      for (int64_t i = 0; i < count; ++i) outside += ids[i] < 0;
      return outside;
    }
    const uint32_t limit = uint32_t(num_rows);
    for (int64_t i = 0; i < count; ++i) outside += uint32_t(ids[i]) >= limit;
  } else {
    const uint64_t limit = uint64_t(num_rows);
    for (int64_t i = 0; i < count; ++i) outside += uint64_t(ids[i]) >= limit;
  }
  return outside;
}

template <typename Id>
void count_all(const Id* ids, const std::vector<Piece>& pieces, const std::vector<int64_t>& num_rows, int64_t* counts,
               int num_threads) {
  std::vector<int64_t> found(pieces.size());
  parallel_tasks(num_threads, int64_t(pieces.size()), [&](int64_t p) {
    const Piece& piece = pieces[size_t(p)];
    found[size_t(p)] = count_piece(ids + piece.first, piece.last - piece.first, num_rows[piece.feature]);
  });
  for (size_t p = 0; p < pieces.size(); ++p) counts[pieces[p].feature] += found[p];
}

void check_features(const std::vector<int64_t>& bounds, const std::vector<int64_t>& num_rows, int64_t num_ids) {
  if (bounds.size() != num_rows.size() + 1)
    throw_invalid_argument(bounds.size(), " bounds for ", num_rows.size(), " features; pass F + 1 bounds");
  check_bounds("bounds", bounds.data(), int64_t(bounds.size()), num_ids);
  for (size_t f = 0; f < num_rows.size(); ++f)
    if (num_rows[f] < 0) throw_invalid_argument("num_rows[", f, "] is ", num_rows[f], ", but must not be negative");
}

// Count ids outside 0..num_rows[f]-1 among ids bounds[f]..bounds[f + 1]-1 of each feature f. The caller zeroes `counts` [F].
void count_outside(uintptr_t ids, int64_t num_ids, bool wide, const std::vector<int64_t>& bounds,
                   const std::vector<int64_t>& num_rows, uintptr_t counts, int num_threads) {
  nb::gil_scoped_release unlocked;
  check_features(bounds, num_rows, num_ids);
  std::vector<Piece> pieces;
  for (size_t f = 0; f < num_rows.size(); ++f)
    for (int64_t first = bounds[f]; first < bounds[f + 1]; first += kPiece)
      pieces.push_back({f, first, std::min(first + kPiece, bounds[f + 1])});
  const int threads = num_ids <= kPiece ? 1 : num_threads;
  int64_t* out = reinterpret_cast<int64_t*>(counts);
  wide ? count_all(reinterpret_cast<const int64_t*>(ids), pieces, num_rows, out, threads)
       : count_all(reinterpret_cast<const int32_t*>(ids), pieces, num_rows, out, threads);
}

enum Policy : int64_t { kError, kDrop, kClamp, kHash };

struct FixedIds {
  int64_t* ids;      // [nnz].
  int64_t* lengths;  // [bags].
  int64_t* kept;     // [nnz]: original position of each id.
  int64_t* first_error;  // [3].
};

template <typename Id>
int64_t fix_all(const Id* ids, const std::vector<int64_t>& first_bags, const std::vector<int64_t>& num_rows,
                const std::vector<int64_t>& policies, const FixedIds& out, const int64_t* lengths) {
  int64_t at = 0, kept = 0;
  for (size_t f = 0; f < num_rows.size(); ++f) {
    const int64_t rows = num_rows[f];
    for (int64_t bag = first_bags[f]; bag < first_bags[f + 1]; ++bag) {
      const int64_t before = kept;
      for (const int64_t stop = at + lengths[bag]; at < stop; ++at) {
        int64_t id = ids[at];
        if (id < 0 || id >= rows) {
          if (policies[f] == kDrop) continue;
          if (policies[f] == kError && out.first_error[0] < 0) {
            out.first_error[0] = int64_t(f);
            out.first_error[1] = bag - first_bags[f];
            out.first_error[2] = id;
          }
          id = policies[f] == kClamp  ? (id < 0 ? 0 : rows - 1)
               : policies[f] == kHash ? int64_t(splitmix64(uint64_t(id)) & (~uint64_t{0} >> 1)) % rows
                                      : 0;
        }
        out.ids[kept] = id;
        out.kept[kept++] = at;
      }
      out.lengths[bag] = kept - before;
    }
  }
  return kept;
}

// Apply the policies (0 error, 1 drop, 2 clamp, 3 hash). Returns the number of remaining ids.
int64_t fix_ids(uintptr_t ids, int64_t num_ids, bool wide, uintptr_t lengths, const std::vector<int64_t>& first_bags,
                const std::vector<int64_t>& num_rows, const std::vector<int64_t>& policies,
                const std::vector<uintptr_t>& outputs) {
  nb::gil_scoped_release unlocked;
  if (first_bags.size() != num_rows.size() + 1 || policies.size() != num_rows.size() || outputs.size() != 4)
    throw_invalid_argument(num_rows.size(), " features, but ", first_bags.size(), " first bags and ", policies.size(), " policies");
  check_bounds("first_bags", first_bags.data(), int64_t(first_bags.size()), std::numeric_limits<int64_t>::max());
  const auto* length = reinterpret_cast<const int64_t*>(lengths);
  int64_t total = 0;
  for (int64_t bag = 0; bag < first_bags.back(); ++bag) {
    if (length[bag] < 0 || length[bag] > num_ids - total)
      throw_invalid_argument("lengths[", bag, "] is ", length[bag], "; lengths must not be negative and must add up to ", num_ids);
    total += length[bag];
  }
  if (total != num_ids || first_bags.front() != 0)
    throw_invalid_argument("the lengths of bags from ", first_bags.front(), " on add up to ", total, ", but there are ", num_ids, " ids");
  for (const int64_t policy : policies)
    if (policy < kError || policy > kHash) throw_invalid_argument("policy ", policy, " is outside 0..3");
  for (size_t f = 0; f < num_rows.size(); ++f)
    if (num_rows[f] < 1) throw_invalid_argument("num_rows[", f, "] is ", num_rows[f], "; out-of-range ids need a table with rows");
  const auto out = [&](int i) { return reinterpret_cast<int64_t*>(outputs[size_t(i)]); };
  const FixedIds fixed{out(0), out(1), out(2), out(3)};
  return wide ? fix_all(reinterpret_cast<const int64_t*>(ids), first_bags, num_rows, policies, fixed, length)
              : fix_all(reinterpret_cast<const int32_t*>(ids), first_bags, num_rows, policies, fixed, length);
}

}  // namespace

void bind_id_policy(nb::module_& m) {
  m.def("count_outside", &count_outside, nb::arg("ids"), nb::arg("num_ids"), nb::arg("wide"), nb::arg("bounds"),
        nb::arg("num_rows"), nb::arg("counts"), nb::arg("num_threads"));
  m.def("fix_ids", &fix_ids, nb::arg("ids"), nb::arg("num_ids"), nb::arg("wide"), nb::arg("lengths"),
        nb::arg("first_bags"), nb::arg("num_rows"), nb::arg("policies"), nb::arg("outputs"));
}
