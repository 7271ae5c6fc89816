"""Set of rows of one shard, stored as a bitmap."""
# A list of int64 row numbers takes up to 64 times as much memory.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.sparse.shapes import Int

CHUNK_ROWS = 1 << 12
"""Number of rows for which the members are counted once and cached. A multiple of 8."""
ROWS_PER_PART = 1 << 20
"""Number of rows whose members `parts` yields at a time."""
_BIT_COUNTS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)


class RowSet:
    """Set of rows 0..num_rows-1. Threads may read it concurrently while no thread changes it."""

    def __init__(self, num_rows: int, bits: NDArray[np.uint8] | None = None) -> None:
        """Create a set from a bitmap [ceil(num_rows / 8)] with row r at bit r % 8 of byte r // 8, or an empty set."""
        self.num_rows = num_rows
        self._bits = np.zeros(-(-num_rows // 8), np.uint8) if bits is None else bits
        self._counts: NDArray[np.int64] | None = None

    @staticmethod
    def all(num_rows: int) -> RowSet:
        """Return the set of all rows."""
        rows = RowSet(num_rows)
        rows.add_range(0, num_rows)
        return rows

    def __len__(self) -> int:
        """Return the number of members."""
        return self.count(0, self.num_rows)

    def copy(self) -> RowSet:
        """Return an independent copy."""
        return RowSet(self.num_rows, self._bits.copy())

    def add(self, rows: Int[Tensor, " n"]) -> None:
        """Add rows, which must be sorted and unique."""
        if rows.numel() == 0:
            return
        begin, end = int(rows[0]) // 8, int(rows[-1]) // 8 + 1
        is_member = np.zeros((end - begin) * 8, np.uint8)
        is_member[rows.numpy() - 8 * begin] = 1
        self._bits[begin:end] |= np.packbits(is_member, bitorder="little")
        self._counts = None

    def add_range(self, first: int, stop: int) -> None:
        """Add rows first..stop-1."""
        # Set whole bytes directly, and the remaining rows at both ends one by one.
        begin, end = -(-first // 8), stop // 8
        if begin >= end:
            self.add(torch.arange(first, stop))
            return
        self._bits[begin:end] = 255
        self._counts = None
        self.add(torch.arange(first, 8 * begin))
        self.add(torch.arange(8 * end, stop))

    def rows(self, first: int = 0, stop: int | None = None) -> Int[Tensor, " n"]:
        """Return the members among rows first..stop-1, sorted, as int64. By default return all members."""
        stop = self.num_rows if stop is None else stop
        begin = first // 8
        is_member = np.unpackbits(self._bits[begin : -(-stop // 8)], bitorder="little")
        is_member = is_member[first - 8 * begin : stop - 8 * begin]
        return torch.from_numpy(is_member.view(bool).nonzero()[0] + first)

    def parts(self) -> Iterator[Int[Tensor, " n"]]:
        """Yield all members in ascending order, for ROWS_PER_PART rows at a time."""
        for first in range(0, self.num_rows, ROWS_PER_PART):
            yield self.rows(first, min(first + ROWS_PER_PART, self.num_rows))

    def count(self, first: int, stop: int) -> int:
        """Return the number of members among rows first..stop-1."""
        return self._count_before(stop) - self._count_before(first)

    def _count_before(self, row: int) -> int:
        counts = self._counts
        if counts is None:
            padded = np.zeros(-(-self.num_rows // CHUNK_ROWS) * CHUNK_ROWS // 8, np.uint8)
            padded[: len(self._bits)] = _BIT_COUNTS[self._bits]
            of_chunks = padded.reshape(-1, CHUNK_ROWS // 8).sum(axis=1, dtype=np.int64)
            counts = self._counts = np.concatenate([[0], of_chunks.cumsum()])
        chunk = row // CHUNK_ROWS
        begin, whole = chunk * CHUNK_ROWS // 8, row // 8
        count = int(counts[chunk]) + int(_BIT_COUNTS[self._bits[begin:whole]].sum(dtype=np.int64))
        return count + int(_BIT_COUNTS[self._bits[whole] & ((1 << row % 8) - 1)]) if row % 8 else count
