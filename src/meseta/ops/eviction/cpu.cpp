// Which rows leave a cache, by how often and how recently they were asked for; reference.py says the same slowly.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/checks.h"
#include "ops/eviction/score_table.h"
#include "ops/eviction/trial.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pins = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class Policy {
 public:
  // `half_lives`, of which the first is used until trials have told another, are in lookups.
  Policy(int64_t num_slots, int64_t num_kept, const std::vector<int64_t>& half_lives)
      : table_(num_slots, num_kept, half_lives.at(0)), half_life_(half_lives.at(0)) {
    if (half_lives.size() < 2 || num_slots < kLeastSlots) return;
    shrink_ = std::min(int(std::bit_width(uint64_t(num_slots / kTrialSlots))) - 1, kMostShrink);
    for (const int64_t half_life : half_lives) trials_.emplace_back(num_slots, num_kept, shrink_, half_life);
  }

  int64_t half_life() const { return half_life_; }
  size_t num_bytes() const {
    size_t bytes = table_.num_bytes();
    for (const Trial& trial : trials_) bytes += trial.num_bytes();
    return bytes;
  }

  void touch(const Numbers& slots, const Numbers& rows, int64_t num_lookups) {
    check(slots, rows);
    for (size_t i = 0; i < slots.shape(0); ++i) table_.touch(slots.data()[i]);
    table_.pass(num_lookups);
    if (trials_.empty()) return;
    for (size_t i = 0; i < rows.shape(0); ++i) {
      const uint64_t word = Trial::sample_word(rows.data()[i]);
      if (word >> (64 - shrink_) != 0) continue;
      for (Trial& trial : trials_) trial.ask(rows.data()[i], word);
    }
    for (Trial& trial : trials_) trial.pass(num_lookups);
    review(num_lookups);
  }

  void admit(const Numbers& slots, const Numbers& rows) {
    check(slots, rows);
    for (size_t i = 0; i < slots.shape(0); ++i) table_.admit(slots.data()[i], rows.data()[i]);
  }

  bool choose(const Numbers& rows, const Pins& pins, const Slots& out) {
    if (int64_t(rows.shape(0)) != table_.num_slots() || rows.shape(0) != pins.shape(0))
      refuse("there are ", table_.num_slots(), " slots, but rows of ", rows.shape(0), " and pins of ", pins.shape(0));
    const int32_t* const pin = pins.data();
    return table_.choose(int64_t(out.shape(0)), rows.data(), [pin](int64_t slot) { return pin[slot] != 0; }, out.data());
  }

 private:
  static constexpr int64_t kLeastSlots = 8192, kTrialSlots = 512;  // fewer, and their misses tell little
  static constexpr int kMostShrink = 6;

  void check(const Numbers& slots, const Numbers& rows) const {
    if (slots.shape(0) != rows.shape(0)) refuse(slots.shape(0), " slots have ", rows.shape(0), " rows; give one each");
    for (size_t i = 0; i < slots.shape(0); ++i)
      if (slots.data()[i] < 0 || slots.data()[i] >= table_.num_slots())
        refuse("slot ", slots.data()[i], " is outside 0..", table_.num_slots() - 1);
  }

  // Now and then take the half-life of which the trial has missed least, if it is less by something.
  void review(int64_t num_lookups) {
    since_review_ += num_lookups;
    if (since_review_ < 2 * table_.num_slots()) return;
    since_review_ = 0;
    const auto least = std::min_element(trials_.begin(), trials_.end(),
                                        [](const Trial& a, const Trial& b) { return a.misses() < b.misses(); });
    for (const Trial& trial : trials_)
      if (trial.half_life() == half_life_ && least->misses() * 50 < trial.misses() * 49) {
        half_life_ = least->half_life();
        table_.set_half_life(half_life_);
        break;
      }
    for (Trial& trial : trials_) trial.halve_misses();
  }

  ScoreTable table_;
  int64_t half_life_, since_review_ = 0;
  int shrink_ = 0;
  std::vector<Trial> trials_;
};

nb::capsule make(int64_t num_slots, int64_t num_kept, const std::vector<int64_t>& half_lives) {
  if (num_slots < 1 || num_kept < 1 || half_lives.empty()) refuse("there must be a slot, a score and a half-life");
  return {new Policy(num_slots, num_kept, half_lives), [](void* p) noexcept { delete static_cast<Policy*>(p); }};
}

Policy& of(const nb::capsule& capsule) { return *static_cast<Policy*>(capsule.data()); }

}  // namespace

void bind_eviction(nb::module_& m) {
  m.def("eviction", &make, nb::arg("num_slots"), nb::arg("num_kept"), nb::arg("half_lives"));
  m.def(
      "eviction_touch",
      [](const nb::capsule& policy, Numbers slots, Numbers rows, int64_t num_lookups) {
        of(policy).touch(slots, rows, num_lookups);
      },
      nb::arg("policy"), nb::arg("slots"), nb::arg("rows"), nb::arg("num_lookups"));
  m.def(
      "eviction_admit",
      [](const nb::capsule& policy, Numbers slots, Numbers rows) { of(policy).admit(slots, rows); }, nb::arg("policy"),
      nb::arg("slots"), nb::arg("rows"));
  m.def(
      "eviction_choose",
      [](const nb::capsule& policy, Numbers rows, Pins pins, Slots out) { return of(policy).choose(rows, pins, out); },
      nb::arg("policy"), nb::arg("rows"), nb::arg("pins"), nb::arg("out"));
  m.def("eviction_bytes", [](const nb::capsule& policy) { return of(policy).num_bytes(); }, nb::arg("policy"));
  m.def("eviction_half_life", [](const nb::capsule& policy) { return of(policy).half_life(); }, nb::arg("policy"));
}
