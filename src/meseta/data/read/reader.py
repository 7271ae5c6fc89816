"""The reader: a prepared dataset as a stream of batches, the same stream for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from meseta.data.batch import Batch, Position
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.cut import EpochRows, slice_of
from meseta.data.read.decode import SplitFiles
from meseta.data.read.order import EpochOrder
from meseta.data.read.prefetch import Prefetch
from meseta.data.read.rows import Rows, pad, to_batch
from meseta.data.read.selection import Selection
from meseta.spec import MesetaError

FORMAT = "meseta.reader/1"


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """How a split is read; the same on all ranks."""

    batch_size: int
    """Samples of a global batch, over all ranks."""
    shuffle: bool = False
    """Permute row groups, and rows within windows, anew in each epoch; else the order of the files."""
    seed: int = 0
    """Of the shuffle."""
    window_rows: int = 262_144
    """Rows decoded and permuted together; a larger row group makes a window of its own."""
    prefetch_batches: int = 4
    """Batches made ahead by a background thread, while another one decodes the next window; 0: neither."""
    last_batch: Literal["keep", "drop", "pad"] = "keep"
    """The last global batch of an epoch where it is short: as it is, left out, or filled with samples of weight 0."""
    filter: str | None = None
    """Condition on the rows that are read, see meseta.data.read.row_filter; None: all."""
    negative_keep: float = 1.0
    """Share of the negatives that is read, drawn by (seed, number of the row in the split), the same in each epoch."""

    def __post_init__(self) -> None:
        if self.last_batch not in ("keep", "drop", "pad"):
            raise MesetaError(f"reader: last_batch must be 'keep', 'drop' or 'pad', got {self.last_batch!r}")
        for name, least in (("batch_size", 1), ("window_rows", 1), ("prefetch_batches", 0)):
            if getattr(self, name) < least:
                raise MesetaError(f"reader: {name} must be at least {least}, got {getattr(self, name)}")


class Batches(Iterator[Batch]):
    """Batches in the order of a reader, which moves on with each; reading ahead ends when this is closed or dropped."""

    def __init__(self, ahead: Prefetch[Batch], move_on: Callable[[Batch], Batch]) -> None:
        self._ahead, self._move_on = ahead, move_on

    def __next__(self) -> Batch:
        return self._move_on(next(self._ahead))  # no name here holds a batch until the next one

    def close(self) -> None:
        """End the thread that reads ahead; no batch comes any more."""
        self._ahead.close()


class Reader:
    """Batches of one split for one rank.

        reader = Reader("data/criteo", "train", ReaderOptions(batch_size=2048, shuffle=True), rank=0, num_ranks=2)
        for batch in reader.epochs(3):      # or `for batch in reader.epoch():` for what is left of one
            ...
            state = reader.get_state()      # JSON-able; on a new reader: reader.set_state(state)

    Global batch k of an epoch is a function of the files, the options but for prefetch, epoch and k alone. Rank r gets
    its r-th contiguous slice, and the first batch_size % num_ranks ranks one sample more; a slice may be empty, so that
    all ranks see the same number of batches. Each rank decodes every window but gathers only its own rows.
    Every row comes exactly once per epoch, save those that the filter, negative_keep and last_batch leave out.
    """

    def __init__(
        self, dataset: Dataset | str | Path, split: str, options: ReaderOptions, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Opens every file's footer, and reads the columns that a filter or negative_keep look at, to count rows.

        Raises MesetaError for a bad rank, for a filter that does not fit the data, and for a file that is missing,
        damaged or not what dataset.json says.
        """
        if not 0 <= rank < num_ranks:
            raise MesetaError(f"reader: rank must be in 0..{num_ranks - 1}, got {rank}")
        self.dataset = dataset if isinstance(dataset, Dataset) else Dataset.load(dataset)
        self.options = options
        selection = Selection(
            self.dataset, condition=options.filter, negative_keep=options.negative_keep, seed=options.seed
        )
        self.split = split
        """Name of the split."""
        self._selects = bool(selection.columns)
        self._rank = rank
        self._num_ranks = num_ranks
        self._files = SplitFiles(self.dataset, split, selection)
        self.left_out = self._files.left_out
        """Rows of the split that the options leave out of every epoch."""
        self.num_rows = sum(self._files.group_rows)
        """Rows of an epoch."""
        self.position = Position(0, 0)
        """After the last batch handed over."""

    @property
    def num_batches(self) -> int:
        """Global batches of a whole epoch, the same on every rank."""
        return self._num_batches_from(0)

    @property
    def num_batches_left(self) -> int:
        """Global batches from the present position to the end of its epoch."""
        return self._num_batches_from(self.position.row)

    @property
    def epoch_index(self) -> int:
        """Number of the epoch that the next batch belongs to, from 0."""
        return self.position.epoch

    def num_batches_until(self, position: Position) -> int:
        """Global batches from the beginning of the first epoch up to a position."""
        return (position.epoch + 1) * self.num_batches - self._num_batches_from(position.row)

    def epoch(self) -> Batches:
        """The batches from the present position to the end of its epoch."""
        return self.epochs(self.position.epoch + 1)

    def epochs(self, num_epochs: int) -> Batches:
        """The batches from the present position until `num_epochs` epochs, counted from the first, are complete.

        Reading begins at once. The position moves on when a batch is handed over, so what prefetch holds does not count
        as consumed; leave the loop early and the next call goes on with the following batch.
        """
        batches = self._produce(*self.position, num_epochs)
        return Batches(Prefetch(batches, self.options.prefetch_batches), self._move_on)

    def _move_on(self, batch: Batch) -> Batch:
        assert batch.position is not None
        self.position = batch.position
        return batch

    def get_state(self, position: Position | None = None) -> dict[str, Any]:
        """A position, or the one after the last batch handed over, as plain data for JSON; the same on every rank."""
        epoch, row = position or self.position
        chosen = {"filter": self.options.filter, "negative_keep": self.options.negative_keep}
        return {
            "format": FORMAT,
            "split": self.split,
            "epoch": epoch,
            "row": row,
            "num_rows": self.num_rows,
            "shuffle": self.options.shuffle,
            "seed": self.options.seed,
            "window_rows": self.options.window_rows,
            **(chosen if self._selects else {}),
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

    def _num_batches_from(self, row: int) -> int:
        left = self.num_rows - row
        is_dropped = self.options.last_batch == "drop"
        return left // self.options.batch_size if is_dropped else -(-left // self.options.batch_size)

    def _produce(self, epoch: int, row: int, num_epochs: int) -> Iterator[Batch]:
        while epoch < num_epochs:
            num_batches = self._num_batches_from(row)
            rows = EpochRows(self.order(epoch), self.read_groups, reads_ahead=self.options.prefetch_batches > 0)
            with closing(rows):
                for left in range(num_batches, 0, -1):
                    after = (epoch, row + self.options.batch_size) if left > 1 else (epoch + 1, 0)
                    yield replace(self._make(rows, row), position=Position(*after))
                    row += self.options.batch_size
            epoch, row = epoch + 1, 0

    def _make(self, rows: EpochRows, row: int) -> Batch:
        """This rank's part of the global batch that begins at `row`."""
        stop = min(row + self.options.batch_size, self.num_rows)
        size = self.options.batch_size if self.options.last_batch == "pad" else stop - row
        first, last = slice_of(self._rank, self._num_ranks, row, row + size)
        batch = to_batch(self.dataset, rows.take(min(first, stop), min(last, stop)))
        return batch if row + size == stop else pad(batch, last - first)

    def order(self, epoch: int) -> EpochOrder:
        """The order of rows in one epoch."""
        rows = self._files.group_rows
        if self.options.shuffle:
            return EpochOrder(rows, self.options.window_rows, (self.options.seed, epoch))
        return EpochOrder(rows, 1, None)  # a window per row group, which stays in the caches

    def read_groups(self, groups: tuple[int, ...]) -> Rows:
        """Decode row groups, by their number in the split. Raises MesetaError for a damaged file."""
        return self._files.read(groups, by_row=self.options.shuffle)
