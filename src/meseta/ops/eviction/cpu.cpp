// Which rows leave a cache, by how often and how recently they were asked for; reference.py says the same slowly.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <stdexcept>

namespace nb = nanobind;

namespace {

using Scores = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pins = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int kSteps = 8;          // of a score, to twice as much
constexpr int64_t kLeast = 64;     // slots that are looked at

// By how much the larger of two scores that differ by d rises when they are added up.
const std::array<uint8_t, 64>& rises() {
  static const auto table = [] {
    std::array<uint8_t, 64> rise{};
    for (size_t d = 0; d < rise.size(); ++d)
      rise[d] = uint8_t(std::lround(kSteps * std::log2(1 + std::exp2(-double(d) / kSteps))));
    return rise;
  }();
  return table;
}

void check_slots(const int64_t* slots, size_t count, size_t limit) {
  for (size_t i = 0; i < count; ++i)
    if (slots[i] < 0 || size_t(slots[i]) >= limit) throw std::invalid_argument("a slot is outside");
}

// The slots are asked for once more: `now` is what one request counts.
void touch(Scores scores, Numbers slots, int now) {
  nb::gil_scoped_release unlocked;
  const size_t count = slots.shape(0);
  uint8_t* const score = scores.data();
  const int64_t* const slot = slots.data();
  check_slots(slot, count, scores.shape(0));
  const auto& rise = rises();
  for (size_t i = 0; i < count; ++i) {
    const int old = score[slot[i]];
    const size_t distance = size_t(std::abs(old - now));
    score[slot[i]] = uint8_t(std::min(255, std::max(old, now) + (distance < rise.size() ? rise[distance] : 0)));
  }
}

// Rows come into slots, with the scores that were kept of them.
void admit(Scores scores, Scores kept, Numbers slots, Numbers rows) {
  nb::gil_scoped_release unlocked;
  const size_t count = slots.shape(0);
  if (rows.shape(0) != count || kept.shape(0) == 0) throw std::invalid_argument("give one row for each slot");
  check_slots(slots.data(), count, scores.shape(0));
  for (size_t i = 0; i < count; ++i)
    scores.data()[slots.data()[i]] = kept.data()[uint64_t(rows.data()[i]) % kept.shape(0)];
}

// Half as much counts what was before, `halvings` times.
void age(Scores scores, Scores kept, int halvings) {
  nb::gil_scoped_release unlocked;
  const int less = std::clamp(halvings, 0, 32) * kSteps;
  for (const Scores* all : {&scores, &kept}) {
    uint8_t* const score = all->data();
    const size_t count = all->shape(0);
    for (size_t i = 0; i < count; ++i) score[i] = uint8_t(std::max(int(score[i]) - less, 0));
  }
}

// Choose `out` slots of `rows` without a pin: those of least score, the first ones where scores are equal, among the
// `window` times as many that follow `hand`, or more where few of these may leave. Their scores are kept. Returns where
// the hand is then; -1, with nothing chosen, where too few may leave.
int64_t evict(Scores scores, Scores kept, Numbers rows, Pins pins, Slots out, int64_t hand, int64_t window) {
  nb::gil_scoped_release unlocked;
  const int64_t num_slots = int64_t(scores.shape(0)), count = int64_t(out.shape(0));
  if (int64_t(rows.shape(0)) < num_slots || int64_t(pins.shape(0)) < num_slots || kept.shape(0) == 0 || window < 1 ||
      hand < 0 || hand >= std::max<int64_t>(num_slots, 1))
    throw std::invalid_argument("the arrays of slots do not fit together");
  if (count == 0) return hand;
  if (count > num_slots) return -1;
  const auto after = [&](int64_t place) { return hand + place < num_slots ? hand + place : hand + place - num_slots; };
  std::array<int64_t, 256> numbers{};
  int64_t candidates = 0, seen = 0;
  const int64_t least = std::min(std::max(count * window, kLeast), num_slots);
  for (; seen < num_slots && (seen < least || candidates < count); ++seen) {
    const int64_t slot = after(seen);
    if (pins.data()[slot] != 0) continue;
    ++numbers[scores.data()[slot]];
    ++candidates;
  }
  if (candidates < count) return -1;
  int highest = 0;
  int64_t below = 0;  // candidates of less score than `highest`
  while (below + numbers[size_t(highest)] < count) below += numbers[size_t(highest++)];
  int64_t equal = count - below, chosen = 0;
  for (int64_t place = 0; place < seen && chosen < count; ++place) {
    const int64_t slot = after(place);
    const int score = scores.data()[slot];
    if (pins.data()[slot] != 0 || score > highest || (score == highest && equal-- <= 0)) continue;
    out.data()[chosen++] = slot;
    if (rows.data()[slot] >= 0) kept.data()[uint64_t(rows.data()[slot]) % kept.shape(0)] = uint8_t(score);
  }
  return seen == num_slots ? hand : after(seen);
}

}  // namespace

void bind_eviction(nb::module_& m) {
  m.def("eviction_touch", &touch, nb::arg("scores"), nb::arg("slots"), nb::arg("now"));
  m.def("eviction_admit", &admit, nb::arg("scores"), nb::arg("kept"), nb::arg("slots"), nb::arg("rows"));
  m.def("eviction_age", &age, nb::arg("scores"), nb::arg("kept"), nb::arg("halvings"));
  m.def("eviction_choose", &evict, nb::arg("scores"), nb::arg("kept"), nb::arg("rows"), nb::arg("pins"), nb::arg("out"),
        nb::arg("hand"), nb::arg("window"));
}
