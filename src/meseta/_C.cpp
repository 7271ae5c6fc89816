// The module of the compiled core. Each operator has its bindings in the cpu.cpp next to its reference.
#include <nanobind/nanobind.h>

void bind_allocator(nanobind::module_& m);
void bind_bucketize(nanobind::module_& m);
void bind_coalesce(nanobind::module_& m);
void bind_codec(nanobind::module_& m);
void bind_columns(nanobind::module_& m);
void bind_slot_map(nanobind::module_& m);
void bind_dot_interaction(nanobind::module_& m);
void bind_eviction(nanobind::module_& m);
void bind_gather_limit(nanobind::module_& m);
void bind_hash_categories(nanobind::module_& m);
void bind_hash_ids(nanobind::module_& m);
void bind_heartbeat(nanobind::module_& m);
void bind_id_policy(nanobind::module_& m);
void bind_jagged(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_mlp(nanobind::module_& m);
void bind_parse_tsv(nanobind::module_& m);
void bind_pooled_lookup(nanobind::module_& m);
void bind_product(nanobind::module_& m);
void bind_quantize(nanobind::module_& m);
void bind_random_rows(nanobind::module_& m);
void bind_row_cache(nanobind::module_& m);
void bind_row_file(nanobind::module_& m);
void bind_row_lookup(nanobind::module_& m);
void bind_row_update(nanobind::module_& m);
void bind_unique(nanobind::module_& m);
void bind_weight_gradient(nanobind::module_& m);
void bind_whole_numbers(nanobind::module_& m);

NB_MODULE(MESETA_MODULE, m) {
  bind_allocator(m);
  bind_bucketize(m);
  bind_coalesce(m);
  bind_codec(m);
  bind_columns(m);
  bind_slot_map(m);
  bind_dot_interaction(m);
  bind_eviction(m);
  bind_gather_limit(m);
  bind_hash_categories(m);
  bind_hash_ids(m);
  bind_heartbeat(m);
  bind_id_policy(m);
  bind_jagged(m);
  bind_memory(m);
  bind_mlp(m);
  bind_parse_tsv(m);
  bind_pooled_lookup(m);
  bind_product(m);
  bind_quantize(m);
  bind_random_rows(m);
  bind_row_cache(m);
  bind_row_file(m);
  bind_row_lookup(m);
  bind_row_update(m);
  bind_unique(m);
  bind_weight_gradient(m);
  bind_whole_numbers(m);
}
