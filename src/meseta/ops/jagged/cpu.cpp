// Permutation of the keys of jagged tensors, and conversion of lengths to offsets.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/checks.h"
#include "ops/parallel.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

constexpr int64_t kPieceBytes = 1 << 18;

struct Copy {
  const char* from;
  char* to;
  int64_t bytes;
};

// Permute keys. `arrays` has (address, element size, elements, address of the output) of each array. `bounds` has the
// start of each key and the end of the last one, for each array. `order` has the keys of the output.
void permute_keys(const std::vector<int64_t>& arrays, const std::vector<int64_t>& bounds,
                  const std::vector<int64_t>& order, int num_threads) {
  nb::gil_scoped_release unlocked;
  const size_t num_arrays = arrays.size() / 4, step = num_arrays ? bounds.size() / num_arrays : 0;
  std::vector<Copy> copies;
  int64_t total = 0;
  for (size_t a = 0; a < num_arrays; ++a) {
    const int64_t *const own = bounds.data() + a * step, item = arrays[4 * a + 1];
    check_bounds("bounds", own, int64_t(step), arrays[4 * a + 2]);
    char* to = reinterpret_cast<char*>(arrays[4 * a + 3]);
    for (const int64_t key : order) {
      if (key < 0 || key + 1 >= int64_t(step)) throw_invalid_argument("key ", key, " is outside 0..", int64_t(step) - 2);
      const char* from = reinterpret_cast<const char*>(arrays[4 * a]) + own[key] * item;
      const int64_t bytes = (own[key + 1] - own[key]) * item;
      for (int64_t at = 0; at < bytes; at += kPieceBytes)
        copies.push_back({from + at, to + at, std::min(kPieceBytes, bytes - at)});
      to += bytes;
      total += bytes;
    }
  }
  parallel_tasks(total < kPieceBytes ? 1 : num_threads, int64_t(copies.size()), [&](int64_t i) {
    std::memcpy(copies[size_t(i)].to, copies[size_t(i)].from, size_t(copies[size_t(i)].bytes));
  });
}

// Sum the share of each thread from left to right, and then add the start of each share.
template <typename Length>
void prefix_sum(const Length* lengths, int64_t count, int64_t* offsets, int num_threads) {
  const int64_t threads = std::clamp<int64_t>(count / 16384, 1, std::max(num_threads, 1));
  std::vector<int64_t> starts(size_t(threads) + 1, 0);
  std::vector<int64_t> wrong(size_t(threads), -1);
  // With lengths up to this limit, no sum overflows.
  const uint64_t limit = uint64_t(std::numeric_limits<int64_t>::max()) / uint64_t(std::max<int64_t>(count, 1));
  const auto first_of = [=](int64_t thread) { return count * thread / threads; };
  parallel(int(threads), [&](int thread) {
    int64_t sum = 0;
    bool good = true;
    const int64_t first = first_of(thread), last = first_of(thread + 1);
    for (int64_t i = first; i < last; ++i) {
      good &= uint64_t(int64_t(lengths[i])) <= limit;
      sum = int64_t(uint64_t(sum) + uint64_t(lengths[i]));
    }
    starts[size_t(thread) + 1] = sum;
    const auto beyond = [=](Length length) { return uint64_t(int64_t(length)) > limit; };
    if (!good) wrong[size_t(thread)] = std::find_if(lengths + first, lengths + last, beyond) - lengths;
  });
  for (int64_t at : wrong)
    if (at >= 0) throw_invalid_argument("lengths[", at, "] is ", lengths[at], "; ", count, " lengths must be in 0..", limit);
  for (size_t t = 0; t < size_t(threads); ++t) starts[t + 1] = int64_t(uint64_t(starts[t + 1]) + uint64_t(starts[t]));
  offsets[0] = 0;
  parallel(int(threads), [&](int thread) {
    uint64_t sum = uint64_t(starts[size_t(thread)]);
    const int64_t last = first_of(thread + 1);
    for (int64_t i = first_of(thread); i < last; ++i) {
      sum += uint64_t(lengths[i]);
      offsets[i + 1] = int64_t(sum);
    }
  });
}

void lengths_to_offsets(uintptr_t lengths, int64_t count, bool wide, uintptr_t offsets, int num_threads) {
  nb::gil_scoped_release unlocked;
  auto* out = reinterpret_cast<int64_t*>(offsets);
  wide ? prefix_sum(reinterpret_cast<const int64_t*>(lengths), count, out, num_threads)
       : prefix_sum(reinterpret_cast<const int32_t*>(lengths), count, out, num_threads);
}

}  // namespace

void bind_jagged(nb::module_& m) {
  m.def("permute_keys", &permute_keys, nb::arg("arrays"), nb::arg("bounds"), nb::arg("order"), nb::arg("num_threads"));
  m.def("lengths_to_offsets", &lengths_to_offsets, nb::arg("lengths"), nb::arg("count"), nb::arg("wide"),
        nb::arg("offsets"), nb::arg("num_threads"));
}
