"""Calls that are timed alternately."""

from __future__ import annotations

import time
from collections.abc import Callable


def best_s(calls: dict[str, Callable[[], object]], num_turns: int) -> dict[str, float]:
    """Return the minimum seconds of each call. All calls alternate for `num_turns`."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_turns):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: min(seconds) for name, seconds in times.items()}
