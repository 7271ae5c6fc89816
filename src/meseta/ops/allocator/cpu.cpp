// How the C library's allocator treats memory that a step frees.
#include <nanobind/nanobind.h>

#include <climits>
#include <cstddef>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace nb = nanobind;

namespace {

// What is freed stays with the process, up to 2 GB at the end of the heap, for the next step to take again.
void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that glibc takes; larger blocks still come and go
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

}  // namespace

void bind_allocator(nb::module_& m) { m.def("keep_freed_memory", &keep_freed_memory); }
