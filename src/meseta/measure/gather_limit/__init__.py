"""The most rows a second that memory gives for given tables and ids: the floor that a lookup is measured against.

The method is the usual one of random-read benchmarks: touch the rows in the order of the lookup, prefetch a row some
ids ahead, add what is read into registers, write nothing. Cache level, distance and burst of the prefetch are tried
out.
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
"""Cache that a prefetch brings a row to."""
PREFETCH_DISTANCES = (4, 8, 16, 32, 64, 128)
"""Ids that a prefetch is ahead."""
PREFETCH_BURSTS = (1, 32)
"""Rows that are asked for at once: waits for the addresses of their pages then overlap."""


@dataclass(frozen=True)
class PrefetchHint:
    """How rows are brought near before they are read."""

    level: int
    """Cache that they are brought to: 1, 2 or 3."""
    distance: int
    """Ids ahead, at least; 0: none."""

    burst: int = 1
    """Rows that are asked for at once, whenever `distance` ids are left."""


@dataclass(frozen=True)
class GatherResult:
    """One pass over the ids."""

    checksum: int
    """Sum of the 32-bit words of all rows read, modulo 2^32."""
    seconds: float
    """Time of the loop alone."""


def gather(
    tables: Sequence[Tensor], ids: NDArray[np.int64], bounds: Sequence[int], prefetch: PrefetchHint, num_threads: int
) -> GatherResult:
    """Read the rows of all ids once.

    Args:
        tables: one [R_f, D_f] per feature, contiguous, of any dtype, on the CPU.
        ids: int64 [nnz], the features of one batch after the other, batch after batch.
        bounds: ids[bounds[s] : bounds[s + 1]] are rows of tables[s % F].
        prefetch: how.
        num_threads: threads that share the ids in pieces, each piece to the next free thread.

    Raises MesetaError for bounds or ids outside, before anything is read.
    """
    addresses: list[int] = []
    for table in tables:
        if not table.is_contiguous() or table.device.type != "cpu":
            raise MesetaError(
                f"gather limit: a table of shape {list(table.shape)} is not contiguous on the CPU; give whole tables"
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
    """The `keep` fastest ways to prefetch here, the fastest first; each is tried three times, in turns."""
    ways = [PrefetchHint(*way) for way in itertools.product(CACHE_LEVELS, PREFETCH_DISTANCES, PREFETCH_BURSTS)]
    times: dict[PrefetchHint, list[float]] = {way: [] for way in ways}
    for _ in range(3):
        for way in ways:
            times[way].append(gather(tables, ids, bounds, way, num_threads).seconds)
    return sorted(ways, key=lambda way: min(times[way]))[:keep]
