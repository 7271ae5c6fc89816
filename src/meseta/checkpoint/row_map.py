"""Map from rows of a saved table to rows of a table that starts from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
# Mean length of runs above which copying run by run is faster than copying row by row.
_MIN_RUN_ROWS = 64


@dataclass(frozen=True)
class RowMap:
    """Runs of rows: row `sources[i] + k` of the saved table becomes row `targets[i] + k`, for k < `lengths[i]`.

    A saved row becomes at most one row. Runs are in ascending order of `sources`. All arrays are int64 [runs].
    """

    sources: Rows
    targets: Rows
    lengths: Rows

    @staticmethod
    def identity(num_rows: int) -> RowMap:
        """Return the map in which all rows keep their numbers."""
        start = np.zeros(1, np.int64)
        return RowMap(start, start, np.full(1, num_rows))

    @staticmethod
    def from_sources(sources: Rows) -> RowMap:
        """Return the map to a table of which row i has the saved row `sources[i]`, or none if that is -1."""
        targets = np.flatnonzero(sources >= 0)
        sources = sources[targets]
        if not (np.diff(sources) > 0).all():
            order = np.argsort(sources)
            sources, targets = sources[order], targets[order]
        is_first = np.ones(len(sources), bool)
        is_first[1:] = (np.diff(sources) != 1) | (np.diff(targets) != 1)
        starts = np.flatnonzero(is_first)
        return RowMap(sources[starts], targets[starts], np.diff(starts, append=len(sources)))

    @property
    def num_rows(self) -> int:
        """Number of rows that have a saved row."""
        return int(self.lengths.sum())

    def to_targets(self, first: int, stop: int) -> RowMap:
        """Return the part of the map to rows first..stop-1. Targets are counted from `first`."""
        before = np.maximum(first - self.targets, 0)
        lengths = np.minimum(self.lengths, stop - self.targets) - before
        kept = lengths > 0
        return RowMap((self.sources + before)[kept], (self.targets + before - first)[kept], lengths[kept])

    def from_rows(self, first: int, stop: int) -> RowMap:
        """Return the part of the map from saved rows first..stop-1. Sources are counted from `first`."""
        begin = np.searchsorted(self.sources, first, "right") - 1  # This run may extend to `first`.
        runs = slice(max(begin, 0), np.searchsorted(self.sources, stop))
        sources, targets = self.sources[runs], self.targets[runs]
        before = np.maximum(first - sources, 0)
        lengths = np.minimum(self.lengths[runs], stop - sources) - before
        kept = lengths > 0
        return RowMap((sources + before - first)[kept], (targets + before)[kept], lengths[kept])

    def parts(self) -> Iterator[tuple[Rows | slice, Rows | slice]]:
        """Yield pairs (saved rows, rows that they become) that cover the map: slices, or arrays with ascending
        targets."""
        if self.num_rows >= _MIN_RUN_ROWS * len(self.lengths):
            runs = (column.tolist() for column in (self.sources, self.targets, self.lengths))
            for source, target, length in zip(*runs, strict=True):
                yield slice(source, source + length), slice(target, target + length)
            return
        order = np.argsort(self.targets)
        lengths = self.lengths[order]
        starts = np.cumsum(lengths) - lengths
        within = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        yield np.repeat(self.sources[order], lengths) + within, np.repeat(self.targets[order], lengths) + within
