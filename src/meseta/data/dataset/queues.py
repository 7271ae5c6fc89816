"""Queue of rows that are added and taken in different amounts."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import pyarrow as pa


class RowQueue:
    """Queue of rows in record batches with the same schema. Taken rows share the memory of the added batches."""

    def __init__(self, batches: Sequence[pa.RecordBatch] = ()) -> None:
        self.batches = list(batches)
        self.num_rows = sum(batch.num_rows for batch in self.batches)

    def add(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)
        self.num_rows += batch.num_rows

    def take(self, num_rows: int) -> pa.Table:
        """Remove and return the first `num_rows` rows, which the queue must have."""
        table = pa.Table.from_batches(self.batches)
        self.batches = [batch for batch in table.slice(num_rows).to_batches() if batch.num_rows]
        self.num_rows -= num_rows
        return table.slice(0, num_rows)


Result = TypeVar("Result")


def run_in_order(pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], Result]], num_ahead: int) -> Iterator[Result]:
    """Run `jobs` in `pool` and yield their results in order. At most `num_ahead` jobs run ahead of the consumer."""
    running: deque[Future[Result]] = deque()
    for job in jobs:
        running.append(pool.submit(job))
        if len(running) >= num_ahead:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


T = TypeVar("T")


class PrefetchIterator(Generic[T]):
    """Iterator over the same items in the same order, made by a background thread that starts immediately.

    At most `num_ahead` items are buffered. With 0 there is no thread, and items are made on request. An exception of
    `items` is raised here unchanged, after the items before it. The thread ends after the last item, and when this
    iterator is closed or deleted.
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
            # The box must not keep the item alive.
            return made.pop()
        self.close()
        raise StopIteration if isinstance(made, _EndOfItems) else made

    def close(self) -> None:
        """Stop the thread. Buffered items are lost, and the iterator has no further items."""
        self._stopped.set()
        self._items = iter(()) if self._items is not None else None
        if self._thread is not None:
            with contextlib.suppress(queue.Empty):  # The thread may wait for free space in the queue.
                while True:
                    self._ready.get_nowait()
            self._thread.join()
            self._thread = None

    def __del__(self) -> None:
        # At interpreter shutdown the thread does not run any more, and since Python 3.13 join would wait for it.
        if not sys.is_finalizing():
            self.close()


class _EndOfItems(Exception):
    """Marks the end of the items."""


# A list from which the consumer removes the item. If the producing thread kept the item alive, it would free the batch
# later, and freeing takes the interpreter lock several times.
def _box(item: T) -> list[T]:
    return [item]


def _produce(items: Iterator[T], ready: queue.Queue[list[T] | BaseException], stopped: threading.Event) -> None:
    # The thread that sets `stopped` must empty the queue, so that `put` never blocks forever.
    try:
        for made in map(_box, items):
            ready.put(made)
            if stopped.is_set():
                return
        ready.put(_EndOfItems())
    except BaseException as error:
        ready.put(error)
