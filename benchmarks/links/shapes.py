"""DLRM `d64` of bench_e2e.py with fewer rows: its tables, plans and workload."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from peers.e2e_meseta import make_specs
from peers.workloads import E2E_WORKLOADS, shrink

from links.variants import Layout, Variant
from meseta.measure.synthetic_batches import DlrmWorkload
from meseta.spec import Communication, FeatureSpec, InitSpec, OptimizerSpec, Plan, TableSpec, Workload
from meseta.spec.workload import DenseExchange, DenseLoad

MAX_ROWS = 50_000
"""Maximum number of rows, so that all variants fit into memory. `d64` has a million."""
BATCH = 4096
LR, INIT = 0.001, InitSpec(kind="constant", scale=0.01)


def training(batch_size: int = BATCH) -> DlrmWorkload:
    shape = next(one for one in E2E_WORKLOADS if one.name == "d64_8k")
    traffic = shrink(shape.lookups, max_rows=MAX_ROWS, max_batch=batch_size)
    return replace(shape, lookups=replace(traffic, name="d64", batch_size=batch_size))


def specs(shape: DlrmWorkload) -> tuple[list[TableSpec], list[FeatureSpec]]:
    return make_specs(shape, OptimizerSpec(name="sgd", lr=LR), INIT)


def plan(shape: DlrmWorkload, variant: Variant, layout: Layout) -> Plan:
    """Assign tables to hosts in turn, and to the ranks of a host in turn."""
    tables, _ = specs(shape)
    entries: dict[str, Any] = {}
    for number, table in enumerate(tables):
        host, place = number % layout.hosts, number // layout.hosts % layout.per_host
        ranks: list[int] | None = None
        if variant.sharding == "table_wise":
            ranks = [host * layout.per_host + place]
        elif variant.sharding == "column_wise":  # there are fewer blocks of columns than ranks
            ranks = [(host * layout.per_host + step) % layout.size for step in range(layout.size)]
        entries[table.name] = {"sharding": variant.sharding} | ({} if ranks is None else {"ranks": ranks})
    document: dict[str, Any] = {"devices_per_host": layout.per_host, "exchange": variant.exchange, "tables": entries}
    if variant.sum_path != "flat":
        document["dense_exchange"] = variant.sum_path
    return Plan.from_dict(document, tables, layout.size)


def communication(variant: Variant) -> Communication:
    chosen: Any = {"precision": variant.precision, "exchange": variant.exchange}
    if variant.sum_path != "flat":
        chosen["dense_exchange"] = variant.sum_path
    return Communication(**chosen)


def workload(shape: DlrmWorkload, variant: Variant) -> Workload:
    tables, features = specs(shape)
    num_vectors = len(tables) + 1
    bottom = [shape.num_dense, *shape.bottom_mlp, shape.dim]
    top = [shape.dim + num_vectors * (num_vectors - 1) // 2, *shape.top_mlp, 1]
    layers = [*pairwise(bottom), *pairwise(top)]
    products = sum(a * b for a, b in layers)
    pairs = num_vectors * num_vectors * shape.dim
    return Workload(
        tables=tuple(tables),
        features=tuple(features),
        batch_size=shape.lookups.batch_size,
        dense=DenseLoad(
            flops_per_sample=6.0 * (products + pairs), parameter_bytes=4 * (products + sum(b for _, b in layers))
        ),
        dense_exchange=DenseExchange(num_tensors=2 * len(layers)),
        comm=communication(variant),
    )
