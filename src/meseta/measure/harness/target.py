"""What takes part in a benchmark: one implementation, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class BenchmarkTarget:
    """An implementation that `worker` builds and times. Needs nothing but the standard library."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[int], object]] = {}
        """What can be timed: name -> function of the running number of the call."""

    def facts(self) -> dict[str, Any]:
        """What the benchmark wants to know about it, as JSON: versions, bytes, counts."""
        return {}

    def set_threads(self, num_threads: int) -> None:
        """From now on, use so many threads."""
        import torch

        torch.set_num_threads(num_threads)

    def barrier(self) -> None:
        """Wait for the other ranks of this contender."""

    def time(self, action: str, first: int, num_calls: int) -> float:
        """Seconds of calls first, first + 1, ..."""
        run = self.actions[action]
        self.barrier()
        start = time.perf_counter()
        for call in range(first, first + num_calls):
            run(call)
        self.barrier()
        return time.perf_counter() - start
