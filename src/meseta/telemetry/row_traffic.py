"""What rows that lie far come to: how many a step asks for, how many come and go, and what is waited for."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

FORMER_KEYS = {"waited_s": "wait_s", "num_pushed_out": "num_evicted", "pushed_bytes": "evicted_bytes"}
"""Current name of each former key in metrics.jsonl and summary.json."""


@dataclass(frozen=True)
class RowTraffic:
    """Of a table, over its pieces on all ranks: per step, or in all."""

    num_rows: float = 0.0
    """Distinct rows of batches."""
    num_misses: float = 0.0
    """Those of them that did not lie near; the others are hits."""
    wait_s: float = 0.0
    """Seconds that ranks stood still for them."""
    read_bytes: float = 0.0
    """Of the disk, those of evaluations and saves among them."""
    num_evicted: float = 0.0
    """Changed rows that went to the far side."""
    evicted_bytes: float = 0.0
    """Of these rows, with their states."""
    written_bytes: float = 0.0
    """To the disk: these and what holds them together, and rows that were moved to make room."""

    @property
    def write_amplification(self) -> float | None:
        """Bytes that the disk was sent for each of a row that was pushed out; None where it was sent none."""
        return self.written_bytes / self.evicted_bytes if self.written_bytes and self.evicted_bytes else None

    def __add__(self, other: RowTraffic) -> RowTraffic:
        return RowTraffic(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: RowTraffic) -> RowTraffic:
        return self + other.scaled(-1.0)

    def scaled(self, factor: float) -> RowTraffic:
        """So many times that."""
        return RowTraffic(*(value * factor for value in vars(self).values()))
