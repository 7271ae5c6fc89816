"""How fast a save writes: so many bytes in any second, whichever second that is, over all ranks of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meseta.errors import MesetaError

CHUNKS_PER_S = 128
"""A rank writes no more at once than its share of a second holds of these."""
TARGET_SHARE = 0.95
"""Of the limit, by the pieces' distances; the rest is for the first and the last piece of a second."""
MIN_BYTES_PER_S = 1_000_000
"""Of each rank: pieces are whole pages then, and a block is written in half a minute."""


class WriteRateLimiter:
    """Holds what the threads of one rank write apart, so that all ranks write at most `max_bytes_per_s` in any second.

    A rank writes one piece at a time, of at most 1/128 of what it may write in a second, and begins the next when its
    predecessor has had the time that it takes at 0.95 of the rank's share. Of the pieces that a second meets, all but
    the first and the last therefore hold at most 0.95 of the share, however late a write is; and where ranks were given
    other shares within that second, 0.95 + 4/128 of the limit is the most.
    """

    def __init__(
        self,
        max_bytes_per_s: float,
        *,
        is_disabled: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """
        Args:
            max_bytes_per_s: of all ranks together.
            is_disabled: asked at each piece; from then on writes are as fast as they go.
            clock: seconds.
            sleep: waits so many.

        Raises MesetaError for less than MIN_BYTES_PER_S.
        """
        self._max_bytes_per_s = max_bytes_per_s
        self.set_num_writers(1)
        self._is_disabled, self._clock, self._sleep = is_disabled, clock, sleep
        self._next_write_s = clock()
        self._lock = threading.Lock()

    def set_num_writers(self, num_writers: int) -> None:
        """Let this rank be one of so many that write, with equal shares. Raises MesetaError for less than
        MIN_BYTES_PER_S."""
        self._rank_bytes_per_s = self._max_bytes_per_s / num_writers
        if not self._rank_bytes_per_s >= MIN_BYTES_PER_S:
            raise MesetaError(
                f"checkpoint: {self._max_bytes_per_s:,.0f} bytes a second for {num_writers} ranks that write; let each "
                f"have at least {MIN_BYTES_PER_S:,}"
            )

    def chunk_bytes(self, most: int) -> int:
        """How much may be written at once, of `most` bytes."""
        return most if self._is_disabled() else min(most, int(self._rank_bytes_per_s / CHUNKS_PER_S))

    @contextmanager
    def throttle(self, num_bytes: int) -> Iterator[None]:
        """The time in which a piece of at most `chunk_bytes` is written."""
        if self._is_disabled():
            yield
            return
        with self._lock:
            while (wait_s := self._next_write_s - self._clock()) > 0 and not self._is_disabled():
                self._sleep(wait_s)
            self._next_write_s = self._clock() + num_bytes / (TARGET_SHARE * self._rank_bytes_per_s)
            yield
