"""Decoded windows that ranks are being sent: decoded once for all of them, within a bound on their bytes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from meseta.data.read.options import Check, unchecked
from meseta.data.read.served.messages import WhyAgain
from meseta.readers.cancelling import WAIT_S, CancelledCall

IDLE_S = 5.0
"""A window that nobody is being sent makes room for others after so long."""
STILL_S = 30.0
"""So does one after so long of which nobody has taken rows who is being sent it: a trainer that stands still, or whose
machine has gone, of which a server is not told for hours."""

MOST_UNFINISHED = 65_536
"""Windows that are remembered as decoded and not had by all."""

Content = TypeVar("Content")


@dataclass
class _HeldWindow(Generic[Content]):
    place: tuple[int, int]
    num_bytes: int
    """As estimated, then as it is."""
    takers: Collection[int]
    """Ranks that will ask for it."""
    had: set[int] = field(default_factory=set)
    """Those of them that have had all of it."""
    content: Content | None = None
    problem: Exception | None = None
    num_streams: int = 0
    """Ranks that are being sent it."""
    moved_s: float = field(default_factory=time.monotonic)
    """When rows of it were taken last."""


def forget_oldest(entries: dict[Any, Any], most: int) -> None:
    """Leave so many entries, those that were put in last."""
    while len(entries) > most:
        entries.pop(next(iter(entries)))


class WindowStore(Generic[Content]):
    """Keeps a window from when a rank first asks for it until every rank has had it.

    A new one waits until there is room, but for one that lies before all others of its order that are held: ranks go
    forward together, so that those others will not go before it came. One more than the bound is thus held at most.
    """

    def __init__(self, most_bytes: int, size_of: Callable[[Content], int]) -> None:
        self.most_bytes = most_bytes
        self.num_decoded = 0
        self.num_again = Counter[WhyAgain]()
        """Windows that were decoded once more before all ranks had them, by why they were let go."""
        self._size_of = size_of
        self._held: dict[tuple[Hashable, tuple[int, int]], _HeldWindow[Content]] = {}
        self._unfinished: dict[tuple[Hashable, tuple[int, int]], WhyAgain | None] = {}
        """Why it was let go; None while it is held."""
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Of all windows that are held."""
        with self._changed:
            return sum(held.num_bytes for held in self._held.values())

    @property
    def num_held(self) -> int:
        """Windows that are held, or being decoded."""
        with self._changed:
            return len(self._held)

    @contextmanager
    def window(
        self,
        order: Hashable,
        place: tuple[int, int],
        takers: Collection[int],
        taker: int,
        num_bytes: int,
        decode: Callable[[Check], Content],
        check: Check = unchecked,
    ) -> Iterator[Callable[[], Content]]:
        """The window at `place`, (epoch, number), of an order, decoded unless it is held: what is given is asked for it
        whenever rows are taken, and decodes it once more where it has made room meanwhile. `takers`: the ranks that
        will ask for it; `taker` has had it when this is left without an exception. Raises what `decode` raises, and
        `CancelledCall` of `check`; `decode` is given a check that raises it too, unless others wait for the window."""
        key = (order, place)

        def join() -> _HeldWindow[Content]:
            return self._join(key, takers, num_bytes, decode, check)

        held = join()

        def content() -> Content:
            nonlocal held
            while True:
                with self._changed:
                    held.moved_s = time.monotonic()
                    if held.content is not None:
                        return held.content
                held = join()

        try:
            yield content
            if taker in held.takers:
                held.had.add(taker)
        finally:
            self._leave(key, held)

    def _join(
        self,
        key: tuple[Hashable, tuple[int, int]],
        takers: Collection[int],
        num_bytes: int,
        decode: Callable[[Check], Content],
        check: Check,
    ) -> _HeldWindow[Content]:
        """Begin to be sent a window, which is there then."""
        while True:
            check()
            held, is_new = self._hold(key, takers, num_bytes, check)
            try:
                if is_new:
                    self._decode(key, held, decode, check)
                if self._comes(key, held, check):
                    return held
            except CancelledCall:
                self._leave(key, held)
                raise
            self._leave(key, held)
            if held.problem is not None and not isinstance(held.problem, CancelledCall):  # of another caller
                raise held.problem

    def _hold(
        self, key: tuple[Hashable, tuple[int, int]], takers: Collection[int], num_bytes: int, check: Check
    ) -> tuple[_HeldWindow[Content], bool]:
        """A window, once there is room, and whether it is a new one."""
        order, place = key
        with self._changed:
            held = self._held.get(key)
            while held is None and not self._has_room(order, place, num_bytes):
                self._changed.wait(WAIT_S)
                check()
                held = self._held.get(key)
            is_new = held is None
            if held is None:
                held = self._held[key] = _HeldWindow(place, num_bytes, takers)
            held.num_streams += 1
            return held, is_new

    def _comes(self, key: tuple[Hashable, tuple[int, int]], held: _HeldWindow[Content], check: Check) -> bool:
        """Wait until somebody has decoded a window; whether it is there, and has neither failed nor made room."""
        with self._changed:
            while held.content is None and self._held.get(key) is held:
                self._changed.wait(WAIT_S)
                check()
            return held.content is not None

    def _leave(self, key: tuple[Hashable, tuple[int, int]], held: _HeldWindow[Content]) -> None:
        with self._changed:
            held.num_streams -= 1
            held.moved_s = time.monotonic()
            if not held.num_streams and len(held.had) == len(held.takers):
                self._drop(key, held)
                self._unfinished.pop(key, None)
            self._changed.notify_all()

    def _decode(
        self,
        key: tuple[Hashable, tuple[int, int]],
        held: _HeldWindow[Content],
        decode: Callable[[Check], Content],
        check: Check,
    ) -> None:
        def is_wanted() -> None:
            if held.num_streams == 1:  # this one; others take what it decodes, whether it wants it or not
                check()

        try:
            content = decode(is_wanted)
        except Exception as error:
            with self._changed:
                held.problem = error
                self._drop(key, held)
                self._changed.notify_all()
            return
        with self._changed:
            held.content, held.num_bytes, held.moved_s = content, self._size_of(content), time.monotonic()
            self.num_decoded += 1
            if why := self._unfinished.pop(key, None):
                self.num_again[why] += 1
            self._unfinished[key] = None
            forget_oldest(self._unfinished, MOST_UNFINISHED)
            self._changed.notify_all()

    def _drop(self, key: tuple[Hashable, tuple[int, int]], held: _HeldWindow[Content]) -> None:
        if self._held.get(key) is held:
            del self._held[key]

    def _has_room(self, order: Hashable, place: tuple[int, int], num_bytes: int) -> bool:
        """Make room for a window, if that takes none that somebody is being sent, or waits for before it."""
        now_s = time.monotonic()
        mine = [held for (its_order, _), held in self._held.items() if its_order == order]
        if all(held.place > place for held in mine):
            return True
        for key, held in sorted(self._held.items(), key=lambda item: item[1].place, reverse=True):
            if sum(each.num_bytes for each in self._held.values()) + num_bytes <= self.most_bytes:
                break
            is_behind, still_s = key[0] == order and held.place > place, now_s - held.moved_s
            is_idle = not held.num_streams and (is_behind or still_s > IDLE_S)
            if is_idle or (held.content is not None and still_s > STILL_S):
                del self._held[key]
                held.content = None
                if key in self._unfinished:
                    self._unfinished[key] = "room" if is_behind else "idle"
        return sum(held.num_bytes for held in self._held.values()) + num_bytes <= self.most_bytes
