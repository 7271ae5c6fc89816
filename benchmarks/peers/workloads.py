"""Workloads and optimizers of bench_ops.py and bench_e2e.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meseta.data.synth import CARDINALITIES
from meseta.measure.synthetic_batches import DlrmWorkload, LookupWorkload
from meseta.spec import OptimizerSpec

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "rowwise_adagrad": {},
    "sgd": {},
    "adagrad": {},
    "adam": {},
    "sgd_momentum": {"name": "sgd", "momentum": 0.9},
    "adamw": {"weight_decay": 0.01},
    "rowwise_adam": {},
    "lamb": {},
    "rowwise_lamb": {},
    "lars": {"momentum": 0.9},
    "ftrl": {},
    "rmsprop": {},
}
"""Names for `--optimizers`, with the arguments of their OptimizerSpec. The name is an argument if it differs."""
_CAPPED_CARDINALITIES = tuple(min(rows, 1_000_000) for rows in CARDINALITIES)


def make_optimizer(name: str, lr: float) -> OptimizerSpec:
    """Create the spec of the optimizer `name` in OPTIMIZERS."""
    return OptimizerSpec(**{"name": name, "lr": lr, **OPTIMIZERS[name]})


def _criteo(name: str, rows: tuple[int, ...], dim: int, batch_size: int) -> LookupWorkload:
    return LookupWorkload(
        name=name, rows=rows, dims=(dim,) * len(rows), batch_size=batch_size, bag_size=1, id_distribution="zipf"
    )


def _multi_hot(name: str, num_tables: int, rows: int, dim: int, batch_size: int, bag_size: int) -> LookupWorkload:
    return LookupWorkload(
        name=name,
        rows=(rows,) * num_tables,
        dims=(dim,) * num_tables,
        batch_size=batch_size,
        bag_size=bag_size,
        id_distribution="uniform",
    )


def _with_zipf_ids(name: str, traffic: LookupWorkload) -> LookupWorkload:
    return replace(traffic, name=name, id_distribution="zipf")


_FEW_WIDE_TABLES = _multi_hot("b_uni", 8, 1_000_000, 128, 2048, 20)
_MANY_NARROW_TABLES = _multi_hot("c", 100, 100_000, 32, 1024, 10)
_HISTORY = replace(_with_zipf_ids("history", _multi_hot("", 16, 500_000, 64, 2048, 20)), ragged=True)
OPS_WORKLOADS: tuple[LookupWorkload, ...] = (
    _criteo("a16_2k", CARDINALITIES, 16, 2048),
    _criteo("a16_8k", CARDINALITIES, 16, 8192),
    _criteo("a64_2k", _CAPPED_CARDINALITIES, 64, 2048),
    _criteo("a64_8k", _CAPPED_CARDINALITIES, 64, 8192),
    _FEW_WIDE_TABLES,
    _with_zipf_ids("b_zipf", _FEW_WIDE_TABLES),
    _MANY_NARROW_TABLES,
    _with_zipf_ids("c_zipf", _MANY_NARROW_TABLES),
    replace(_HISTORY, name="mixed", dims=(16, 32, 64, 128) * 4),
    replace(_HISTORY, name="weighted", weighted=True),
    replace(_HISTORY, name="mean", pooling="mean"),
)
"""Workloads of bench_ops.py."""
# Names of the workloads:
#   a16_*, a64_*        26 tables of Criteo with one id per bag; a64: dimension 64, at most a million rows per table.
#   *_2k, *_8k          Batch size 2048 or 8192.
#   b_*                 Few wide tables with 20 ids per bag; uniform or Zipf ids.
#   c, c_zipf           Many narrow tables with 10 ids per bag; uniform or Zipf ids.
#   mixed               Bags of 0 to 40 ids, and tables of four dimensions.
#   weighted, mean      Bags of 0 to 40 ids, with a weight per id or with mean pooling.


def _dlrm(name: str, rows: tuple[int, ...], dim: int, batch_size: int) -> DlrmWorkload:
    return DlrmWorkload(lookups=_criteo(name, rows, dim, batch_size), bottom_mlp=(512, 256, 64), top_mlp=(512, 256))


_RM1 = _with_zipf_ids("rm1", _multi_hot("", 8, 4_000_000, 32, 512, 80))
_RM2 = _with_zipf_ids("rm2", _multi_hot("", 32, 500_000, 64, 512, 120))
E2E_WORKLOADS: tuple[DlrmWorkload, ...] = (
    _dlrm("d16_2k", CARDINALITIES, 16, 2048),
    _dlrm("d16_8k", CARDINALITIES, 16, 8192),
    _dlrm("d64_2k", _CAPPED_CARDINALITIES, 64, 2048),
    _dlrm("d64_8k", _CAPPED_CARDINALITIES, 64, 8192),
    DlrmWorkload(lookups=_RM1, bottom_mlp=(128, 64), top_mlp=(256, 64)),
    DlrmWorkload(lookups=_RM2, bottom_mlp=(256, 128), top_mlp=(128, 64)),
    DlrmWorkload(
        lookups=replace(_RM1, name="rm1_uni", id_distribution="uniform"), bottom_mlp=(128, 64), top_mlp=(256, 64)
    ),
    DlrmWorkload(
        lookups=replace(_RM2, name="rm2_uni", id_distribution="uniform"), bottom_mlp=(256, 128), top_mlp=(128, 64)
    ),
)
"""Workloads of bench_e2e.py: DLRM on the tables of Criteo, and two shapes with long bags (rm1, rm2).

d16 has the tables in full size. d64 has dimension 64 and at most a million rows per table.
"""


def shrink(traffic: LookupWorkload, *, max_rows: int, max_batch: int, max_tables: int | None = None) -> LookupWorkload:
    """Return a copy of a workload with limited rows per table, batch size and number of tables.

    Correctness checks and trial runs use it.
    """
    return replace(
        traffic,
        rows=tuple(min(rows, max_rows) for rows in traffic.rows[:max_tables]),
        dims=traffic.dims[:max_tables],
        batch_size=min(traffic.batch_size, max_batch),
    )
