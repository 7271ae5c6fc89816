"""Gather limit: the maximum rate at which memory delivers the rows of given ids. Lookups are compared with it.

Rows are read in the order of the lookup and summed in registers. The prefetch is tuned by search.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meseta.ops.core import core
from meseta.spec import MesetaError

CACHE_LEVELS = (1, 2, 3)
"""Hardware cache levels that a prefetch may target."""
PREFETCH_DISTANCES = (4, 8, 16, 32, 64, 128)
"""Numbers of ids by which a prefetch may precede the read."""
# Prefetching several rows together overlaps their page-table walks.
PREFETCH_BURSTS = (1, 32)
"""Numbers of rows that may be prefetched together."""


@dataclass(frozen=True)
class PrefetchHint:
    """Parameters of software prefetching."""

    level: int
    """Hardware cache level into which rows are prefetched: 1, 2 or 3."""
    distance: int
    """Minimum number of ids between a prefetch and the read of its row. 0 with `burst` 1 means no prefetching ahead."""

    burst: int = 1
    """Number of rows prefetched together."""
    # The next burst starts when the prefetched rows are only `distance` ahead.


@dataclass(frozen=True)
class GatherResult:
    """Result of reading the rows of all ids once."""

    checksum: int
    """Sum of the 32-bit words of all rows read, modulo 2^32."""
    seconds: float
    """Duration of the read loop, without checks and setup."""


def gather(
    tables: Sequence[Tensor], ids: NDArray[np.int64], bounds: Sequence[int], prefetch: PrefetchHint, num_threads: int
) -> GatherResult:
    """Read the rows of all ids once.

    Table f [R_f, D_f] is a contiguous CPU tensor. `ids` (int64) are grouped by batch, then by feature: those in
    bounds[s] : bounds[s + 1] are rows of tables[s % F]. Threads take chunks of ids dynamically.

    Raises MesetaError before reading if a table is not contiguous on the CPU, or if an argument is out of range.
    """
    addresses: list[int] = []
    for table in tables:
        if not table.is_contiguous() or table.device.type != "cpu":
            raise MesetaError(
                f"gather limit: the table of shape {list(table.shape)} is not a contiguous CPU tensor; pass a copy"
            )
        addresses += [table.data_ptr(), table.shape[1] * table.element_size(), table.shape[0]]
    try:
        total, seconds = core().gather_limit(
            addresses, ids, list(bounds), prefetch.level, prefetch.distance, prefetch.burst, num_threads
        )
    except ValueError as error:
        raise MesetaError(f"gather limit: {error}") from None
    return GatherResult(checksum=total, seconds=seconds)


def best_prefetches(
    tables: Sequence[Tensor], ids: NDArray[np.int64], bounds: Sequence[int], num_threads: int, *, keep: int = 3
) -> list[PrefetchHint]:
    """Return the `keep` fastest prefetch parameters for these tables and ids, fastest first."""
    # All combinations are measured three times, interleaved. The minimum counts.
    ways = [PrefetchHint(*way) for way in itertools.product(CACHE_LEVELS, PREFETCH_DISTANCES, PREFETCH_BURSTS)]
    times: dict[PrefetchHint, list[float]] = {way: [] for way in ways}
    for _ in range(3):
        for way in ways:
            times[way].append(gather(tables, ids, bounds, way, num_threads).seconds)
    return sorted(ways, key=lambda way: min(times[way]))[:keep]
