// The module only gathers: each operator binds itself in the cpu.cpp beside its reference.
#include <nanobind/nanobind.h>

void bind_hash_categories(nanobind::module_& m);

NB_MODULE(_C, m) {
  bind_hash_categories(m);
}
