"""Base class of readers: batches by position, identical for any number of ranks and wherever rows are decoded."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.queues import PrefetchIterator
from meseta.data.read.batch import Batch, Position
from meseta.data.read.options import ReaderOptions
from meseta.data.read.rows import Rows
from meseta.data.read.selection import ExcludedRows
from meseta.data.read.slicing import BatchSlicer
from meseta.data.read.tensors import pad_batch, to_batch
from meseta.spec import MesetaError
from meseta.telemetry.span import RowWait, RowWaits

READER_FORMAT = "meseta.reader/1"

Prepared = TypeVar("Prepared")


@runtime_checkable
class EpochRowSource(Protocol):
    """Rows of one epoch in the order of the epoch."""

    def take(self, first: int, last: int) -> Rows:
        """Return rows first..last-1 of the epoch. Calls must be in ascending order."""
        ...

    def take_next_epoch(self) -> EpochRowSource | None:
        """Return the next epoch's rows if reading ahead has reached them, else `None`. The caller must close them."""
        ...

    def close(self) -> None: ...


class WaitTracker:
    """Cancellable waits of the thread that reads ahead, and statistics of its waits and of the consumer's."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._pending: dict[str, RowWait] = {}
        self._first_batch_s: float | None = None
        self._wait_start_s: float | None = None
        self._wait_s = 0.0

    def cancel(self) -> None:
        """Cancel the current wait and all later ones. May be called from any thread."""
        self._cancelled.set()

    def sleep(self, seconds: float) -> None:
        """Sleep. Raises WaitCancelled if `cancel` is called before or during the sleep."""
        if self._cancelled.wait(seconds):
            raise WaitCancelled

    def record(self, reader: str, wait: RowWait) -> None:
        """Add a wait for rows of a reader to the statistics of the next batch."""
        self._pending[reader] = self._pending.get(reader, RowWait()) + wait

    def begin_wait(self) -> None:
        """Record that the consumer starts to wait for a batch."""
        self._wait_start_s = time.monotonic()

    def end_wait(self, making_s: float) -> float:
        """Record the end of a wait for a batch that took `making_s` seconds of waiting for rows. Returns the share of
        `making_s` for which the consumer waited."""
        now_s = time.monotonic()
        waited_s = 0.0 if self._wait_start_s is None else now_s - self._wait_start_s
        self._wait_start_s = None
        # Reading ahead hides the rest of the time.
        share = min(waited_s / making_s, 1.0) if making_s else 0.0
        if self._first_batch_s is None:
            self._first_batch_s = now_s
        else:
            self._wait_s += share * making_s
        return share

    def wait_totals(self) -> tuple[float, float]:
        """Return (seconds the consumer waited for rows, seconds elapsed) since its first batch. May be called from any
        thread."""
        since_s, first_s, now_s = self._wait_start_s, self._first_batch_s, time.monotonic()
        if first_s is None:
            return 0.0, 0.0
        still_s = 0.0 if since_s is None else now_s - since_s
        return min(self._wait_s + still_s, now_s - first_s), now_s - first_s

    def pop_waits(self) -> dict[str, RowWait]:
        """Return and reset the waits of each reader since the last call."""
        waits, self._pending = self._pending, {}
        return waits


class WaitCancelled(Exception):
    """A wait was cancelled because its result is no longer needed."""


class TimedBatch(NamedTuple):
    """Batch with the waits for rows that making it took."""

    prepared: Any
    """The batch, or the result of `prepare`."""
    position: Position
    """Position after the batch."""
    waits: dict[str, RowWait]
    """Waits by reader. Empty if this process decodes the rows."""


class BatchIterator(Iterator[Prepared], Generic[Prepared]):
    """Iterator over a reader's batches, which advances its position. Reading ahead stops on close or deletion."""

    def __init__(
        self,
        ahead: PrefetchIterator[TimedBatch],
        move_on: Callable[[TimedBatch, WaitTracker], Prepared],
        waits: WaitTracker,
    ) -> None:
        """Create the iterator. `move_on` is called with each batch that is taken, and `waits` is used by the read-ahead
        thread."""
        self._prefetch, self._on_batch, self._waits = ahead, move_on, waits

    def __next__(self) -> Prepared:
        self._waits.begin_wait()
        return self._on_batch(next(self._prefetch), self._waits)  # No variable here keeps the batch alive.

    def close(self) -> None:
        """Stop the read-ahead thread. The iterator has no further batches."""
        self._waits.cancel()
        self._prefetch.close()

    def __del__(self) -> None:
        self._waits.cancel()  # The thread ends when its PrefetchIterator is deleted.


def check_rank(rank: int, num_ranks: int) -> None:
    """Raise MesetaError if `rank` is not in 0..num_ranks-1."""
    if not 0 <= rank < num_ranks:
        raise MesetaError(f"reader: rank must be in 0..{num_ranks - 1}, got {rank}")


