// Settings of the C library's allocator.
#include <nanobind/nanobind.h>

#include <climits>
#include <cstddef>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace nb = nanobind;

namespace {

// Keep freed memory in the process, up to 2 GB at the end of the heap, for reuse by the next step.
void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // The maximum in glibc. Larger blocks are still mapped and unmapped.
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

}  // namespace

void bind_allocator(nb::module_& m) { m.def("keep_freed_memory", &keep_freed_memory); }
