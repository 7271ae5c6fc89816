"""What training, evaluation and prediction ask of a reader, whoever decodes: batches by position, the same for any
number of ranks."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from meseta.data.batch import Batch
from meseta.data.dataset.dataset import Dataset
from meseta.data.position import Position
from meseta.data.read.options import ReaderOptions
from meseta.data.read.prefetch import PrefetchIterator
from meseta.data.read.rows import Rows
from meseta.data.read.selection import ExcludedRows
from meseta.data.read.slicing import BatchSlicer
from meseta.data.read.tensors import pad_batch, to_batch
from meseta.spec import MesetaError
from meseta.telemetry.row_waits import RowWait, RowWaits

READER_FORMAT = "meseta.reader/1"


@runtime_checkable
class EpochRowSource(Protocol):
    """Rows of one epoch by their place in its order."""

    def take(self, first: int, last: int) -> Rows:
        """Rows first..last-1 of the epoch; calls come in ascending order."""
        ...

    def take_next_epoch(self) -> EpochRowSource | None:
        """The rows of the epoch that follows, where reading ahead has come to them; they are no more closed with
        these."""
        ...

    def close(self) -> None:
        """End what reads ahead."""
        ...


class WaitTracker:
    """What a thread that reads ahead waits by, so that who closes it need not wait as well; and what it has waited
    for."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._pending: dict[str, RowWait] = {}
        self._first_batch_s: float | None = None
        self._wait_start_s: float | None = None
        self._wait_s = 0.0

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._cancelled.set()

    def sleep(self, seconds: float) -> None:
        """Wait so long. Raises WaitCancelled where that is ended meanwhile."""
        if self._cancelled.wait(seconds):
            raise WaitCancelled

    def record(self, reader: str, wait: RowWait) -> None:
        """Rows of a reader were waited for."""
        self._pending[reader] = self._pending.get(reader, RowWait()) + wait

    def begin_wait(self) -> None:
        """Whoever takes the batches waits from now on."""
        self._wait_start_s = time.monotonic()

    def end_wait(self, making_s: float) -> float:
        """It has a batch, for which rows were waited for so long; returns the share of that for which it has stood
        still as well."""
        now_s = time.monotonic()
        waited_s = 0.0 if self._wait_start_s is None else now_s - self._wait_start_s
        self._wait_start_s = None
        share = min(waited_s / making_s, 1.0) if making_s else 0.0
        if self._first_batch_s is None:
            self._first_batch_s = now_s
        else:
            self._wait_s += share * making_s
        return share

    def wait_totals(self) -> tuple[float, float]:
        """For how long whoever takes the batches has stood still for rows since it had the first one, and how long ago
        that was. Of any thread."""
        since_s, first_s, now_s = self._wait_start_s, self._first_batch_s, time.monotonic()
        if first_s is None:
            return 0.0, 0.0
        still_s = 0.0 if since_s is None else now_s - since_s
        return min(self._wait_s + still_s, now_s - first_s), now_s - first_s

    def pop_waits(self) -> dict[str, RowWait]:
        """What was counted since the last call, by reader."""
        waits, self._pending = self._pending, {}
        return waits


class WaitCancelled(Exception):
    """Nobody wants what was waited for."""


class TimedBatch(NamedTuple):
    """A batch, and what was waited for to make it."""

    batch: Batch
    waits: dict[str, RowWait]
    """By reader; nothing where this process decodes."""


class BatchIterator(Iterator[Batch]):
    """Batches in the order of a reader, which moves on with each; reading ahead ends when this is closed or dropped."""

    def __init__(
        self,
        ahead: PrefetchIterator[TimedBatch],
        move_on: Callable[[TimedBatch, WaitTracker], Batch],
        waits: WaitTracker,
    ) -> None:
        """`move_on` is given each batch when it has come; `waits` is what the thread that reads ahead waits by."""
        self._prefetch, self._on_batch, self._waits = ahead, move_on, waits

    def __next__(self) -> Batch:
        self._waits.begin_wait()
        return self._on_batch(next(self._prefetch), self._waits)  # no name here holds a batch until the next one

    def close(self) -> None:
        """End the thread that reads ahead; no batch comes any more."""
        self._waits.cancel()
        self._prefetch.close()

    def __del__(self) -> None:
        self._waits.cancel()  # the thread ends with its Prefetch


def check_rank(rank: int, num_ranks: int) -> None:
    """Raise MesetaError for a rank that there is not."""
    if not 0 <= rank < num_ranks:
        raise MesetaError(f"reader: rank must be in 0..{num_ranks - 1}, got {rank}")


