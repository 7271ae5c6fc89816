"""Items made ahead by a background thread."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class PrefetchIterator(Generic[T]):
    """The same items in the same order; the thread makes them from now on, at most `num_ahead` of them waiting.

    With `num_ahead` 0 there is no thread, and each is made when it is asked for. An exception of `items` is raised
    here as it is, after the items before it. The thread ends when the last item was taken, and when this iterator is
    closed or dropped. Nothing here holds an item that was taken: to free a batch while the thread wakes to make the
    next one is to wait for the interpreter's lock, several times.
    """

    def __init__(self, items: Iterator[T], num_ahead: int) -> None:
        self._items: Iterator[T] | None = items if num_ahead < 1 else None
        self._ready: queue.Queue[list[T] | BaseException] = queue.Queue(num_ahead)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if self._items is None:
            # A daemon, so that an iterator still held at exit does not keep the process alive.
            thread = threading.Thread(
                target=_produce, args=(items, self._ready, self._stopped), name="meseta-prefetch", daemon=True
            )
            thread.start()
            self._thread = thread

    def __iter__(self) -> PrefetchIterator[T]:
        return self

    def __next__(self) -> T:
        if self._items is not None:
            return next(self._items)
        if self._thread is None:
            raise StopIteration
        made = self._ready.get()
        if isinstance(made, list):
            return made.pop()
        self.close()
        raise StopIteration if isinstance(made, _EndOfItems) else made

    def close(self) -> None:
        """End the thread; what it has made is lost, and no item comes any more."""
        self._stopped.set()
        self._items = iter(()) if self._items is not None else None
        if self._thread is not None:
            with contextlib.suppress(queue.Empty):  # room, for the thread may wait for it
                while True:
                    self._ready.get_nowait()
            self._thread.join()
            self._thread = None

    def __del__(self) -> None:
        # When the interpreter ends, the thread does not come to run any more, and from Python 3.13 on is waited for.
        if not sys.is_finalizing():
            self.close()


class _EndOfItems(Exception):
    """Marks the end of the items."""


def _box(item: T) -> list[T]:
    """A list to take the item out of, so that the thread that made it does not hold it."""
    return [item]


def _produce(items: Iterator[T], ready: queue.Queue[list[T] | BaseException], stopped: threading.Event) -> None:
    """Whoever sets `stopped` makes room afterwards, so that no put waits for ever."""
    try:
        for made in map(_box, items):
            ready.put(made)
            if stopped.is_set():
                return
        ready.put(_EndOfItems())
    except BaseException as error:
        ready.put(error)
