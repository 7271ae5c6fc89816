"""Traffic between the caches and backing stores of offloaded tables."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

FORMER_KEYS = {"waited_s": "wait_s", "num_pushed_out": "num_evicted", "pushed_bytes": "evicted_bytes"}
"""Current name of each former key in metrics.jsonl and summary.json."""


@dataclass(frozen=True)
class RowTraffic:
    """Cache traffic of a table over its shards on all ranks, per step or in total."""

    num_rows: float = 0.0
    """Number of distinct rows of batches."""
    num_misses: float = 0.0
    """Number of distinct rows that were not in the cache."""
    wait_s: float = 0.0
    """Seconds that ranks were blocked by row fetches."""
    read_bytes: float = 0.0
    """Bytes read from disk, including evaluations and saves."""
    num_evicted: float = 0.0
    """Number of changed rows written to the backing store."""
    evicted_bytes: float = 0.0
    """Bytes of changed rows written to the backing store, including optimizer states."""
    written_bytes: float = 0.0
    """Bytes written to disk, including metadata and rows moved by cleaning."""

    @property
    def write_amplification(self) -> float | None:
        """Bytes written to disk per byte of an evicted row. `None` if nothing was written to disk."""
        return self.written_bytes / self.evicted_bytes if self.written_bytes and self.evicted_bytes else None

    def __add__(self, other: RowTraffic) -> RowTraffic:
        return RowTraffic(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: RowTraffic) -> RowTraffic:
        return self + other.scaled(-1.0)

    def scaled(self, factor: float) -> RowTraffic:
        """Return all values multiplied by `factor`."""
        return RowTraffic(*(value * factor for value in vars(self).values()))
