"""Lanes: exchanges of several phases, which go on by themselves while a rank computes and let urgent ones pass.

    lane     process group    carries                                      lets pass
    ------   --------------   ------------------------------------------   -----------------------------------
    rows     the run's        ids, rows and their gradients, in the        -
                              thread that needs them
    sums     its own          sums of what every rank has alike, in        rows that this rank is waiting for,
                              pieces, in a thread of its own               before each piece

A lane does one thing after the other, in the order in which they were begun: alike on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

JOIN_TIMEOUT_S = 5.0
"""How long a lane may take to end when a group is left."""
YIELD_TIMEOUT_S = 0.5
"""How long a piece holds back at most: ranks that take turns in waiting never wait in a circle."""


class RowPriority:
    """Whether a rank stands still for rows, so that sums hold back."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_waiting = 0

    @contextmanager
    def row_wait(self) -> Iterator[None]:
        """While this rank waits for rows."""
        with self._changed:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_waiting -= 1
                self._changed.notify_all()

    def yield_to_row_exchange(self) -> None:
        """Return when this rank waits for no rows, or after PASS_S."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting, YIELD_TIMEOUT_S)


class LaneWork:
    """What a lane has begun."""

    def __init__(self, lane: Lane, carry: Callable[[], None]) -> None:
        self.done_s: float | None = None
        """When it was done, by time.perf_counter(); None until then."""
        self._lane, self._function = lane, carry
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until it is done; raise what it has raised. What its lane has not come to is done in this thread."""
        while self.done_s is None:
            self._lane.advance(self)
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Do it."""
        try:
            self._function()
        except BaseException as error:
            self._error = error
            self._lane.discard_scratch()  # the transport may still write there
        del self._function  # what it sends and receives is the caller's alone
        self.done_s = time.perf_counter()


class Lane:
    """Exchanges of one kind over a process group of their own, one after the other."""

    def __init__(self, name: str, group: Any) -> None:
        """`group` is that of torch.distributed."""
        self.name, self.group = name, group
        self._queue: deque[LaneWork] = deque()
        """In their order; whoever comes when nothing is under way takes the first."""
        self._changed = threading.Condition()
        self._is_busy = False
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        """For the thread: to go on, or to end."""
        self._thread: threading.Thread | None = None
        self._scratch: Tensor | None = None

    def scratch(self, count: int, like: Tensor) -> Tensor:
        """[count] numbers as those of `like`: memory for what comes in, until this is called again. It is kept, since
        fresh pages cost as much as a sum does."""
        if like.device.type != "cpu":
            return like.new_empty(count)
        num_bytes = count * like.element_size()
        if self._scratch is None or self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes].view(like.dtype)

    def submit(self, carry: Callable[[], None], *, in_background: bool = True) -> LaneWork:
        """Do `carry` after what was begun before: in a thread of this lane, or by whoever waits for it first."""
        work = LaneWork(self, carry)
        self._queue.append(work)
        if in_background:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"meseta-{self.name}", daemon=True)
                self._thread.start()
            self._wakeups.put(True)
        return work

    def advance(self, awaited: LaneWork | None = None) -> None:
        """Do the next thing, when none is under way. Who waits for `awaited` is not kept by what comes behind it: other
        ranks may be held up for this one meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy or (awaited is not None and awaited.done_s is not None))
            if self._is_busy or not self._queue or (awaited is not None and awaited.done_s is not None):
                return
            work, self._is_busy = self._queue.popleft(), True
        try:
            work.run()
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def discard_scratch(self) -> None:
        """Take other memory from here."""
        self._scratch = None

    def shutdown(self) -> None:
        """Take nothing more. Where it waits for ranks that do not come, it is left behind."""
        if self._thread is not None:
            self._wakeups.put(False)
            self._thread.join(JOIN_TIMEOUT_S)
            self._thread = None

    def _serve(self) -> None:
        while self._wakeups.get():
            self.advance()
