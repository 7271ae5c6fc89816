"""Cost of change marks in a step of the embedding operators."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace

import numpy as np
from peers.ops_meseta import MesetaOperators
from peers.workloads import OPS_WORKLOADS
from record import record

from meseta.storage import TableShard

MOST, MOST_OF_INTERVAL = 1.01, 1.02
WINDOW_S = 0.08


@contextmanager
def without_marks(shards: Sequence[TableShard]) -> Iterator[None]:
    """Context manager that disables marks without moving the rows, because their place affects the speed."""
    lent = [shard.rows for shard in shards]
    for shard, rows in zip(shards, lent, strict=True):
        shard.__dict__["rows"] = replace(rows, marks=None)
    try:
        yield
    finally:
        for shard, rows in zip(shards, lent, strict=True):
            shard.__dict__["rows"] = rows


def measure_marks(options: argparse.Namespace) -> bool:
    good = True
    for name in options.workloads.split(","):
        traffic = asdict(next(one for one in OPS_WORKLOADS if one.name == name))
        tables = MesetaOperators(traffic, "rowwise_adagrad", "float32")
        tables.set_threads(options.threads)
        num_batches = len(tables.batches)
        tables.time("step", 0, num_batches)  # the first touch of rows takes their memory
        num_calls = max(int(WINDOW_S / (tables.time("step", 0, num_batches) / num_batches)), 4)

        def window(is_marked: bool, first: int, tables: MesetaOperators = tables, num_calls: int = num_calls) -> float:
            with nullcontext() if is_marked else without_marks(tables.embeddings.shards):
                tables.time("step", first, 1)  # Updates the description of the tables.
                return tables.time("step", first, num_calls)

        ratios = []
        for turn in range(options.mark_turns):
            order = (True, False, False, True) if turn % 2 else (False, True, True, False)
            seconds = {True: 0.0, False: 0.0}
            for is_marked in order:
                seconds[is_marked] += window(is_marked, turn * num_calls)
            ratios.append(seconds[True] / seconds[False])
        draws = np.random.default_rng(0).choice(ratios, (4000, options.mark_turns))
        low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
        median = statistics.median(ratios)
        print(
            f"  {name}: a step takes {median:.4f} of one without marks, 95 % interval {low:.4f} to {high:.4f}",
            flush=True,
        )
        good &= median <= MOST and high < MOST_OF_INTERVAL
        record("deltas", name, "step with marks", median, "of one", peer="without marks", peer_value=1.0)
        del tables
    return good
