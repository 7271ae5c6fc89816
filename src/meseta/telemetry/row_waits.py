"""What a rank waits for rows that readers decode: seconds by reader and by cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add

NO_READER = "no reader"
"""Stands for the reader where there is none."""


FORMER_KEYS = {"wire_s": "transfer_s"}
"""Current name of each former key in metrics.jsonl and summary.json."""


@dataclass(frozen=True)
class RowWait:
    """Seconds for which a rank stood still for the rows of a reader: per step, or in all."""

    storage_s: float = 0.0
    """While the reader waited for the bytes of files."""
    decode_s: float = 0.0
    """While it decoded prepared data."""
    transform_s: float = 0.0
    """While it parsed and encoded raw rows."""
    transfer_s: float = 0.0
    """All else while a reader was there: rows on their way, a reader that was busy with others, or stood still."""
    no_lease_s: float = 0.0
    """While the dispatcher named no reader, or was being asked."""

    @property
    def total_s(self) -> float:
        """By all causes."""
        return sum(vars(self).values())

    def __add__(self, other: RowWait) -> RowWait:
        return RowWait(*map(add, vars(self).values(), vars(other).values()))

    def scaled(self, factor: float) -> RowWait:
        """So many times that."""
        return RowWait(*(value * factor for value in vars(self).values()))


class RowWaits:
    """Seconds by reader, added up since the last `take`."""

    def __init__(self) -> None:
        self._sums: dict[str, RowWait] = {}
        self._lifetime_sums: dict[str, RowWait] = {}
        self._num_steps = 0

    def add(self, waits: Mapping[str, RowWait], share: float = 1.0) -> None:
        """So much of these, by reader."""
        for reader, wait in waits.items():
            self._sums[reader] = self._sums.get(reader, RowWait()) + wait.scaled(share)

    def pop_means(self, num_steps: int) -> dict[str, RowWait]:
        """Means over the steps since the last call, of each reader that was waited for."""
        sums, self._sums = self._sums, {}
        self._num_steps += num_steps
        for reader, wait in sums.items():
            self._lifetime_sums[reader] = self._lifetime_sums.get(reader, RowWait()) + wait
        return _per_step(sums, num_steps)

    def lifetime_means(self) -> dict[str, RowWait]:
        """Means over all steps, of what was taken."""
        return _per_step(self._lifetime_sums, self._num_steps)


def _per_step(sums: Mapping[str, RowWait], num_steps: int) -> dict[str, RowWait]:
    return {reader: wait.scaled(1.0 / max(num_steps, 1)) for reader, wait in sums.items()}
