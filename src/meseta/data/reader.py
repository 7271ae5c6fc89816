"""The reader: a prepared dataset as a stream of batches, the same stream for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from meseta.data.batch import Batch
from meseta.data.dataset import Dataset
from meseta.data.order import EpochOrder
from meseta.data.prefetch import prefetch
from meseta.data.rows import Rows, concatenate, decode, to_batch
from meseta.data.sound import check_types, check_values
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
    """Batches made ahead by a background thread; 0: none."""
    drop_last: bool = False
    """Leave out the last global batch of an epoch where it is short."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("window_rows", 1), ("prefetch_batches", 0)):
            if getattr(self, name) < least:
                raise MesetaError(f"reader: {name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class _RowGroup:
    file: int
    """Number of the file in the split."""
    index: int
    """Number of the group in the file."""
    first_row: int
    """Rows of the file before it."""
    num_rows: int


class Reader:
    """Batches of one split for one rank.

        reader = Reader("data/criteo", "train", ReaderOptions(batch_size=2048, shuffle=True), rank=0, num_ranks=2)
        for batch in reader.epochs(3):      # or `for batch in reader.epoch():` for what is left of one
            ...
            state = reader.get_state()      # JSON-able; on a new reader: reader.set_state(state)

    Global batch k of an epoch is a function of (files, seed, epoch, window_rows, batch_size, k) alone. Rank r gets its
    r-th contiguous slice, and the first batch_size % num_ranks ranks one sample more; a slice may be empty, so that all
    ranks see the same number of batches. Each rank decodes every window but gathers only its own rows.
    Every row comes exactly once per epoch, save those that drop_last leaves out.
    """

    def __init__(
        self, dataset: Dataset | str | Path, split: str, options: ReaderOptions, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Opens every file's footer. Raises MesetaError for a bad rank, and for a file that is missing, damaged or not
        what dataset.json says."""
        if not 0 <= rank < num_ranks:
            raise MesetaError(f"reader: rank must be in 0..{num_ranks - 1}, got {rank}")
        self.dataset = dataset if isinstance(dataset, Dataset) else Dataset.load(dataset)
        self.options = options
        self.num_rows = self.dataset.split(split).num_rows
        self.split = split
        """Name of the split."""
        self._rank = rank
        self._num_ranks = num_ranks
        self._paths = [self.dataset.dir / file.path for file in self.dataset.split(split).files]
        self._metadata = [
            self._open_footer(path, file.num_rows)
            for path, file in zip(self._paths, self.dataset.split(split).files, strict=True)
        ]
        self._groups = [group for file, metadata in enumerate(self._metadata) for group in _row_groups(file, metadata)]
        self._epoch = 0
        self._row = 0

    @property
    def num_batches(self) -> int:
        """Global batches of a whole epoch, the same on every rank."""
        return self._num_batches_from(0)

    @property
    def num_batches_left(self) -> int:
        """Global batches from the present position to the end of its epoch."""
        return self._num_batches_from(self._row)

    @property
    def epoch_index(self) -> int:
        """Number of the epoch that the next batch belongs to, from 0."""
        return self._epoch

    def epoch(self) -> Iterator[Batch]:
        """The batches from the present position to the end of its epoch."""
        return self.epochs(self._epoch + 1)

    def epochs(self, num_epochs: int) -> Iterator[Batch]:
        """The batches from the present position until `num_epochs` epochs, counted from the first, are complete.

        The position moves on when a batch is handed over, so what prefetch holds does not count as consumed; leave the
        loop early and the next call goes on with the following batch.
        """
        batches = self._produce(self._epoch, self._row, num_epochs)
        with closing(prefetch(batches, self.options.prefetch_batches)) as ahead:
            for batch, epoch, row in ahead:
                self._epoch, self._row = epoch, row
                yield batch

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch handed over, as plain data for JSON; the same on every rank."""
        return {
            "format": FORMAT,
            "split": self.split,
            "epoch": self._epoch,
            "row": self._row,
            "num_rows": self.num_rows,
            "shuffle": self.options.shuffle,
            "seed": self.options.seed,
            "window_rows": self.options.window_rows,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `get_state` was called, to the row; batch_size and num_ranks may differ, the order may not.

        Raises MesetaError where the state is of another split, seed, shuffle or window_rows.
        """
        mine = self.get_state()
        for key, value in mine.items():
            if key not in state:
                raise MesetaError(f"reader state: key {key!r} is missing; pass what get_state returned")
            if key not in ("epoch", "row") and state[key] != value:
                raise MesetaError(
                    f"reader state: it was saved with {key} {state[key]!r}, but this reader has {value!r}, so its rows "
                    "come in another order; use the same data and options, or begin anew"
                )
        epoch, row = state["epoch"], state["row"]
        if not (isinstance(epoch, int) and isinstance(row, int) and epoch >= 0 and 0 <= row <= self.num_rows):
            raise MesetaError(f"reader state: epoch {epoch!r}, row {row!r} is no position among {self.num_rows} rows")
        self._epoch, self._row = epoch, row

    def _num_batches_from(self, row: int) -> int:
        left = self.num_rows - row
        return left // self.options.batch_size if self.options.drop_last else -(-left // self.options.batch_size)

    def _produce(self, epoch: int, row: int, num_epochs: int) -> Iterator[tuple[Batch, int, int]]:
        """Batches, each with the position after it."""
        while epoch < num_epochs:
            num_batches = self._num_batches_from(row)
            pieces = _Pieces(self, epoch)
            for left in range(num_batches, 0, -1):
                stop = min(row + self.options.batch_size, self.num_rows)
                first, last = _slice_of(self._rank, self._num_ranks, row, stop)
                batch = to_batch(self.dataset, pieces.take(first, last))
                row = stop
                yield (batch, epoch, row) if left > 1 else (batch, epoch + 1, 0)
            epoch, row = epoch + 1, 0

    def order(self, epoch: int) -> EpochOrder:
        """The order of rows in one epoch."""
        key = (self.options.seed, epoch) if self.options.shuffle else None
        return EpochOrder([group.num_rows for group in self._groups], self.options.window_rows, key)

    def read_groups(self, groups: tuple[int, ...]) -> Rows:
        """Decode row groups, by their number in the split. Raises MesetaError for a damaged file."""
        tables = []
        for group in groups:
            place = self._groups[group]
            path = self._paths[place.file]
            try:
                with pq.ParquetFile(path, metadata=self._metadata[place.file]) as file:
                    table = file.read_row_group(place.index, columns=self.dataset.columns)
            except (pa.ArrowException, OSError) as error:
                raise damaged(path, error) from None
            check_values(path, place.first_row, table, self.dataset)
            tables.append(table)
        return decode(self.dataset, tables)

    def _open_footer(self, path: Path, num_rows: int) -> pq.FileMetaData:
        """The metadata of one file, checked against dataset.json."""
        try:
            with pq.ParquetFile(path) as file:
                metadata, schema = file.metadata, file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise damaged(path, error) from None
        if metadata.num_rows != num_rows:
            raise MesetaError(
                f"dataset file {str(path)!r} holds {metadata.num_rows} rows, but dataset.json says {num_rows}; "
                "prepare the dataset again"
            )
        check_types(path, schema, self.dataset)
        return metadata


def _row_groups(file: int, metadata: pq.FileMetaData) -> Iterator[_RowGroup]:
    first_row = 0
    for index in range(metadata.num_row_groups):
        num_rows = metadata.row_group(index).num_rows
        yield _RowGroup(file, index, first_row, num_rows)
        first_row += num_rows


class _Pieces:
    """Rows of one epoch by their place in its order; keeps the last decoded window."""

    def __init__(self, reader: Reader, epoch: int) -> None:
        self._reader = reader
        self._order = reader.order(epoch)
        self._index = -1

    def take(self, first: int, last: int) -> Rows:
        """Rows first..last-1 of the epoch; calls come in ascending order."""
        parts: list[Rows] = []
        at = first
        while at < last or not parts:
            self._open(self._order.find(min(at, self._reader.num_rows - 1)))
            start = at - self._window.start
            stop = min(last - self._window.start, self._window.num_rows)
            places = self._window.rows
            parts.append(self._rows.take(slice(start, stop) if places is None else places[start:stop]))
            at = self._window.start + stop
        return concatenate(parts)

    def _open(self, index: int) -> None:
        if index != self._index:
            self._window = self._order.window(index)
            self._rows = self._reader.read_groups(self._window.groups)
            self._index = index


def _slice_of(rank: int, num_ranks: int, start: int, stop: int) -> tuple[int, int]:
    """The rank's contiguous share of rows start..stop-1; the first ranks get one more where it does not divide."""
    share, more = divmod(stop - start, num_ranks)
    first = start + rank * share + min(rank, more)
    return first, first + share + (rank < more)


def damaged(path: Path, error: Exception) -> MesetaError:
    """What is said of a file that pyarrow cannot read."""
    return MesetaError(
        f"dataset file {str(path)!r} cannot be read ({str(error).splitlines()[0]}); prepare the dataset again"
    )