class BatchReader(ABC):
    """Batches of one split for one rank, from a position on.

        for batch in reader.epochs(3):      # or `for batch in reader.epoch():` for what is left of one
            ...
            state = reader.get_state()      # JSON-able; on a new reader: reader.set_state(state)

    Global batch k of an epoch is a function of the files, the options but for prefetch, epoch and k alone. Rank r gets
    its r-th contiguous slice, and the first batch_size % num_ranks ranks one sample more; a slice may be empty, so that
    all ranks see the same number of batches. Every row comes exactly once per epoch, save those that the filter,
    negative_keep and last_batch leave out.
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
        """Name of the split."""
        self.options = options
        self.num_rows = num_rows
        """Rows of an epoch."""
        self.excluded_rows = excluded_rows
        """Rows of the split that the options leave out of every epoch."""
        self.position = Position(0, 0)
        """After the last batch handed over."""
        self.row_waits = RowWaits()
        """For how long whoever takes the batches has stood still for rows of other processes: of the time that each
        batch was waited for, what making it waited for, so that reading ahead that hides a wait leaves none; nothing
        where this process decodes."""
        self._slicer = BatchSlicer(
            num_rows=num_rows,
            batch_size=options.batch_size,
            last_batch=options.last_batch,
            rank=rank,
            num_ranks=num_ranks,
        )

    @abstractmethod
    def _rows(self, epoch: int, row: int, waits: WaitTracker, num_epochs: int) -> EpochRowSource:
        """The rows of an epoch, of which this rank's slices of the batches from `row` on will be taken; `num_epochs`
        bounds reading ahead."""

    @property
    def num_batches(self) -> int:
        """Global batches of a whole epoch, the same on every rank."""
        return self._slicer.num_batches_from(0)

    @property
    def num_remaining_batches(self) -> int:
        """Global batches from the present position to the end of its epoch."""
        return self._slicer.num_batches_from(self.position.row)

    @property
    def epoch_index(self) -> int:
        """Number of the epoch that the next batch belongs to, from 0."""
        return self.position.epoch

    def num_batches_until(self, position: Position) -> int:
        """Global batches from the beginning of the first epoch up to a position."""
        return (position.epoch + 1) * self.num_batches - self._slicer.num_batches_from(position.row)

    def epoch(self) -> BatchIterator:
        """The batches from the present position to the end of its epoch."""
        return self.epochs(self.position.epoch + 1)

    def epochs(self, num_epochs: int) -> BatchIterator:
        """The batches from the present position until `num_epochs` epochs, counted from the first, are complete.

        Reading begins at once. The position moves on when a batch is handed over, so what prefetch holds does not count
        as consumed; leave the loop early and the next call goes on with the following batch.
        """
        waits = WaitTracker()
        batches = self._produce(*self.position, num_epochs, waits)
        return BatchIterator(PrefetchIterator(batches, self.options.prefetch_batches), self._advance, waits)

    def get_state(self, position: Position | None = None) -> dict[str, Any]:
        """A position, or the one after the last batch handed over, as plain data for JSON; the same on every rank and
        for every reader of the same rows."""
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
        """Go on where `get_state` was called, to the row; batch_size and num_ranks may differ, the order may not.

        Raises MesetaError where the state is of another split, seed, shuffle, window_rows or choice of rows.
        """
        mine, all_rows = self.get_state(), {"filter": None, "negative_keep": 1.0}
        for key, value in {**all_rows, **mine}.items():
            if key not in state and key not in all_rows:
                raise MesetaError(f"reader state: key {key!r} is missing; pass what get_state returned")
            saved = state.get(key, all_rows.get(key))
            if key not in ("epoch", "row") and saved != value:
                raise MesetaError(
                    f"reader state: it was saved with {key} {saved!r}, but this reader has {value!r}, so its rows "
                    "come in another order; use the same data and options, or begin anew"
                )
        epoch, row = state["epoch"], state["row"]
        if not (isinstance(epoch, int) and isinstance(row, int) and epoch >= 0 and 0 <= row <= self.num_rows):
            raise MesetaError(f"reader state: epoch {epoch!r}, row {row!r} is no position among {self.num_rows} rows")
        self.position = Position(epoch, row)

    def _advance(self, made: TimedBatch, waits: WaitTracker) -> Batch:
        batch, for_rows = made
        self.row_waits.add(for_rows, waits.end_wait(sum(wait.total_s for wait in for_rows.values())))
        assert batch.position is not None
        self.position = batch.position
        return batch

    def _produce(self, epoch: int, row: int, num_epochs: int, waits: WaitTracker) -> Iterator[TimedBatch]:
        following: EpochRowSource | None = None
        while epoch < num_epochs:
            with closing(following or self._rows(epoch, row, waits, num_epochs)) as rows:
                for left in range(self._slicer.num_batches_from(row), 0, -1):
                    after = (epoch, row + self.options.batch_size) if left > 1 else (epoch + 1, 0)
                    yield TimedBatch(replace(self._make_batch(rows, row), position=Position(*after)), waits.pop_waits())
                    row += self.options.batch_size
                following = rows.take_next_epoch()
            epoch, row = epoch + 1, 0

    def _make_batch(self, rows: EpochRowSource, row: int) -> Batch:
        """This rank's part of the global batch that begins at `row`."""
        first, last, num_padding = self._slicer.slice_at(row)
        batch = to_batch(self.dataset, rows.take(first, last))
        is_short = self.options.last_batch == "pad" and row + self.options.batch_size > self.num_rows
        return pad_batch(batch, last - first + num_padding) if is_short else batch
