"""Limit of the write rate of saves, over all ranks of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meseta.errors import MesetaError

# A rank writes one chunk at a time, and starts the next one after the time that the last one takes at 0.95 of the
# rank's share. In any second, all chunks except the first and the last therefore have at most 0.95 of the share, even
# if a write is late. If the shares change within the second, the total is at most 0.95 + 4/128 of the limit.
CHUNKS_PER_S = 128
"""Number of chunks of each rank per second."""
# Share of the limit that the distances of chunks allow. The rest is for the first and last chunk of a second.
TARGET_SHARE = 0.95
# Minimum share of each rank. At this rate, chunks are whole pages, and a block takes half a minute.
MIN_BYTES_PER_S = 1_000_000


class WriteRateLimiter:
    """Limiter of the writes of one rank, so that all ranks write at most `max_bytes_per_s` in any second.

    Thread-safe.
    """

    def __init__(
        self,
        max_bytes_per_s: float,
        *,
        is_disabled: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Create a limiter for a single writing rank.

        Args:
            max_bytes_per_s: Limit for all ranks together.
            is_disabled: Called before each chunk. Once it returns true, writes are not limited anymore.
            clock: Function that returns the time in seconds.
            sleep: Function that sleeps for a number of seconds.

        Raises MesetaError if the limit is below `MIN_BYTES_PER_S`.
        """
        self._max_bytes_per_s = max_bytes_per_s
        self.set_num_writers(1)
        self._is_disabled, self._clock, self._sleep = is_disabled, clock, sleep
        self._next_write_s = clock()
        self._lock = threading.Lock()

    def set_num_writers(self, num_writers: int) -> None:
        """Set the number of ranks that write, which have equal shares of the limit.

        Raises MesetaError if a share is below `MIN_BYTES_PER_S`.
        """
        self._rank_bytes_per_s = self._max_bytes_per_s / num_writers
        if not self._rank_bytes_per_s >= MIN_BYTES_PER_S:
            raise MesetaError(
                f"checkpoint: a limit of {self._max_bytes_per_s:,.0f} bytes per second is too low for {num_writers} "
                f"writing ranks; allow at least {MIN_BYTES_PER_S:,} for each"
            )

    def chunk_bytes(self, most: int) -> int:
        """Return the number of bytes to write at a time, at most `most`."""
        return most if self._is_disabled() else min(most, int(self._rank_bytes_per_s / CHUNKS_PER_S))

    @contextmanager
    def throttle(self, num_bytes: int) -> Iterator[None]:
        """Context manager in which a chunk of at most `chunk_bytes` is written. Waits first until the chunk may
        start."""
        if self._is_disabled():
            yield
            return
        with self._lock:
            while (wait_s := self._next_write_s - self._clock()) > 0 and not self._is_disabled():
                self._sleep(wait_s)
            self._next_write_s = self._clock() + num_bytes / (TARGET_SHARE * self._rank_bytes_per_s)
            yield
