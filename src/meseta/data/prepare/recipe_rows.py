"""Pool of open raw files, so that consecutive reads do not open a file again."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.queues import run_in_order
from meseta.data.formats.bad_rows import parse_good_rows
from meseta.data.formats.format import Block, RowCursor, Source
from meseta.data.prepare.earlier_dataset import layout_from_dataset, make_encoders
from meseta.data.prepare.encode import Encoder, Splitter
from meseta.data.prepare.recipe import REMAKE_REMEDY, Recipe
from meseta.data.prepare.recipe_index import RowRange, SourceIndex
from meseta.data.prepare.write import RowFinalizer
from meseta.errors import MesetaError, reading_error
from meseta.system.processors import choose_num_threads
from meseta.system.remote import file_status

MAX_IDLE_CURSORS = 32
# A compressed file is read sequentially. With several cursors, readers that are slightly out of order each continue at
# a position close to theirs.
MAX_IDLE_CURSORS_PER_FILE = 4
"""Maximum number of unused cursors of one file."""


class CursorPool:
    """Thread-safe pool of cursors on the raw files of a recipe."""

    def __init__(self, sources: Sequence[Source], columns: Sequence[str]) -> None:
        """Create an empty pool. Formats that store columns separately read only `columns`."""
        self._sources, self._columns = sources, columns
        self._idle: list[tuple[int, RowCursor]] = []
        """Source index and cursor of each unused file, most recently used last."""
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def read(self, stretch: RowRange) -> Block:
        """Read the rows of a range. Raises MesetaError if the file is damaged or has changed since the recipe."""
        source = self._sources[stretch.source]
        try:
            with self._acquired(stretch) as cursor:
                block = cursor.read(stretch.start, stretch.stop)
        except MesetaError:
            # A damaged file may be one that was changed, which is the more helpful error.
            check_unchanged(source)
            raise
        check_unchanged(source)  # After reading, so that an earlier change cannot be missed.
        return block

    @contextmanager
    def _acquired(self, stretch: RowRange) -> Iterator[RowCursor]:
        cursor = self._acquire(stretch)
        try:
            yield cursor
        except BaseException:
            cursor.close()
            raise
        with self._lock:
            self._idle.append((stretch.source, cursor))
            spare = self._idle.pop(0)[1] if len(self._idle) > MAX_IDLE_CURSORS else None
        if spare is not None:
            spare.close()

    def _acquire(self, stretch: RowRange) -> RowCursor:
        # Going backwards is expensive. A cursor behind the range is used only if the file has the maximum of idle ones.
        with self._lock:
            idle = [entry for entry in self._idle if entry[0] == stretch.source]
            before = [entry for entry in idle if entry[1].row <= stretch.start.row]
            if before or len(idle) >= MAX_IDLE_CURSORS_PER_FILE:
                entry = max(before or idle, key=lambda entry: entry[1].row)
                self._idle.remove(entry)
                return entry[1]
        source = self._sources[stretch.source]
        return source.format.cursor(source, self._columns)


def _close_all(idle: list[tuple[int, RowCursor]]) -> None:
    for _, cursor in idle:
        cursor.close()


def check_unchanged(source: Source) -> None:
    """Raise MesetaError if a raw file was changed, or StorageError if it cannot be accessed."""
    where, way_out = f"source {source.path!r}", f"restore it, or {REMAKE_REMEDY}"
    try:
        now = file_status(source.path)
    except OSError as error:
        text = f"{where} can no longer be read ({error.strerror}): {way_out}"
        raise reading_error(error, text) from None
    if (now.size_bytes or 1, now.change_stamp) != (source.size_bytes, source.changed):
        raise MesetaError(f"{where} has changed since the recipe was made: {way_out}")


@dataclass
class RowMakerTimes:
    """Measured times of the threads that compute rows. The threads share one instance."""

    range_times: list[tuple[float, float]] = field(default_factory=list)
    """Pairs (seconds of waiting for the file, seconds of computing rows), one per range of rows."""

    @property
    def read_share(self) -> float:
        """Share of the measured time that was spent waiting for files."""
        read_s, made_s = (
            (sum(seconds) for seconds in zip(*self.range_times, strict=True)) if self.range_times else (0, 0)
        )
        return read_s / (read_s + made_s) if read_s else 0.0


class RowMaker:
    """Thread-safe producer of the row groups of a split. Each call parses in parallel, in the object's own threads."""

    def __init__(
        self,
        sources: Sequence[Source],
        index: SourceIndex,
        encoder: Encoder,
        finisher: RowFinalizer,
        *,
        skips_bad_rows: bool,
        num_threads: int | None = None,
    ) -> None:
        self._sources, self._index = sources, index
        self._encoder, self._finalizer = encoder, finisher
        self._skips_bad_rows = skips_bad_rows
        self._cursors = CursorPool(sources, encoder.layout.columns)
        self._num_threads = choose_num_threads(num_threads).number
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="meseta-make")

    @staticmethod
    def from_recipe(dataset: Dataset, recipe: Recipe, num_threads: int | None = None) -> RowMaker:
        """Create a producer from a dataset's recipe. Raises MesetaError if a file is missing, damaged or changed."""
        sources = recipe.to_sources(dataset)
        for source in sources:
            check_unchanged(source)
        encoder, finisher = make_encoders(dataset, layout_from_dataset(dataset), splitter_from_dataset(dataset))
        index = SourceIndex.load(recipe, dataset)
        skips = recipe.skips_bad_rows
        return RowMaker(sources, index, encoder, finisher, skips_bad_rows=skips, num_threads=num_threads)

    def group_rows(self, split: str) -> list[int]:
        """Return the number of rows of each row group of a split."""
        return self._index.group_rows(split)

    def make_groups(self, split: str, groups: Sequence[int], work: RowMakerTimes | None = None) -> Iterator[pa.Table]:
        """Compute row groups of a split by index, and yield one table per group with the columns of the dataset's
        files.

        `work` collects the times of each range of rows. Raises MesetaError if a raw file is damaged or was changed
        since the recipe was made.
        """
        work = work or RowMakerTimes()
        sizes = self._index.group_rows(split)
        parts = {group: self._index.row_ranges(split, group) for group in groups}
        jobs: Iterator[Callable[[], list[pa.RecordBatch]]] = (
            partial(self._make, split, stretch, work) for group in groups for stretch in parts[group]
        )
        made = run_in_order(self._pool, jobs, self._num_threads + 1)
        for group in groups:
            batches = [batch for _ in parts[group] for batch in next(made)]
            num_rows = sum(batch.num_rows for batch in batches)
            if num_rows != sizes[group]:
                path = self._sources[parts[group][0].source].path
                raise MesetaError(
                    f"source {path!r} has {num_rows:,} rows of split {split!r}, but had {sizes[group]:,} when the "
                    f"recipe was made; {REMAKE_REMEDY}"
                )
            yield pa.Table.from_batches(batches)

    def _make(self, split: str, stretch: RowRange, work: RowMakerTimes) -> list[pa.RecordBatch]:
        begin_s = time.perf_counter()
        block = self._cursors.read(stretch)
        read_s = time.perf_counter()
        rows_before = stretch.first_global_row - block.first_row

        def encode(part: Block) -> pa.RecordBatch:
            picks = not self._skips_bad_rows
            return self._encoder.encode_split(part, rows_before + part.first_row, split, prefilter=picks)

        batches = parse_good_rows(block, encode).results if self._skips_bad_rows else [encode(block)]
        finished = [self._finalizer.finalize(batch) for batch in batches]
        work.range_times.append((read_s - begin_s, time.perf_counter() - read_s))
        return finished


def splitter_from_dataset(dataset: Dataset) -> Splitter:
    """Return the splitter of a dataset."""
    return Splitter(
        seed=dataset.seed,
        test_fraction=dataset.test_fraction or 0.0,
        valid_fraction=dataset.valid_fraction or 0.0,
        by=dataset.split_by,
        test_from=dataset.test_from,
        valid_from=dataset.valid_from,
        is_valid_by_time=dataset.split_by is None and dataset.valid_from is not None,
    )
