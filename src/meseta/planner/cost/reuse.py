"""Expected number of distinct rows in a batch, from reuse histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meseta.spec import Reuse

Floats = NDArray[np.float64]
# Smallest argument of a logarithm.
_TINY = 1e-12


@dataclass(frozen=True)
class RowClasses:
    """Rows of n tables, divided into K classes of equally frequent rows. The hottest class comes first.

    The coldest class also contains the rows that the histogram did not see. Unused classes have no rows.
    """

    num_rows: Floats
    """Number of rows of each class [n, K]. Their sum is the size of the table."""
    lookups_per_row: Floats
    """Lookups per window of one row of the class [n, K]. For the coldest class, of one of its seen rows."""
    lookup_shares: Floats  # [n, K]
    num_seen_rows: Floats
    """Number of rows of the coldest class that occur in a window [n]."""
    coldest_index: NDArray[np.int64]  # [n]
    window_lookups: Floats
    """Number of lookups of the table in a window [n]. Infinite if all rows are equally likely."""

    def take(self, tables: NDArray[np.int64]) -> RowClasses:
        """Return the classes of the given tables. An index may occur several times."""
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
        """Return the probability that a row of each class [n, K] is among `num_ids` [n] lookups of its table."""
        # A row that occurs m times in a window is in a fraction q of the window with probability 1 - (1 - q)^m. This is
        # exact if the order of the samples is arbitrary. Beyond the window, seen rows remain seen, and unseen rows
        # appear at the rate of singletons at the end of the window until the table is exhausted (I. J. Good, "The
        # population frequencies of species", Biometrika 40, 1953).
        uniform = np.isinf(self.window_lookups)
        part = num_ids / np.where(uniform, 1.0, self.window_lookups)
        kept = np.where(uniform, 0.0, np.log(np.maximum(1.0 - part, _TINY)))  # log(1 - q), for q up to 1
        chance = -np.expm1(kept[:, None] * self.lookups_per_row)
        each = np.arange(len(part))
        rest, rows = self.num_rows[each, self.coldest_index], self.num_seen_rows
        cold = chance[each, self.coldest_index] * rows / np.maximum(rest, _TINY)
        new = np.maximum(rest - rows, 0.0)
        singles = np.where(self.lookups_per_row[each, self.coldest_index] < 1.5, rows, 0.0)
        grown = rows + new * -np.expm1(-singles * np.maximum(part - 1.0, 0.0) / np.maximum(new, _TINY))
        cold = np.where(part > 1.0, grown / np.maximum(rest, _TINY), cold)
        cold = np.where(uniform, -np.expm1(-num_ids / np.maximum(rest, 1.0)), cold)
        chance[each, self.coldest_index] = cold
        return np.clip(chance, 0.0, 1.0)

    def distinct_rows(self, num_ids: Floats) -> Floats:
        """Return the expected number of distinct rows among `num_ids` lookups of each table [n]."""
        return np.minimum((self.num_rows * self.lookup_probability(num_ids)).sum(axis=1), num_ids)


def row_classes(num_rows: Sequence[int], pooling: Sequence[float], reuse: Sequence[Reuse | None]) -> RowClasses:
    """Divide the rows of each table into classes. `pooling` is the number of ids per sample. Without a histogram, all
    rows are equally likely."""
    n, width = len(num_rows), max((len(histogram.edges) for histogram in reuse if histogram is not None), default=1)
    extents, counts, shares = np.zeros((n, width)), np.zeros((n, width)), np.zeros((n, width))
    seen, coldest = np.zeros(n), np.zeros(n, np.int64)
    window_ids = np.full(n, np.inf)
    for table, (rows, factor, histogram) in enumerate(zip(num_rows, pooling, reuse, strict=True)):
        ids = 0.0 if histogram is None else histogram.window_samples * factor
        classes = nonempty_bins(rows, ids, histogram) if histogram is not None and ids > 0.0 else None
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
    """Return the non-empty bins of a histogram, the hottest first, or `None` if all bins are empty.

    The result has three arrays with one entry per bin: number of rows, lookups per row, and share of the lookups.
    """
    edges = np.asarray(reuse.edges, np.float64)
    rows, lookups = np.asarray(reuse.rows, np.float64), np.asarray(reuse.lookups, np.float64)
    used = np.flatnonzero((rows > 0.0) & (lookups > 0.0))
    if not used.size:
        return None
    upper = np.append(edges[1:], 2.0 * max(edges[-1], 1.0))
    # The histogram contains only shares. Rows of the first two bins occur exactly once and twice, which determines the
    # number of distinct rows. Without these bins, the edges of the other bins bound it, and the geometric mean of the
    # bounds is used.
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
