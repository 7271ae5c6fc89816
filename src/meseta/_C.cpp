// The module only gathers: each operator binds itself in the cpu.cpp beside its reference.
#include <nanobind/nanobind.h>

void bind_coalesce(nanobind::module_& m);
void bind_hash_categories(nanobind::module_& m);
void bind_random_rows(nanobind::module_& m);

NB_MODULE(MESETA_MODULE, m) {
  bind_coalesce(m);
  bind_hash_categories(m);
  bind_random_rows(m);
}
