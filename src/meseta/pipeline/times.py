"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimes:
    """Seconds by stage, added up since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._seconds: dict[str, float] = {}
        self._num_steps = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; on a GPU its work is waited for, so stages do not hide in each other."""
        start = time.perf_counter()
        yield
        self._wait()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def end_step(self) -> None:
        """One more step is behind us."""
        self._num_steps += 1

    def take(self) -> dict[str, float]:
        """Mean seconds per step of each stage since the last call."""
        means = {name: seconds / max(self._num_steps, 1) for name, seconds in self._seconds.items()}
        self._seconds, self._num_steps = {}, 0
        return means
