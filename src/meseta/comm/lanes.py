"""Queues of collectives that make progress while a rank computes, and give way to urgent collectives.

All ranks submit the same collectives to a lane in the same order.
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

# lane     process group    collectives                                  gives way to
# ------   --------------   ------------------------------------------   -----------------------------------------
# rows     the run's        ids, rows and their gradients, in the        -
#                           calling thread
# sums     its own          all-reduce of data that all ranks have, in   row exchanges that this rank waits for,
#                           chunks, in a background thread               before each chunk

JOIN_TIMEOUT_S = 5.0
"""Seconds to wait for the thread of a lane at shutdown."""
YIELD_TIMEOUT_S = 0.5
"""Maximum seconds for which a chunk gives way. The limit prevents deadlocks between ranks that take turns in
waiting."""


class RowPriority:
    """Counter of the row exchanges that this rank waits for, to which sums give way. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_waiting = 0

    @contextmanager
    def row_wait(self) -> Iterator[None]:
        """Context manager to enter while this rank waits for a row exchange."""
        with self._changed:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_waiting -= 1
                self._changed.notify_all()

    def yield_to_row_exchange(self) -> None:
        """Block until this rank waits for no row exchange, at most `YIELD_TIMEOUT_S` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting, YIELD_TIMEOUT_S)


class LaneWork:
    """Result of `Lane.submit`."""

    def __init__(self, lane: Lane, carry: Callable[[], None]) -> None:
        self.done_s: float | None = None
        """Time at which the work finished, by `time.perf_counter`. `None` until then."""
        self._lane, self._function = lane, carry
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Block until the work is done, and raise its error. Runs the queued work of the lane in this thread."""
        while self.done_s is None:
            self._lane.advance(self)
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error
            # After an error, the transport may still write to the scratch memory.
            self._lane.discard_scratch()
        # Release the buffers that the function refers to, so that only the caller holds them.
        del self._function
        self.done_s = time.perf_counter()


class Lane:
    """Thread-safe queue of collectives in one process group. They run one at a time, in the order of submission."""

    def __init__(self, name: str, group: Any) -> None:
        """Create a lane that uses process group `group` of torch.distributed."""
        self.name, self.group = name, group
        self._queue: deque[LaneWork] = deque()
        """Work that has not started. Any thread may run the first entry if the lane is idle."""
        self._changed = threading.Condition()
        self._is_busy = False
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        """True to run the next entry in the lane's thread, False to stop the thread."""
        self._thread: threading.Thread | None = None
        self._scratch: Tensor | None = None

    def scratch(self, count: int, like: Tensor) -> Tensor:
        """Return memory for `count` received elements with the dtype and device of `like`.

        On CPUs, the next call returns the same memory.
        """
        # Memory is reused because touching fresh pages takes as long as a sum.
        if like.device.type != "cpu":
            return like.new_empty(count)
        num_bytes = count * like.element_size()
        if self._scratch is None or self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes].view(like.dtype)

    def submit(self, carry: Callable[[], None], *, in_background: bool = True) -> LaneWork:
        """Queue `carry`. It runs in the thread of this lane, or else in the first thread that waits for the result."""
        work = LaneWork(self, carry)
        self._queue.append(work)
        if in_background:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"meseta-{self.name}", daemon=True)
                self._thread.start()
            self._wakeups.put(True)
        return work

    def advance(self, awaited: LaneWork | None = None) -> None:
        """Run the next entry of the queue in this thread, as soon as the lane is idle.

        Returns when `awaited` is done, even if later entries are running.
        """
        # Other ranks may wait for this rank while a later entry runs.
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
        self._scratch = None

    def shutdown(self) -> None:
        """Stop the thread of this lane. If it waits for ranks that do not respond, it is abandoned."""
        if self._thread is not None:
            self._wakeups.put(False)
            self._thread.join(JOIN_TIMEOUT_S)
            self._thread = None

    def _serve(self) -> None:
        while self._wakeups.get():
            self.advance()
