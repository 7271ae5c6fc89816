"""Computation of the rows of a split from raw files, on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from meseta.data.dataset.dataset import Dataset
from meseta.data.formats.bad_rows import parse_good_rows
from meseta.data.formats.format import Block, Source
from meseta.data.prepare.earlier_dataset import layout_from_dataset, make_encoders
from meseta.data.prepare.encode import Encoder
from meseta.data.prepare.splitting import Splitter
from meseta.data.prepare.write import RowFinalizer
from meseta.data.recipe.cursors import CursorPool, check_unchanged
from meseta.data.recipe.index import RowRange, SourceIndex
from meseta.data.recipe.recipe import REMAKE_REMEDY, Recipe
from meseta.data.workers import run_in_order
from meseta.spec import MesetaError
from meseta.system.processors import num_cores


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
        self._num_threads = num_threads or num_cores()
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="meseta-make")

    @staticmethod
    def from_recipe(dataset: Dataset, recipe: Recipe, num_threads: int | None = None) -> RowMaker:
        """Create a producer from the recipe of a dataset.

        Raises MesetaError if a file of the dataset or a raw file is missing, damaged or changed.
        """
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
    )