class BatchReader(ABC):
    """Reader of the batches of one split for one rank, starting at any position.

        for batch in reader.epochs(3):      # or `for batch in reader.epoch():` for the rest of one epoch
            ...
            state = reader.get_state()      # JSON-able; on a new reader: reader.set_state(state)

    Global batch k of an epoch depends only on the files, the options without prefetch_batches, the epoch and k. Rank r
    gets its r-th contiguous slice, and the first batch_size % num_ranks ranks get one more sample. A slice may be
    empty, so that all ranks have the same number of batches. An epoch contains every row exactly once, except rows that
    filter, negative_keep or last_batch exclude.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        options: ReaderOptions,
        *,
        rank: int,
        num_ranks: int,
        num_rows: int,
        excluded_rows: ExcludedRows,
    ) -> None:
        self.dataset = dataset
        self.split = split
        self.options = options
        self.num_rows = num_rows
        self.excluded_rows = excluded_rows
        """Number of rows of the split that the options exclude."""
        self.position = Position(0, 0)
        """Position after the last returned batch."""
        self.row_waits = RowWaits()
        """Time for which the consumer waited for rows of other processes. A wait that reading ahead hides does not
        count. Empty if this process decodes the rows."""
        self._slicer = BatchSlicer(
            num_rows=num_rows,
            batch_size=options.batch_size,
            last_batch=options.last_batch,
            rank=rank,
            num_ranks=num_ranks,
        )

    @abstractmethod
    def _rows(self, epoch: int, row: int, waits: WaitTracker, num_epochs: int) -> EpochRowSource:
        """Return the rows of an epoch for this rank's slices of all batches from `row` on. Only `num_epochs` epochs are
        read ahead."""

    @property
    def num_batches(self) -> int:
        """Number of global batches in a whole epoch. It is the same on all ranks."""
        return self._slicer.num_batches_from(0)

    @property
    def num_remaining_batches(self) -> int:
        """Number of global batches from the current position to the end of its epoch."""
        return self._slicer.num_batches_from(self.position.row)

    @property
    def epoch_index(self) -> int:
        """Number of the epoch of the next batch, from 0."""
        return self.position.epoch

    def num_batches_until(self, position: Position) -> int:
        """Return the number of global batches from the start of the first epoch to a position."""
        return (position.epoch + 1) * self.num_batches - self._slicer.num_batches_from(position.row)

    def epoch(self) -> BatchIterator[Batch]:
        """Return the batches from the current position to the end of its epoch."""
        return self.epochs(self.position.epoch + 1)

    def epochs(self, num_epochs: int) -> BatchIterator[Batch]:
        """Return the batches from the current position to the end of epoch `num_epochs`, counted from the first epoch.

        Reading starts immediately. The position advances when a batch is returned, so prefetched batches do not count
        as consumed. If the loop ends early, the next call continues with the next batch.
        """
        return self.prepared_epochs(num_epochs, lambda batch: batch)

    def prepared_epochs(self, num_epochs: int, prepare: Callable[[Batch], Prepared]) -> BatchIterator[Prepared]:
        """Return the results of `prepare` for the batches of `epochs`. The thread that reads ahead calls it."""
        waits = WaitTracker()
        batches = self._produce(*self.position, num_epochs, waits, prepare)
        return BatchIterator(PrefetchIterator(batches, self.options.prefetch_batches), self._advance, waits)

    def get_state(self, position: Position | None = None) -> dict[str, Any]:
        """Return a position as plain data for JSON, by default that after the last returned batch. It is equal on all
        ranks and for every reader of these rows."""
        epoch, row = position or self.position
        chosen = {"filter": self.options.filter, "negative_keep": self.options.negative_keep}
        return {
            "format": READER_FORMAT,
            "split": self.split,
            "epoch": epoch,
            "row": row,
            "num_rows": self.num_rows,
            "shuffle": self.options.shuffle,
            "seed": self.options.seed,
            "window_rows": self.options.window_rows,
            **(chosen if self.options.excludes_rows else {}),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the row of a state from `get_state`. batch_size and num_ranks may differ, but the row order may
        not.

        Raises MesetaError if the split, seed, shuffle, window_rows or the selection of rows differ.
        """
        own_state, all_rows = self.get_state(), {"filter": None, "negative_keep": 1.0}
        for key, value in {**all_rows, **own_state}.items():
            if key not in state and key not in all_rows:
                raise MesetaError(f"reader state: key {key!r} is missing; use the result of get_state")
            saved = state.get(key, all_rows.get(key))
            if key not in ("epoch", "row") and saved != value:
                raise MesetaError(
                    f"reader state: it was saved with {key} {saved!r}, but this reader has {value!r}, so the order of "
                    "the rows differs; use the same data and options, or start again"
                )
        epoch, row = state["epoch"], state["row"]
        if not (isinstance(epoch, int) and isinstance(row, int) and epoch >= 0 and 0 <= row <= self.num_rows):
            raise MesetaError(f"reader state: epoch {epoch!r}, row {row!r} is not a position in {self.num_rows} rows")
        self.position = Position(epoch, row)

    def _advance(self, made: TimedBatch, waits: WaitTracker) -> Any:
        prepared, self.position, for_rows = made
        self.row_waits.add(for_rows, waits.end_wait(sum(wait.total_s for wait in for_rows.values())))
        return prepared

    def _produce(
        self, epoch: int, row: int, num_epochs: int, waits: WaitTracker, prepare: Callable[[Batch], Any]
    ) -> Iterator[TimedBatch]:
        following: EpochRowSource | None = None
        while epoch < num_epochs:
            with closing(following or self._rows(epoch, row, waits, num_epochs)) as rows:
                for left in range(self._slicer.num_batches_from(row), 0, -1):
                    # The position after the last batch of an epoch is the start of the next epoch.
                    after = Position(*((epoch, row + self.options.batch_size) if left > 1 else (epoch + 1, 0)))
                    # No variable here keeps the batch alive.
                    yield TimedBatch(
                        prepare(replace(self._make_batch(rows, row), position=after)), after, waits.pop_waits()
                    )
                    row += self.options.batch_size
                following = rows.take_next_epoch()
            epoch, row = epoch + 1, 0

    def _make_batch(self, rows: EpochRowSource, row: int) -> Batch:
        first, last, num_padding = self._slicer.slice_at(row)
        batch = to_batch(self.dataset, rows.take(first, last))
        is_short = self.options.last_batch == "pad" and row + self.options.batch_size > self.num_rows
        return pad_batch(batch, last - first + num_padding) if is_short else batch
