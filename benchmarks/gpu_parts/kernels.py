"""Speed of lookups and row updates relative to a copy of the necessary bytes."""

from __future__ import annotations

from bench_gpu import SHAPES, Job
from common.device_rates import copy_rate, device_seconds

from gpu_parts.rows import RowWriter
from meseta.ops.pooled_lookup import pooled_lookup

MIN_LOOKUP_PERCENT = {128: 80, 64: 70, 16: 55}
MIN_UPDATE_PERCENT = {128: 55, 64: 45, 16: 25}
"""Smallest percentage of a copy's rate by number of columns, for row-wise Adagrad."""
MAX_SGD_RATIO = 1.15
"""Largest time of row-wise Adagrad relative to SGD."""


def check(rows: RowWriter) -> None:
    copy = copy_rate()
    rows.measured("copy, read and written", copy / 1e9, "GB/s")
    for shape in SHAPES:
        job = Job(shape)
        lookup_s = device_seconds(lambda number, job=job: pooled_lookup(job.tables, job.ids(number), job.offsets))
        update_s = {name: device_seconds(job.update(name)) for name in ("sgd", "rowwise_adagrad")}
        add_rates(rows, job, copy, lookup_s, update_s)


def add_rates(rows: RowWriter, job: Job, copy: float, lookup_s: float, update_s: dict[str, float]) -> None:
    """Add the rates of a lookup and of updates by optimizer, given the bytes per second of a copy."""
    name, dim = job.shape.name, job.shape.dim
    percent = 100 * job.lookup_bytes() / lookup_s / copy
    rows.at_least(f"{name}: lookup", percent, MIN_LOOKUP_PERCENT[dim], f"% of a copy ({1e3 * lookup_s:.3f} ms)")
    for optimizer, seconds in update_s.items():
        percent = 100 * job.update_bytes(optimizer) / seconds / copy
        quantity, unit = f"{name}: update, {optimizer}", f"% of a copy ({1e3 * seconds:.3f} ms)"
        if optimizer == "rowwise_adagrad":
            rows.at_least(quantity, percent, MIN_UPDATE_PERCENT[dim], unit)
        else:
            rows.measured(quantity, percent, unit)
    ratio = update_s["rowwise_adagrad"] / update_s["sgd"]
    rows.at_most(f"{name}: row-wise Adagrad", ratio, MAX_SGD_RATIO, "x SGD")
