"""Recent rates of counters that peers report, and the busy time of this process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

RATE_WINDOW_S = 10.0
"""Length in seconds of the sliding window over which rates are computed."""


class CounterHistory:
    """Sliding window over the counters that one peer reports."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque()

    def update(self, now_s: float, *counters: float) -> None:
        """Add a report of all counters."""
        # A counter that decreases belongs to a restarted peer.
        if self._samples and any(new < old for new, old in zip(counters, self._samples[-1][1], strict=True)):
            self._samples.clear()
        self._samples.append((now_s, counters))
        # One report from before the window is kept, so that the history spans the whole window.
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - RATE_WINDOW_S:
            self._samples.popleft()

    def recent_increase(self) -> tuple[float, ...]:
        """Return the increase of each counter within the window. Empty before the first report."""
        if not self._samples:
            return ()
        (_, first), (_, last) = self._samples[0], self._samples[-1]
        return tuple(new - old for new, old in zip(last, first, strict=True))

    def rates(self) -> tuple[float, ...]:
        """Return the mean increase of each counter per second. It is 0 after one report."""
        if not self._samples:
            return ()
        seconds = self._samples[-1][0] - self._samples[0][0]
        return tuple(increase / seconds if seconds else 0.0 for increase in self.recent_increase())


class BusyTime:
    """Thread-safe timer of the seconds in which at least one thread was busy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_active = 0
        self._since_s = self._seconds = 0.0

    @contextmanager
    def track(self) -> Iterator[None]:
        """Context manager in which the calling thread is busy."""
        with self._lock:
            if not self._num_active:
                self._since_s = self._clock()
            self._num_active += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_active -= 1
                if not self._num_active:
                    self._seconds += self._clock() - self._since_s

    @property
    def seconds(self) -> float:
        """Busy time in seconds until now."""
        with self._lock:
            return self._seconds + (self._clock() - self._since_s if self._num_active else 0.0)
