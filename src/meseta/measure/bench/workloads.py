"""The configurations of `meseta bench`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meseta.data.synth.columns import CARDINALITIES
from meseta.measure.traffic import Traffic, Training
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
"""What `--optimizers` may name -> constants of its OptimizerSpec."""
_CAPPED = tuple(min(rows, 1_000_000) for rows in CARDINALITIES)


def make_optimizer(name: str, lr: float) -> OptimizerSpec:
    """The spec of an entry of OPTIMIZERS."""
    return OptimizerSpec(**{"name": name, "lr": lr, **OPTIMIZERS[name]})


def _criteo(name: str, rows: tuple[int, ...], dim: int, batch_size: int) -> Traffic:
    return Traffic(name=name, rows=rows, dims=(dim,) * len(rows), batch_size=batch_size, bag_size=1, law="zipf")


def _many_ids(name: str, num_tables: int, rows: int, dim: int, batch_size: int, bag_size: int) -> Traffic:
    """Uniform; a twin with skewed ids is made by `_zipf`."""
    return Traffic(
        name=name,
        rows=(rows,) * num_tables,
        dims=(dim,) * num_tables,
        batch_size=batch_size,
        bag_size=bag_size,
        law="uniform",
    )


def _zipf(name: str, traffic: Traffic) -> Traffic:
    return replace(traffic, name=name, law="zipf")


_B = _many_ids("b_uni", 8, 1_000_000, 128, 2048, 20)
_C = _many_ids("c", 100, 100_000, 32, 1024, 10)
_HISTORY = replace(_zipf("history", _many_ids("", 16, 500_000, 64, 2048, 20)), ragged=True)
OPS: tuple[Traffic, ...] = (
    _criteo("a16_2k", CARDINALITIES, 16, 2048),
    _criteo("a16_8k", CARDINALITIES, 16, 8192),
    _criteo("a64_2k", _CAPPED, 64, 2048),
    _criteo("a64_8k", _CAPPED, 64, 8192),
    _B,
    _zipf("b_zipf", _B),
    _C,
    _zipf("c_zipf", _C),
    replace(_HISTORY, name="mixed", dims=(16, 32, 64, 128) * 4),
    replace(_HISTORY, name="weighted", weighted=True),
    replace(_HISTORY, name="mean", pooling="mean"),
)
"""Criteo's 26 tables with one id each (a16: whole, D 16; a64: at most a million rows, D 64; 2k, 8k samples); few wide
tables with 20 ids (b), many narrow ones with 10 (c), each uniform and skewed; bags of 0 to 40 ids: tables of four
widths, ids with weights, means."""


def _dlrm(name: str, rows: tuple[int, ...], dim: int, batch_size: int) -> Training:
    return Training(traffic=_criteo(name, rows, dim, batch_size), bottom_mlp=(512, 256, 64), top_mlp=(512, 256))


_RM1 = _zipf("rm1", _many_ids("", 8, 4_000_000, 32, 512, 80))
_RM2 = _zipf("rm2", _many_ids("", 32, 500_000, 64, 512, 120))
E2E: tuple[Training, ...] = (
    _dlrm("d16_2k", CARDINALITIES, 16, 2048),
    _dlrm("d16_8k", CARDINALITIES, 16, 8192),
    _dlrm("d64_2k", _CAPPED, 64, 2048),
    _dlrm("d64_8k", _CAPPED, 64, 8192),
    Training(traffic=_RM1, bottom_mlp=(128, 64), top_mlp=(256, 64)),
    Training(traffic=_RM2, bottom_mlp=(256, 128), top_mlp=(128, 64)),
    Training(traffic=replace(_RM1, name="rm1_uni", law="uniform"), bottom_mlp=(128, 64), top_mlp=(256, 64)),
    Training(traffic=replace(_RM2, name="rm2_uni", law="uniform"), bottom_mlp=(256, 128), top_mlp=(128, 64)),
)
"""DLRM on Criteo's tables (d16: whole, d64: at most a million rows), and the two shapes with long bags."""


def small(traffic: Traffic, *, max_rows: int, max_batch: int, max_tables: int | None = None) -> Traffic:
    """The same with fewer rows, samples and tables: for checks, and for trying a command."""
    return replace(
        traffic,
        rows=tuple(min(rows, max_rows) for rows in traffic.rows[:max_tables]),
        dims=traffic.dims[:max_tables],
        batch_size=min(traffic.batch_size, max_batch),
    )
