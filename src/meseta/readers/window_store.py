"""Decoded windows that ranks are being sent: decoded once for all of them, within a bound on their bytes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from meseta.data.read.options import CancellationCheck, never_cancelled
from meseta.data.read.served.messages import RedecodeReason
from meseta.readers.cancellation import CHECK_INTERVAL_S, CancelledCall

IDLE_TIMEOUT_S = 5.0
"""A window that nobody is being sent makes room for others after so long."""
STALLED_TIMEOUT_S = 30.0
"""So does one after so long of which nobody has taken rows who is being sent it: a trainer that stands still, or whose
machine has gone, of which a server is not told for hours."""

MAX_UNFINISHED = 65_536
"""Windows that are remembered as decoded and not had by all."""

Content = TypeVar("Content")


@dataclass
class _WindowEntry(Generic[Content]):
    position: tuple[int, int]
    num_bytes: int
    """As estimated, then as it is."""
    ranks: Collection[int]
    """Ranks that will ask for it."""
    finished_ranks: set[int] = field(default_factory=set)
    """Those of them that have had all of it."""
    content: Content | None = None
    error: Exception | None = None
    num_streams: int = 0
    """Ranks that are being sent it."""
    last_progress_s: float = field(default_factory=time.monotonic)
    """When rows of it were taken last."""


def evict_oldest(entries: dict[Any, Any], most: int) -> None:
    """Leave so many entries, those that were put in last."""
    while len(entries) > most:
        entries.pop(next(iter(entries)))


class WindowStore(Generic[Content]):
    """Keeps a window from when a rank first asks for it until every rank has had it.

    A new one waits until there is room, but for one that lies before all others of its order that are held: ranks go
    forward together, so that those others will not go before it came. One more than the bound is thus held at most.
    """

    def __init__(self, most_bytes: int, size_of: Callable[[Content], int]) -> None:
        self.max_bytes = most_bytes
        self.num_decoded = 0
        self.num_redecoded = Counter[RedecodeReason]()
        """Windows that were decoded once more before all ranks had them, by why they were let go."""
        self._size_of = size_of
        self._entries: dict[tuple[Hashable, tuple[int, int]], _WindowEntry[Content]] = {}
        self._unfinished: dict[tuple[Hashable, tuple[int, int]], RedecodeReason | None] = {}
        """Why it was let go; None while it is held."""
        self._changed = threading.Condition()

    @property
    def buffered_bytes(self) -> int:
        """Of all windows that are held."""
        with self._changed:
            return sum(held.num_bytes for held in self._entries.values())

    @property
    def num_buffered(self) -> int:
        """Windows that are held, or being decoded."""
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
        """The window at `place`, (epoch, number), of an order, decoded unless it is held: what is given is asked for it
        whenever rows are taken, and decodes it once more where it has made room meanwhile. `takers`: the ranks that
        will ask for it; `taker` has had it when this is left without an exception. Raises what `decode` raises, and
        `CancelledCall` of `check`; `decode` is given a check that raises it too, unless others wait for the window."""
        key = (order, place)

        def join() -> _WindowEntry[Content]:
            return self._open_stream(key, takers, num_bytes, decode, check)

        held = join()

        def content() -> Content:
            nonlocal held
            while True:
                with self._changed:
                    held.last_progress_s = time.monotonic()
                    if held.content is not None:
                        return held.content
                held = join()

        try:
            yield content
            if taker in held.ranks:
                held.finished_ranks.add(taker)
        finally:
            self._close_stream(key, held)

    def _open_stream(
        self,
        key: tuple[Hashable, tuple[int, int]],
        takers: Collection[int],
        num_bytes: int,
        decode: Callable[[CancellationCheck], Content],
        check: CancellationCheck,
    ) -> _WindowEntry[Content]:
        """Begin to be sent a window, which is there then."""
        while True:
            check()
            held, is_new = self._reserve(key, takers, num_bytes, check)
            try:
                if is_new:
                    self._decode(key, held, decode, check)
                if self._wait_until_decoded(key, held, check):
                    return held
            except CancelledCall:
                self._close_stream(key, held)
                raise
            self._close_stream(key, held)
            if held.error is not None and not isinstance(held.error, CancelledCall):  # of another caller
                raise held.error

    def _reserve(
        self, key: tuple[Hashable, tuple[int, int]], takers: Collection[int], num_bytes: int, check: CancellationCheck
    ) -> tuple[_WindowEntry[Content], bool]:
        """A window, once there is room, and whether it is a new one."""
        order, place = key
        with self._changed:
            held = self._entries.get(key)
            while held is None and not self._evict_for(order, place, num_bytes):
                self._changed.wait(CHECK_INTERVAL_S)
                check()
                held = self._entries.get(key)
            is_new = held is None
            if held is None:
                held = self._entries[key] = _WindowEntry(place, num_bytes, takers)
            held.num_streams += 1
            return held, is_new

    def _wait_until_decoded(
        self, key: tuple[Hashable, tuple[int, int]], held: _WindowEntry[Content], check: CancellationCheck
    ) -> bool:
        """Wait until somebody has decoded a window; whether it is there, and has neither failed nor made room."""
        with self._changed:
            while held.content is None and self._entries.get(key) is held:
                self._changed.wait(CHECK_INTERVAL_S)
                check()
            return held.content is not None

    def _close_stream(self, key: tuple[Hashable, tuple[int, int]], held: _WindowEntry[Content]) -> None:
        with self._changed:
            held.num_streams -= 1
            held.last_progress_s = time.monotonic()
            if not held.num_streams and len(held.finished_ranks) == len(held.ranks):
                self._remove(key, held)
                self._unfinished.pop(key, None)
            self._changed.notify_all()

    def _decode(
        self,
        key: tuple[Hashable, tuple[int, int]],
        held: _WindowEntry[Content],
        decode: Callable[[CancellationCheck], Content],
        check: CancellationCheck,
    ) -> None:
        def is_wanted() -> None:
            if held.num_streams == 1:  # this one; others take what it decodes, whether it wants it or not
                check()

        try:
            content = decode(is_wanted)
        except Exception as error:
            with self._changed:
                held.error = error
                self._remove(key, held)
                self._changed.notify_all()
            return
        with self._changed:
            held.content, held.num_bytes, held.last_progress_s = content, self._size_of(content), time.monotonic()
            self.num_decoded += 1
            if why := self._unfinished.pop(key, None):
                self.num_redecoded[why] += 1
            self._unfinished[key] = None
            evict_oldest(self._unfinished, MAX_UNFINISHED)
            self._changed.notify_all()

    def _remove(self, key: tuple[Hashable, tuple[int, int]], held: _WindowEntry[Content]) -> None:
        if self._entries.get(key) is held:
            del self._entries[key]

    def _evict_for(self, order: Hashable, place: tuple[int, int], num_bytes: int) -> bool:
        """Make room for a window, if that takes none that somebody is being sent, or waits for before it."""
        now_s = time.monotonic()
        mine = [held for (its_order, _), held in self._entries.items() if its_order == order]
        if all(held.position > place for held in mine):
            return True
        for key, held in sorted(self._entries.items(), key=lambda item: item[1].position, reverse=True):
            if sum(each.num_bytes for each in self._entries.values()) + num_bytes <= self.max_bytes:
                break
            is_behind, still_s = key[0] == order and held.position > place, now_s - held.last_progress_s
            is_idle = not held.num_streams and (is_behind or still_s > IDLE_TIMEOUT_S)
            if is_idle or (held.content is not None and still_s > STALLED_TIMEOUT_S):
                del self._entries[key]
                held.content = None
                if key in self._unfinished:
                    self._unfinished[key] = "room" if is_behind else "idle"
        return sum(held.num_bytes for held in self._entries.values()) + num_bytes <= self.max_bytes
