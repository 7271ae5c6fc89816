// Distinct ids of one or several groups, by radix sort; reference.py says what.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "ops/radix.h"

namespace nb = nanobind;
using namespace meseta;

namespace {

using Words = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// For the tests of radix.h alone.
void sort_bits(Words entries, int first_bit, int last_bit) {
  if (first_bit < 0 || first_bit > 63 || last_bit > 64)
    throw std::invalid_argument("radix_sort: bits " + std::to_string(first_bit) + ".." + std::to_string(last_bit) +
                                " are not within 0..64");
  const size_t n = entries.shape(0);
  const std::unique_ptr<uint64_t[]> scratch(new uint64_t[n]);
  const uint64_t* sorted = radix_sort(entries.data(), scratch.get(), n, first_bit, last_bit);
  if (sorted != entries.data()) std::copy_n(sorted, n, entries.data());
}

}  // namespace

void bind_unique(nb::module_& m) {
  m.def("radix_sort", &sort_bits, nb::arg("entries"), nb::arg("first_bit"), nb::arg("last_bit"));
}
