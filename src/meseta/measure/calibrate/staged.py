"""Calibration of staged updates: column shards whose row optimizer needs sums over whole rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meseta.measure.calibrate.fit import Floats, nnls
from meseta.measure.calibrate.tasks import ShardingTask, TaskTable
from meseta.measure.harness.worker_group import WorkerGroup
from meseta.planner.cost.loads import ShardArrays, WorkloadLoads
from meseta.spec.cost_model import UpdateCost

TABLE_SHAPES = ((1_000_000, 64, 10.0), (500_000, 128, 3.0), (100_000, 32, 20.0), (10_000, 64, 10.0),
                (1_000_000, 32, 1.0),
          (300_000, 128, 20.0), (3_000, 32, 30.0), (100_000, 64, 2.0))  # fmt: skip
"""Rows, columns and ids per sample of the measured tables. One half of the columns is timed."""
STAGED_COSTS = ("staged_shard_s", "staged_id_s", "staged_row_s")
"""Constants of UpdateCost that only this calibration determines."""
NUM_TRIES = 3
"""Number of measurements per table and variant. The fastest counts."""


def measure_staged(team: WorkerGroup, num_threads: int, memory_bytes: float) -> Floats:
    """Measure the constants [3] in STAGED_COSTS, in about two seconds.

    Compares updates in stages with one fused pass over shards of the same shape.

    Args:
        team: Worker group of one RankTimer.
        num_threads: Number of threads.
        memory_bytes: Memory for a shard. Larger shards are skipped.
    """
    terms, extra_s = [], []
    for seed, (num_rows, dim, pooling) in enumerate(TABLE_SHAPES):
        if num_rows * (dim // 2 + 1) * 4 > memory_bytes:  # Rows in float32, and one sum of squares per row.
            continue
        task = ShardingTask(
            seed=seed,
            tables=(TaskTable(num_rows=num_rows, dim=dim, pooling_factor=pooling, distribution_index=seed % 3),),
        )
        pieces = [(0, (0, num_rows), (0, dim // 2))]
        shared = {"task": task.to_dict(), "shards": pieces, "threads": num_threads}
        staged_s = min(team.call("time_device", **shared, replicas=[], num_ranks=2)[1] for _ in range(NUM_TRIES))
        fused_s = min(team.call("time_shards", **shared, num_rounds=1)[1] for _ in range(NUM_TRIES))
        loads = WorkloadLoads(task.workload())
        load = loads.shard_loads(ShardArrays.from_values(0, (0, num_rows), (0, dim // 2)))
        terms.append([1.0, float(load.num_ids[0]), float(load.num_distinct_rows[0])])
        extra_s.append(max(staged_s - fused_s, 0.0))
    return fit_staged(np.array(terms), np.array(extra_s))


def fit_staged(terms: Floats, extra_s: Floats) -> Floats:
    """Fit non-negative constants [3] of STAGED_COSTS such that terms [n, 3] @ constants approximates `extra_s` [n].

    Columns of `terms` are the numbers of shards, ids and distinct rows. Errors count relative to `extra_s`.
    """
    weights = 1.0 / np.maximum(extra_s, 1e-5)[:, None]
    scale = np.maximum(np.abs(terms * weights).max(axis=0), 1e-300)
    return nnls(terms * weights / scale, extra_s * weights[:, 0]) / scale


def with_staged(update: UpdateCost, constants: Floats) -> UpdateCost:
    """Return a copy of `update` with the constants [3] of STAGED_COSTS."""
    shard_s, id_s, row_s = constants.tolist()
    return replace(update, staged_shard_s=shard_s, staged_id_s=id_s, staged_row_s=row_s)
