// Grouping of the ids of several features by the owners of their rows. One pass counts, and a second one places.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/mix.h"
#include "ops/parallel.h"
#include "ops/scratch.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

constexpr int64_t kPiece = 16384;  // Number of ids per piece. Several threads handle the pieces of a feature.

// Owners of the rows of a table: contiguous ranges, or hash classes if `cuts` is null.
struct Owners {
  const int64_t* cuts;
  int64_t count;
  bool hashed;
  int64_t first_row;  // First row in the output lengths.
};

struct Piece {
  size_t feature;
  int64_t first_bag, last_bag;  // Bags of the feature.
  int64_t first, last;          // Ids.
  size_t counts;                // Position of the piece among the counts per (piece, owner).
};

struct Batch {
  const void* ids;
  void* local;
  const void* lengths;
  void* counts;  // Number of ids per (owner, bag).
  int64_t* order;
  uint32_t* owner;  // Owner of each id. The first pass stores it for the second one.
  int64_t num_bags;  // Bags per feature.
};

// Return the owner of an id, or -1 if it has none. The id becomes local to its owner.
inline int64_t find_owner(const Owners& owners, int64_t& id) {
  if (owners.hashed) {
    if (id < 0) return -1;
    const uint64_t n = uint64_t(owners.count), block = uint64_t(id) / n, place = uint64_t(id) - block * n;
    id = int64_t(block);
    const uint64_t owner = place + reduce(splitmix64(block), n);
    return int64_t(owner < n ? owner : owner - n);
  }
  if (id < owners.cuts[0] || id >= owners.cuts[owners.count]) return -1;
  int64_t owner = 0;
  if (owners.count <= 16) {
    for (int64_t n = 1; n < owners.count; ++n) owner += id >= owners.cuts[n];
  } else {
    owner = std::upper_bound(owners.cuts + 1, owners.cuts + owners.count, id) - owners.cuts - 1;
  }
  id -= owners.cuts[owner];
  return owner;
}

template <typename Id, typename Length>
void count_piece(const Owners& owners, const Batch& batch, const Piece& piece, int64_t* totals, FirstError& mistake) {
  const Id* ids = static_cast<const Id*>(batch.ids);
  const Length* lengths = static_cast<const Length*>(batch.lengths) + int64_t(piece.feature) * batch.num_bags;
  Length* out = static_cast<Length*>(batch.counts) + owners.first_row * batch.num_bags;
  // Count in local memory, because other threads count in the same cache lines.
  std::vector<int64_t> total(size_t(owners.count) + 8, 0);
  int64_t at = piece.first;
  for (int64_t n = 0; n < owners.count; ++n)
    std::fill(out + n * batch.num_bags + piece.first_bag, out + n * batch.num_bags + piece.last_bag, Length{0});
  for (int64_t bag = piece.first_bag; bag < piece.last_bag; ++bag) {
    for (const int64_t stop = at + int64_t(lengths[bag]); at < stop; ++at) {
      int64_t id = ids[at];
      const int64_t owner = find_owner(owners, id);
      if (owner < 0) {
        mistake.note(at);
        continue;
      }
      batch.owner[at] = uint32_t(owner);
      ++total[size_t(owner)];
      ++out[owner * batch.num_bags + bag];
    }
  }
  std::copy_n(total.begin(), owners.count, totals);
}

template <typename Id>
void place_piece(const Owners& owners, const Batch& batch, const Piece& piece, const int64_t* ends) {
  const Id* ids = static_cast<const Id*>(batch.ids);
  std::vector<int64_t> end(ends, ends + owners.count);
  end.resize(end.size() + 8);
  Id* const local = static_cast<Id*>(batch.local);
  int64_t* const order = batch.order;
  const uint32_t* const owner = batch.owner;
  for (int64_t at = piece.first; at < piece.last; ++at) {
    const int64_t to = end[owner[at]]++;
    local[to] = owners.hashed ? Id(uint64_t(int64_t(ids[at])) / uint64_t(owners.count))
                              : Id(ids[at] - owners.cuts[owner[at]]);
    order[to] = at;
  }
}

// Divide the batch into pieces of whole bags with about kPiece ids each, and check the lengths.
template <typename Length>
std::vector<Piece> cut(const std::vector<Owners>& owners, const Batch& batch, int64_t num_ids) {
  const Length* lengths = static_cast<const Length*>(batch.lengths);
  std::vector<Piece> pieces;
  int64_t at = 0;
  size_t counts = 0;
  for (size_t f = 0; f < owners.size(); ++f) {
    Piece piece{f, 0, 0, at, at, counts};
    for (int64_t bag = 0; bag < batch.num_bags; ++bag) {
      const int64_t length = int64_t(lengths[int64_t(f) * batch.num_bags + bag]);
      if (length < 0 || length > num_ids - at)
        throw_invalid_argument("lengths[", int64_t(f) * batch.num_bags + bag, "] is ", length,
               "; lengths must not be negative and must add up to ", num_ids, ", the number of ids");
      at += length;
      if (at - piece.first >= kPiece || bag + 1 == batch.num_bags) {
        piece.last_bag = bag + 1;
        piece.last = at;
        pieces.push_back(piece);
        counts += size_t(owners[f].count);
        piece = {f, bag + 1, bag + 1, at, at, counts};
      }
    }
  }
  if (at != num_ids) throw_invalid_argument("the lengths add up to ", at, ", but there are ", num_ids, " ids");
  return pieces;
}

