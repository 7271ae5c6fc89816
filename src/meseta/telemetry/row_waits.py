"""Waiting times of a rank for readers, by reader and cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add

NO_READER = "no reader"
"""Key for waiting time without a reader."""


FORMER_KEYS = {"wire_s": "transfer_s"}
"""Current name of each former key in metrics.jsonl and summary.json."""


@dataclass(frozen=True)
class RowWait:
    """Time that a rank was blocked waiting for rows of a reader, per step or in total."""

    storage_s: float = 0.0
    """Seconds while the reader waited for storage."""
    decode_s: float = 0.0
    """Seconds while the reader decoded prepared data."""
    transform_s: float = 0.0
    """Seconds while the reader parsed and encoded raw rows."""
    transfer_s: float = 0.0
    """Seconds for all other causes with an assigned reader: transmission, or a reader that was busy or blocked."""
    no_lease_s: float = 0.0
    """Seconds without an assigned reader, including requests to the dispatcher."""

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: RowWait) -> RowWait:
        return RowWait(*map(add, vars(self).values(), vars(other).values()))

    def scaled(self, factor: float) -> RowWait:
        """Return all values multiplied by `factor`."""
        return RowWait(*(value * factor for value in vars(self).values()))


class RowWaits:
    """Sums of waiting times by reader, since the last `pop_means` and in total."""

    def __init__(self) -> None:
        self._sums: dict[str, RowWait] = {}
        self._lifetime_sums: dict[str, RowWait] = {}
        self._num_steps = 0

    def add(self, waits: Mapping[str, RowWait], share: float = 1.0) -> None:
        """Add the share `share` of each wait in `waits`, by reader."""
        for reader, wait in waits.items():
            self._sums[reader] = self._sums.get(reader, RowWait()) + wait.scaled(share)

    def pop_means(self, num_steps: int) -> dict[str, RowWait]:
        """Return the mean waits per step since the last call, by reader. `num_steps` is the number of these steps."""
        sums, self._sums = self._sums, {}
        self._num_steps += num_steps
        for reader, wait in sums.items():
            self._lifetime_sums[reader] = self._lifetime_sums.get(reader, RowWait()) + wait
        return _per_step(sums, num_steps)

    def lifetime_means(self) -> dict[str, RowWait]:
        """Return the mean waits per step, by reader, over all steps passed to `pop_means`."""
        return _per_step(self._lifetime_sums, self._num_steps)


def _per_step(sums: Mapping[str, RowWait], num_steps: int) -> dict[str, RowWait]:
    return {reader: wait.scaled(1.0 / max(num_steps, 1)) for reader, wait in sums.items()}
