"""What marks of changed rows cost a step of the embedding operators."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from record import record

from meseta.measure.bench.ops_ours import Ours
from meseta.measure.bench.workloads import OPS
from meseta.storage import resident

MOST, MOST_OF_INTERVAL = 1.01, 1.02
WINDOW_S = 1.0


@contextmanager
def without_marks() -> Iterator[None]:
    """Tables that are made here are stepped without marks."""
    really = resident.TableRows
    resident.TableRows = lambda marks=None, **known: really(**known)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        resident.TableRows = really  # type: ignore[misc]


def steps_of(traffic: dict[str, Any], num_threads: int) -> Ours:
    """A contender whose tables are lent as they are now."""
    made = Ours(traffic, "rowwise_adagrad", "float32")
    made.set_threads(num_threads)
    made.time("step", 0, len(made.batches))
    return made


def measure_marks(names: Sequence[str], turns: int, num_threads: int, keep: bool) -> bool:
    """Whether marks cost no more than they may; windows with and without alternate."""
    good = True
    for name in names:
        traffic = asdict(next(one for one in OPS if one.name == name))
        with without_marks():
            plain = steps_of(traffic, num_threads)
        marked = steps_of(traffic, num_threads)
        num_calls = max(int(WINDOW_S / (plain.time("step", 0, 4) / 4)), 4)
        ratios = []
        for turn in range(turns):
            order = (marked, plain) if turn % 2 else (plain, marked)
            seconds = {id(one): one.time("step", turn * num_calls, num_calls) for one in order}
            ratios.append(seconds[id(marked)] / seconds[id(plain)])
        draws = np.random.default_rng(0).choice(ratios, (4000, turns))
        low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
        median = statistics.median(ratios)
        print(
            f"  {name}: a step takes {median:.4f} of one without marks, 95 % interval {low:.4f} to {high:.4f}",
            flush=True,
        )
        good &= median <= MOST and high < MOST_OF_INTERVAL
        if keep:
            record("deltas", name, "step with marks", median, "of one", peer="without marks", peer_value=1.0)
        del plain, marked
    return good
