"""Base class of the implementations that a benchmark compares."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class BenchmarkTarget:
    """Implementation that a worker process creates and times."""

    # This module imports only the standard library, because interpreters of other systems load it.

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[int], object]] = {}
        """Functions to time, by name. The argument is the number of the call, counted from 0."""

    def facts(self) -> dict[str, Any]:
        """Return properties of the target as a JSON object, such as versions, bytes and counts."""
        return {}

    def set_threads(self, num_threads: int) -> None:
        """Set the number of threads of all later calls."""
        import torch

        torch.set_num_threads(num_threads)

    def barrier(self) -> None:
        """Wait for the other ranks of this target."""

    def time(self, action: str, first: int, num_calls: int) -> float:
        """Return the total seconds of `num_calls` calls of `action`. The first call has the number `first`."""
        run = self.actions[action]
        self.barrier()
        start = time.perf_counter()
        for call in range(first, first + num_calls):
            run(call)
        self.barrier()
        return time.perf_counter() - start