template <typename Id, typename Length>
void run(const std::vector<Owners>& owners, const Batch& batch, int64_t num_ids, int64_t* totals, int num_threads) {
  const std::vector<Piece> pieces = cut<Length>(owners, batch, num_ids);
  std::vector<int64_t> ends(pieces.empty() ? 0 : pieces.back().counts + size_t(owners[pieces.back().feature].count), 0);
  const int threads = num_ids <= kPiece ? 1 : num_threads;
  FirstError mistake;
  parallel_tasks(threads, int64_t(pieces.size()), [&](int64_t p) {
    const Piece& piece = pieces[size_t(p)];
    count_piece<Id, Length>(owners[piece.feature], batch, piece, ends.data() + piece.counts, mistake);
  });
  const int64_t wrong = mistake.at.load();
  if (wrong != FirstError::kNone) {
    const auto found = std::find_if(pieces.begin(), pieces.end(), [&](const Piece& p) { return wrong < p.last; });
    const Owners& own = owners[found->feature];
    throw_invalid_argument("id ", static_cast<const Id*>(batch.ids)[wrong], " of feature ", found->feature, ", at position ", wrong,
           ", is outside ", own.hashed ? "0 and above" : "the rows " + std::to_string(own.cuts[0]) + ".." +
                                                             std::to_string(own.cuts[own.count] - 1));
  }
  int64_t at = 0;
  for (size_t first = 0, last; first < pieces.size(); first = last) {
    for (last = first; last < pieces.size() && pieces[last].feature == pieces[first].feature;) ++last;
    const Owners& own = owners[pieces[first].feature];
    for (int64_t n = 0; n < own.count; ++n) {
      const int64_t start = at;
      for (size_t p = first; p < last; ++p) at += std::exchange(ends[pieces[p].counts + size_t(n)], at);
      totals[own.first_row + n] = at - start;
    }
  }
  parallel_tasks(threads, int64_t(pieces.size()), [&](int64_t p) {
    const Piece& piece = pieces[size_t(p)];
    place_piece<Id>(owners[piece.feature], batch, piece, ends.data() + piece.counts);
  });
}

std::vector<Owners> read_owners(const std::vector<int64_t>& cuts, const std::vector<int64_t>& sizes) {
  std::vector<Owners> owners;
  int64_t row = 0;
  size_t at = 0;
  for (size_t f = 0; f < sizes.size(); ++f) {
    if (sizes[f] < 1 || size_t(sizes[f]) > cuts.size() - at)
      throw_invalid_argument("sizes[", f, "] is ", sizes[f], ", but must be at least 1, and all must add up to ", cuts.size());
    const int64_t* own = cuts.data() + at;
    at += size_t(sizes[f]);
    const bool hashed = sizes[f] == 1;
    if (hashed && (own[0] < 1 || own[0] > std::numeric_limits<int32_t>::max()))
      throw_invalid_argument("feature ", f, " has ", own[0], " owners, but needs 1..2^31-1");
    if (own[0] < 0) throw_invalid_argument("the cuts of feature ", f, " start at ", own[0], "; start at row 0 or later");
    for (int64_t n = 1; n < sizes[f]; ++n)
      if (own[n] < own[n - 1]) throw_invalid_argument("the cuts of feature ", f, " decrease from ", own[n - 1], " to ", own[n]);
    const int64_t count = hashed ? own[0] : sizes[f] - 1;
    owners.push_back({own, count, hashed, row});
    row += count;
  }
  return owners;
}

// Bucketize ids. `cuts` has sizes[f] numbers for each feature: the first rows of its ranges and its number of rows, or only
// its number of hash classes. `inputs` is (address of ids, address of lengths, ids, bags per feature, whether ids are
// int64, whether lengths are int64). `outputs` has the addresses of local ids, lengths per (owner, bag), order, ids per
// owner.
void bucketize(const std::vector<int64_t>& cuts, const std::vector<int64_t>& sizes, std::array<int64_t, 6> inputs,
               std::array<int64_t, 4> outputs, int num_threads) {
  nb::gil_scoped_release unlocked;
  const std::vector<Owners> owners = read_owners(cuts, sizes);
  const Batch batch{reinterpret_cast<const void*>(inputs[0]), reinterpret_cast<void*>(outputs[0]),
                    reinterpret_cast<const void*>(inputs[1]), reinterpret_cast<void*>(outputs[1]),
                    reinterpret_cast<int64_t*>(outputs[2]),   scratch<uint32_t>(size_t(inputs[2])), inputs[3]};
  int64_t* totals = reinterpret_cast<int64_t*>(outputs[3]);
  const auto call = [&](auto id, auto length) {
    run<decltype(id), decltype(length)>(owners, batch, inputs[2], totals, num_threads);
  };
  if (inputs[4] && inputs[5]) return call(int64_t{}, int64_t{});
  if (inputs[4]) return call(int64_t{}, int32_t{});
  if (inputs[5]) return call(int32_t{}, int64_t{});
  call(int32_t{}, int32_t{});
}

}  // namespace

void bind_bucketize(nb::module_& m) {
  m.def("bucketize", &bucketize, nb::arg("cuts"), nb::arg("sizes"), nb::arg("inputs"), nb::arg("outputs"),
        nb::arg("num_threads"));
}
