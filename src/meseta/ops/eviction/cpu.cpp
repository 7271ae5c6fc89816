// Python bindings of policy.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "ops/checks.h"
#include "ops/eviction/policy.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pins = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check(const EvictionPolicy& policy, const Numbers& slots, const Numbers& rows) {
  if (slots.shape(0) != rows.shape(0)) throw_invalid_argument(slots.shape(0), " slots for ", rows.shape(0), " rows; pass one slot per row");
  for (size_t i = 0; i < slots.shape(0); ++i)
    if (slots.data()[i] < 0 || slots.data()[i] >= policy.num_slots())
      throw_invalid_argument("slot ", slots.data()[i], " is outside 0..", policy.num_slots() - 1);
}

nb::capsule make(int64_t num_slots, int64_t num_kept, const std::vector<int64_t>& half_lives) {
  if (num_slots < 1 || num_kept < 1 || half_lives.empty()) throw_invalid_argument("pass at least one slot, one ghost score and one half-life");
  return {new EvictionPolicy(num_slots, num_kept, half_lives), [](void* p) noexcept { delete static_cast<EvictionPolicy*>(p); }};
}

EvictionPolicy& of(const nb::capsule& capsule) { return *static_cast<EvictionPolicy*>(capsule.data()); }

}  // namespace

void bind_eviction(nb::module_& m) {
  m.def("eviction", &make, nb::arg("num_slots"), nb::arg("num_ghosts"), nb::arg("half_lives"));
  m.def(
      "eviction_touch",
      [](const nb::capsule& policy, Numbers slots, Numbers rows, int64_t num_lookups) {
        check(of(policy), slots, rows);
        of(policy).touch(slots.data(), rows.data(), int64_t(rows.shape(0)), num_lookups);
      },
      nb::arg("policy"), nb::arg("slots"), nb::arg("rows"), nb::arg("num_lookups"));
  m.def(
      "eviction_admit",
      [](const nb::capsule& policy, Numbers slots, Numbers rows) {
        check(of(policy), slots, rows);
        of(policy).admit(slots.data(), rows.data(), int64_t(rows.shape(0)));
      },
      nb::arg("policy"),
      nb::arg("slots"), nb::arg("rows"));
  m.def(
      "eviction_choose",
      [](const nb::capsule& policy, Numbers rows, Pins pins, Slots out) {
        const auto num_slots = of(policy).num_slots();
        if (int64_t(rows.shape(0)) != num_slots || rows.shape(0) != pins.shape(0))
          throw_invalid_argument("there are ", num_slots, " slots, but rows of ", rows.shape(0), " and pins of ", pins.shape(0));
        const auto is_pinned = [pin = pins.data()](int64_t slot) { return pin[slot] != 0; };
        return of(policy).choose(int64_t(out.shape(0)), rows.data(), is_pinned, out.data());
      },
      nb::arg("policy"), nb::arg("rows"), nb::arg("pins"), nb::arg("out"));
  m.def("eviction_bytes", [](const nb::capsule& policy) { return of(policy).num_bytes(); }, nb::arg("policy"));
  m.def("eviction_half_life", [](const nb::capsule& policy) { return of(policy).half_life(); }, nb::arg("policy"));
}
