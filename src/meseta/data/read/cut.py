"""Cutting an epoch, window by window, into the rows that a rank wants of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from meseta.data.read.order import EpochOrder, Window
from meseta.data.read.rows import Rows, concatenate


class EpochRows:
    """Rows of one epoch by their place in its order; keeps the last decoded window, and decodes the next one ahead."""

    def __init__(self, order: EpochOrder, read: Callable[[tuple[int, ...]], Rows], *, reads_ahead: bool) -> None:
        """`read` decodes row groups by their number; `reads_ahead`: whether a thread decodes the next window."""
        self._order = order
        self._read = read
        self._index = -1
        self._ahead: dict[int, Future[tuple[Window, Rows]]] = {}
        self._pool: ThreadPoolExecutor | None = None
        if reads_ahead:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="meseta-decode")

    def take(self, first: int, last: int) -> Rows:
        """Rows first..last-1 of the epoch; calls come in ascending order."""
        parts: list[Rows] = []
        at = first
        while at < last or not parts:
            self._open(self._order.find(min(at, self._order.num_rows - 1)))
            start = at - self._window.start
            stop = min(last - self._window.start, self._window.num_rows)
            places = self._window.rows
            parts.append(self._rows.take(slice(start, stop) if places is None else places[start:stop]))
            at = self._window.start + stop
        return concatenate(parts)

    def close(self) -> None:
        """End the thread that decodes ahead; what it has begun is waited for."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _open(self, index: int) -> None:
        if index == self._index:
            return
        ahead = self._ahead.pop(index, None)
        self._window, self._rows = self._decode(index) if ahead is None else ahead.result()
        self._index = index
        if self._pool is not None and index + 1 < len(self._order):
            self._ahead = {index + 1: self._pool.submit(self._decode, index + 1)}

    def _decode(self, index: int) -> tuple[Window, Rows]:
        window = self._order.window(index)
        return window, self._read(window.groups)


def slice_of(rank: int, num_ranks: int, start: int, stop: int) -> tuple[int, int]:
    """The rank's contiguous share of rows start..stop-1; the first ranks get one more where it does not divide."""
    share, more = divmod(stop - start, num_ranks)
    first = start + rank * share + min(rank, more)
    return first, first + share + (rank < more)
