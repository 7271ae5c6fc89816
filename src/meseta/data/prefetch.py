"""Items made ahead by a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.1


def prefetch(items: Iterator[T], num_ahead: int) -> Generator[T, None, None]:
    """The same items in the same order, at most `num_ahead` of them waiting; 0 makes each when it is asked for.

    An exception of `items` is raised here as it is, after the items before it. The thread ends when the last item was
    taken, and when this iterator is closed or dropped.
    """
    if num_ahead < 1:
        yield from items
        return
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(num_ahead)
    stopped = threading.Event()
    # A daemon, so that an iterator still held at exit does not keep the process alive.
    thread = threading.Thread(target=_produce, args=(items, ready, stopped), name="meseta-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, _Exhausted):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()


class _Exhausted(Exception):
    """Marks the end of the items."""


def _produce(
    items: Iterator[T], ready: queue.Queue[tuple[T | None, BaseException | None]], stopped: threading.Event
) -> None:
    def put(entry: tuple[T | None, BaseException | None]) -> bool:
        while not stopped.is_set():
            try:
                ready.put(entry, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    try:
        for item in items:
            if not put((item, None)):
                return
        put((None, _Exhausted()))
    except BaseException as error:
        put((None, error))
