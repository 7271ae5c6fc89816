"""Calls that alternate, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


def alternate(calls: Mapping[Key, Callable[[], Result]], num_turns: int) -> dict[Key, list[Result]]:
    """Return the results of each call in all turns."""
    results: dict[Key, list[Result]] = {name: [] for name in calls}
    for _ in range(num_turns):
        for name, call in calls.items():
            results[name].append(call())
    return results


def seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def alternate_seconds(calls: Mapping[Key, Callable[[], object]], num_turns: int) -> dict[Key, list[float]]:
    return alternate({name: partial(seconds, call) for name, call in calls.items()}, num_turns)


def medians(figures: Mapping[Key, list[float]]) -> dict[Key, float]:
    return {name: statistics.median(values) for name, values in figures.items()}
