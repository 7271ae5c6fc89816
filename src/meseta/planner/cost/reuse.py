"""How many distinct rows a batch looks up, from a histogram of how often rows come again in a window of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meseta.spec import Reuse

Floats = NDArray[np.float64]
_TINY = 1e-12
"""Keeps logarithms finite."""


@dataclass(frozen=True)
class RowClasses:
    """The rows of n tables, in classes of rows that come equally often; the hottest class first.

    What a histogram shows of a window of W samples is taken for a law: a row that came m times in it comes in a part q
    of the window with probability 1 - (1 - q)^m, as if its lookups lay anywhere in the window. For fewer samples than
    the window this is exact where the order of samples is arbitrary. For more samples, all rows seen stay seen, and
    rows that were not seen appear at the rate at which singletons appear at the window's end (I. J. Good, "The
    population frequencies of species", Biometrika 40, 1953), until the table is exhausted. The coldest class stands for
    the singletons and for all rows that the window did not show, since nothing tells them apart.
    """

    num_rows: Floats
    """Rows of each class [n, K]; a table's sum is its number of rows."""
    lookups_per_row: Floats
    """Lookups of one row of the class in a window [n, K]; of one of its rows seen, for the coldest class."""
    lookup_shares: Floats
    """Share of the lookups [n, K]."""
    num_seen_rows: Floats
    """Rows of the coldest class that a window shows [n]."""
    coldest_index: NDArray[np.int64]
    """Index of the coldest class [n]."""
    window_lookups: Floats
    """Lookups of a window [n]; infinite where every row is as likely as any other."""

    def take(self, tables: NDArray[np.int64]) -> RowClasses:
        """Those of some tables, repeated or not."""
        return RowClasses(
            *(
                getattr(self, name)[tables]
                for name in (
                    "num_rows",
                    "lookups_per_row",
                    "lookup_shares",
                    "num_seen_rows",
                    "coldest_index",
                    "window_lookups",
                )
            )
        )

    def lookup_probability(self, num_ids: Floats) -> Floats:
        """Probability that a row of each class is among `num_ids` lookups of its table; [n] -> [n, K]."""
        uniform = np.isinf(self.window_lookups)
        part = num_ids / np.where(uniform, 1.0, self.window_lookups)
        kept = np.where(uniform, 0.0, np.log(np.maximum(1.0 - part, _TINY)))  # log of (1 - q), for q up to 1
        found = -np.expm1(kept[:, None] * self.lookups_per_row)
        each = np.arange(len(part))
        rest, rows = self.num_rows[each, self.coldest_index], self.num_seen_rows
        cold = found[each, self.coldest_index] * rows / np.maximum(rest, _TINY)
        new = np.maximum(rest - rows, 0.0)
        singles = np.where(self.lookups_per_row[each, self.coldest_index] < 1.5, rows, 0.0)
        grown = rows + new * -np.expm1(-singles * np.maximum(part - 1.0, 0.0) / np.maximum(new, _TINY))
        cold = np.where(part > 1.0, grown / np.maximum(rest, _TINY), cold)
        cold = np.where(uniform, -np.expm1(-num_ids / np.maximum(rest, 1.0)), cold)
        found[each, self.coldest_index] = cold
        return np.clip(found, 0.0, 1.0)

    def distinct_rows(self, num_ids: Floats) -> Floats:
        """Expected distinct rows among `num_ids` lookups of each table [n]."""
        return np.minimum((self.num_rows * self.lookup_probability(num_ids)).sum(axis=1), num_ids)


def row_classes(num_rows: Sequence[int], pooling: Sequence[float], reuse: Sequence[Reuse | None]) -> RowClasses:
    """Classes of each table [n], of which `pooling` ids a sample are looked up; None: all rows are alike."""
    n, width = len(num_rows), max((len(own.edges) for own in reuse if own is not None), default=1)
    extents, counts, shares = np.zeros((n, width)), np.zeros((n, width)), np.zeros((n, width))
    seen, coldest = np.zeros(n), np.zeros(n, np.int64)
    window_ids = np.full(n, np.inf)
    for table, (rows, factor, own) in enumerate(zip(num_rows, pooling, reuse, strict=True)):
        ids = 0.0 if own is None else own.window_samples * factor
        classes = nonempty_bins(rows, ids, own) if own is not None and ids > 0.0 else None
        if classes is None:
            extents[table, 0], shares[table, 0], seen[table] = rows, 1.0, rows
            continue
        size, count, share = classes
        k = len(size)
        seen[table], coldest[table], window_ids[table] = size[-1], k - 1, ids
        size[-1] = rows - size[:-1].sum()
        extents[table, :k], counts[table, :k], shares[table, :k] = size, count, share
    return RowClasses(extents, counts, shares, seen, coldest, window_ids)


def nonempty_bins(num_rows: int, num_ids: float, reuse: Reuse) -> tuple[Floats, Floats, Floats] | None:
    """(rows, lookups of a row, share of the lookups) of each bin that has any, the hottest first; None where all are
    empty.

    The histogram has shares only. Rows of the first two bins came exactly once and twice, which tells how many distinct
    rows a window has; without them, the edges of the other bins bound it, and the bounds' geometric mean is taken.
    """
    edges = np.asarray(reuse.edges, np.float64)
    rows, lookups = np.asarray(reuse.rows, np.float64), np.asarray(reuse.lookups, np.float64)
    used = np.flatnonzero((rows > 0.0) & (lookups > 0.0))
    if not used.size:
        return None
    upper = np.append(edges[1:], 2.0 * max(edges[-1], 1.0))
    exact = used[upper[used] - edges[used] == 1.0]
    if exact.size:
        distinct = num_ids * lookups[exact].sum() / (rows[exact] * upper[exact]).sum()
    else:
        ratio = num_ids * lookups[used] / rows[used]
        distinct = np.sqrt((ratio / upper[used]).max() * (ratio / (edges[used] + 1.0)).min())
    size = np.minimum(distinct / rows[used].sum(), float(num_rows)) * rows[used]
    share = lookups[used] / lookups[used].sum()
    count = np.maximum(share * num_ids / size, 1.0)
    return size[::-1].copy(), count[::-1], share[::-1]
