// Python bindings of slot_map.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>

#include "ops/slot_map/slot_map.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

using Keys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::capsule make(int64_t capacity, bool wide) {
  std::unique_ptr<SlotMap> made;
  if (wide) made = std::make_unique<TypedSlotMap<uint64_t>>(capacity);
  else made = std::make_unique<TypedSlotMap<uint32_t>>(capacity);
  return {made.release(), [](void* p) noexcept { delete static_cast<SlotMap*>(p); }};
}

SlotMap& of(const nb::capsule& capsule) { return *static_cast<SlotMap*>(capsule.data()); }

// Batches run without the global interpreter lock.
void check(size_t keys, size_t slots) {
  if (keys != slots) throw std::invalid_argument("the numbers of keys and slots differ");
}

}  // namespace

void bind_slot_map(nb::module_& m) {
  m.def("slot_map", &make, nb::arg("capacity"), nb::arg("wide"));
  m.def(
      "slot_map_find",
      [](const nb::capsule& directory, Keys keys, Slots slots, int num_threads) {
        check(keys.shape(0), slots.shape(0));
        nb::gil_scoped_release unlocked;
        of(directory).find(keys.data(), int64_t(keys.shape(0)), slots.data(), num_threads);
      },
      nb::arg("directory"), nb::arg("keys"), nb::arg("slots"), nb::arg("num_threads"));
  m.def(
      "slot_map_insert",
      [](const nb::capsule& directory, Keys keys, Keys slots, int num_threads) {
        check(keys.shape(0), slots.shape(0));
        nb::gil_scoped_release unlocked;
        return of(directory).insert(keys.data(), int64_t(keys.shape(0)), slots.data(), num_threads);
      },
      nb::arg("directory"), nb::arg("keys"), nb::arg("slots"), nb::arg("num_threads"));
  m.def(
      "slot_map_remove",
      [](const nb::capsule& directory, Keys keys, Slots slots, int num_threads) {
        check(keys.shape(0), slots.shape(0));
        nb::gil_scoped_release unlocked;
        of(directory).remove(keys.data(), int64_t(keys.shape(0)), slots.data(), num_threads);
      },
      nb::arg("directory"), nb::arg("keys"), nb::arg("slots"), nb::arg("num_threads"));
  m.def(
      "slot_map_items",
      [](const nb::capsule& directory, Slots keys, Slots slots) {
        check(keys.shape(0), slots.shape(0));
        nb::gil_scoped_release unlocked;
        return of(directory).items(keys.data(), slots.data(), int64_t(keys.shape(0)));
      },
      nb::arg("directory"), nb::arg("keys"), nb::arg("slots"));
  m.def("slot_map_size", [](const nb::capsule& directory) { return of(directory).size(); }, nb::arg("directory"));
  m.def("slot_map_bytes", [](const nb::capsule& directory) { return of(directory).num_bytes(); },
        nb::arg("directory"));
}
