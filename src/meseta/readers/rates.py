"""How fast counters of others have grown lately, and for how long this process has been busy."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

RATE_WINDOW_S = 10.0
"""Over so long, or as long as they are known, counters are looked at."""


class CounterHistory:
    """Counters that one peer tells now and then."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque()

    def update(self, now_s: float, *counters: float) -> None:
        """They stand so now; where one has fallen, they have begun anew."""
        if self._samples and any(new < old for new, old in zip(counters, self._samples[-1][1], strict=True)):
            self._samples.clear()
        self._samples.append((now_s, counters))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - RATE_WINDOW_S:
            self._samples.popleft()

    def recent_increase(self) -> tuple[float, ...]:
        """By how much each has grown over the last RATE_WINDOW_S, or since they are known."""
        if not self._samples:
            return ()
        (_, before), (_, now) = self._samples[0], self._samples[-1]
        return tuple(new - old for new, old in zip(now, before, strict=True))

    def rates(self) -> tuple[float, ...]:
        """The same of each second; 0 where they were told once."""
        if not self._samples:
            return ()
        seconds = self._samples[-1][0] - self._samples[0][0]
        return tuple(grown / seconds if seconds else 0.0 for grown in self.recent_increase())


class BusyTime:
    """Seconds in which at least one thread was at work. Threads may share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_active = 0
        self._since_s = self._seconds = 0.0

    @contextmanager
    def track(self) -> Iterator[None]:
        """While this thread is."""
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
        """Up to now."""
        with self._lock:
            return self._seconds + (self._clock() - self._since_s if self._num_active else 0.0)
