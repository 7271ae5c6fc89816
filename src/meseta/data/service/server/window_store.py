"""Cancellation of work for a call that its caller has cancelled or whose deadline has passed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pyarrow import flight

from meseta.data.read.options import CancellationCheck, never_cancelled
from meseta.data.service.messages import RedecodeReason

CHECK_INTERVAL_S = 0.5
"""Seconds between two checks while a thread waits."""


class CancelledCall(Exception):
    """Error that ends the work for a cancelled call."""


def cancellation_check(context: flight.ServerCallContext) -> CancellationCheck:
    """Return the check of a call, which is valid until the call ends."""

    def check() -> None:
        if context.is_cancelled():
            raise CancelledCall

    return check


@contextmanager
def acquire(lock: threading.Lock, check: CancellationCheck) -> Iterator[None]:
    """Context manager that holds `lock`. Raises `CancelledCall` while it waits."""
    while not lock.acquire(timeout=CHECK_INTERVAL_S):
        check()
    try:
        yield
    finally:
        lock.release()


IDLE_TIMEOUT_S = 5.0
"""Seconds after which a window that is not being sent may be evicted for a window of another order."""
STALLED_TIMEOUT_S = 30.0
"""Seconds without progress after which a window may be evicted although it is being sent."""
MAX_UNFINISHED = 65_536
"""Maximum number of decoded windows that are remembered because some rank has not read them."""

Content = TypeVar("Content")


@dataclass
class _WindowEntry(Generic[Content]):
    """Window that is buffered or being decoded."""

    position: tuple[int, int]
    num_bytes: int
    """Estimated size, or the actual size after decoding."""
    ranks: Collection[int]
    """Ranks that read the window."""
    finished_ranks: set[int] = field(default_factory=set)
    """Ranks that have read the window to its end."""
    content: Content | None = None
    error: Exception | None = None
    num_streams: int = 0
    """Number of ranks to which the window is being sent."""
    last_progress_s: float = field(default_factory=time.monotonic)
    """Time at which a rank last took rows."""


def evict_oldest(entries: dict[Any, Any], most: int) -> None:
    """Remove the entries that were inserted first until at most `most` remain."""
    while len(entries) > most:
        entries.pop(next(iter(entries)))


class WindowStore(Generic[Content]):
    """Thread-safe buffer that keeps a window from the first request until all ranks have read it.

    A new window waits for space, unless it precedes all buffered windows of its order. The buffer may therefore exceed
    its capacity by one window.
    """

    # Ranks advance together. The windows after a missing one are not released before it is read, so that waiting for
    # their space would be a deadlock.

    def __init__(self, most_bytes: int, size_of: Callable[[Content], int]) -> None:
        self.max_bytes = most_bytes
        self.num_decoded = 0
        self.num_redecoded = Counter[RedecodeReason]()
        """Number of windows that were decoded again before all ranks had read them, by reason of their eviction."""
        self._size_of = size_of
        self._entries: dict[tuple[Hashable, tuple[int, int]], _WindowEntry[Content]] = {}
        self._unfinished: dict[tuple[Hashable, tuple[int, int]], RedecodeReason | None] = {}
        """Reason of eviction of each decoded window that some rank has not read. `None` while it is buffered."""
        self._changed = threading.Condition()

    @property
    def buffered_bytes(self) -> int:
        """Total size of buffered windows, with estimates for those being decoded."""
        with self._changed:
            return sum(entry.num_bytes for entry in self._entries.values())

    @property
    def num_buffered(self) -> int:
        """Number of windows that are buffered or being decoded."""
        with self._changed:
            return len(self._entries)

    @contextmanager
    def window(
        self,
        order: Hashable,
        place: tuple[int, int],
        takers: Collection[int],
        taker: int,
        num_bytes: int,
        decode: Callable[[CancellationCheck], Content],
        check: CancellationCheck = never_cancelled,
    ) -> Iterator[Callable[[], Content]]:
        """Context manager that sends a window to one rank. Yields a function that returns the decoded window.

        Call the function again for each group of rows and keep no reference to its result. If the window was evicted,
        the function decodes it again. Leaving the context without an exception means that the rank has read the window.
        Raises the error of `decode`, and the `CancelledCall` of `check`.

        Args:
            order: Identity of the order of rows.
            place: Epoch, and index of the window within it.
            takers: Ranks that read the window.
            taker: Rank to which the window is sent.
            num_bytes: Estimated size of the decoded window.
            decode: Function that decodes the window. It is given a check that raises `CancelledCall`, unless other
                ranks wait for the window.
            check: Function that raises `CancelledCall` if this call was cancelled.
        """
        key = (order, place)

        def open_stream() -> _WindowEntry[Content]:
            return self._open_stream(key, takers, num_bytes, decode, check)

        entry = open_stream()

        def content() -> Content:
            nonlocal entry
            while True:
                with self._changed:
                    entry.last_progress_s = time.monotonic()
                    if entry.content is not None:
                        return entry.content
                entry = open_stream()

        try:
            yield content
            if taker in entry.ranks:
                entry.finished_ranks.add(taker)
        finally:
            self._close_stream(key, entry)

    def _open_stream(
        self,
        key: tuple[Hashable, tuple[int, int]],
        takers: Collection[int],
        num_bytes: int,
        decode: Callable[[CancellationCheck], Content],
        check: CancellationCheck,
    ) -> _WindowEntry[Content]:
        """Count the caller as a stream of a window, and return its decoded entry."""
        while True:
            check()
            entry, is_new = self._reserve(key, takers, num_bytes, check)
            try:
                if is_new:
                    self._decode(key, entry, decode, check)
                if self._wait_until_decoded(key, entry, check):
                    return entry
            except CancelledCall:
                self._close_stream(key, entry)
                raise
            self._close_stream(key, entry)
            # After the cancellation of another caller, this one decodes the window.
            if entry.error is not None and not isinstance(entry.error, CancelledCall):
                raise entry.error

    def _reserve(
        self, key: tuple[Hashable, tuple[int, int]], takers: Collection[int], num_bytes: int, check: CancellationCheck
    ) -> tuple[_WindowEntry[Content], bool]:
        """Wait for space, and return (entry, is_new). The caller decodes a new entry."""
        order, place = key
        with self._changed:
            entry = self._entries.get(key)
            while entry is None and not self._evict_for(order, place, num_bytes):
                self._changed.wait(CHECK_INTERVAL_S)
                check()
                entry = self._entries.get(key)
            is_new = entry is None
            if entry is None:
                entry = self._entries[key] = _WindowEntry(place, num_bytes, takers)
            entry.num_streams += 1
            return entry, is_new

    def _wait_until_decoded(
        self, key: tuple[Hashable, tuple[int, int]], entry: _WindowEntry[Content], check: CancellationCheck
    ) -> bool:
        """Wait for the thread that decodes the window. Returns False if decoding failed or the entry was evicted."""
        with self._changed:
            while entry.content is None and self._entries.get(key) is entry:
                self._changed.wait(CHECK_INTERVAL_S)
                check()
            return entry.content is not None

    def _close_stream(self, key: tuple[Hashable, tuple[int, int]], entry: _WindowEntry[Content]) -> None:
        with self._changed:
            entry.num_streams -= 1
            entry.last_progress_s = time.monotonic()
            if not entry.num_streams and len(entry.finished_ranks) == len(entry.ranks):
                self._remove(key, entry)
                self._unfinished.pop(key, None)
            self._changed.notify_all()

    def _decode(
        self,
        key: tuple[Hashable, tuple[int, int]],
        entry: _WindowEntry[Content],
        decode: Callable[[CancellationCheck], Content],
        check: CancellationCheck,
    ) -> None:
        def is_wanted() -> None:
            if entry.num_streams == 1:  # Other streams need the window even if this call was cancelled.
                check()

        try:
            content = decode(is_wanted)
        except Exception as error:
            with self._changed:
                entry.error = error
                self._remove(key, entry)
                self._changed.notify_all()
            return
        with self._changed:
            entry.content, entry.num_bytes, entry.last_progress_s = content, self._size_of(content), time.monotonic()
            self.num_decoded += 1
            if reason := self._unfinished.pop(key, None):
                self.num_redecoded[reason] += 1
            self._unfinished[key] = None
            evict_oldest(self._unfinished, MAX_UNFINISHED)
            self._changed.notify_all()

    def _remove(self, key: tuple[Hashable, tuple[int, int]], entry: _WindowEntry[Content]) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]

    def _evict_for(self, order: Hashable, place: tuple[int, int], num_bytes: int) -> bool:
        """Evict idle and stalled windows until a new window fits. Returns whether it may be decoded."""
        now_s = time.monotonic()
        same_order = [entry for (entry_order, _), entry in self._entries.items() if entry_order == order]
        # See the class for a window that precedes all others.
        if all(entry.position > place for entry in same_order):
            return True
        # Windows that are needed last are evicted first.
        for key, entry in sorted(self._entries.items(), key=lambda item: item[1].position, reverse=True):
            if sum(other.num_bytes for other in self._entries.values()) + num_bytes <= self.max_bytes:
                break
            is_later, idle_s = key[0] == order and entry.position > place, now_s - entry.last_progress_s
            is_idle = not entry.num_streams and (is_later or idle_s > IDLE_TIMEOUT_S)
            # A server learns only after hours that the machine of a trainer is gone.
            if is_idle or (entry.content is not None and idle_s > STALLED_TIMEOUT_S):
                del self._entries[key]
                entry.content = None
                if key in self._unfinished:
                    self._unfinished[key] = "room" if is_later else "idle"
        return sum(entry.num_bytes for entry in self._entries.values()) + num_bytes <= self.max_bytes
