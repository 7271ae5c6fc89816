"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimes:
    """Seconds by stage, added up since the last `take`. The time of a stage inside another is not the other's."""

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._seconds: dict[str, float] = {}
        self._num_steps = 0
        self._inside: list[float] = []
        self._life: dict[str, float] = {}
        self._life_steps = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; on a GPU its work is waited for, so stages do not hide in each other."""
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            inside = self._inside.pop()
        self._wait()
        seconds = time.perf_counter() - start
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds - inside
        if self._inside:
            self._inside[-1] += seconds

    def end_step(self) -> None:
        """One more step is behind us."""
        self._num_steps += 1

    def take(self) -> dict[str, float]:
        """Mean seconds per step of each stage since the last call."""
        means = {name: seconds / max(self._num_steps, 1) for name, seconds in self._seconds.items()}
        for name, seconds in self._seconds.items():
            self._life[name] = self._life.get(name, 0.0) + seconds
        self._life_steps += self._num_steps
        self._seconds, self._num_steps = {}, 0
        return means

    def over_life(self) -> dict[str, float]:
        """Mean seconds per step of each stage, over all that was taken."""
        return {name: seconds / max(self._life_steps, 1) for name, seconds in self._life.items()}
