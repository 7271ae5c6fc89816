"""Rows of a split, made from the raw files where they are asked for."""

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
from meseta.machine.processors import num_cores
from meseta.spec import MesetaError


@dataclass
class RowMakerTimes:
    """What threads have done to make rows. They share it."""

    range_times: list[tuple[float, float]] = field(default_factory=list)
    """Seconds that each stretch of a file was waited for, and that rows were made of it."""

    @property
    def read_share(self) -> float:
        """Of the time of these threads, that they waited for files."""
        read_s, made_s = (
            (sum(seconds) for seconds in zip(*self.range_times, strict=True)) if self.range_times else (0, 0)
        )
        return read_s / (read_s + made_s) if read_s else 0.0


class RowMaker:
    """Makes row groups of a split. Threads may share it; several of its own parse what one call asks for."""

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
        """`num_threads`: None: the cores this process may use."""
        self._sources, self._index = sources, index
        self._encoder, self._finalizer = encoder, finisher
        self._skips_bad_rows = skips_bad_rows
        self._cursors = CursorPool(sources, encoder.layout.columns)
        self._num_threads = num_threads or num_cores()
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="meseta-make")

    @staticmethod
    def from_recipe(dataset: Dataset, recipe: Recipe, num_threads: int | None = None) -> RowMaker:
        """By the recipe of a dataset. Raises MesetaError for files of either that are missing, damaged or changed."""
        sources = recipe.to_sources(dataset)
        for source in sources:
            check_unchanged(source)
        encoder, finisher = make_encoders(dataset, layout_from_dataset(dataset), splitter_from_dataset(dataset))
        index = SourceIndex.load(recipe, dataset)
        skips = recipe.skips_bad_rows
        return RowMaker(sources, index, encoder, finisher, skips_bad_rows=skips, num_threads=num_threads)

    def group_rows(self, split: str) -> list[int]:
        """Rows of each row group of a split."""
        return self._index.group_rows(split)

    def make_groups(self, split: str, groups: Sequence[int], work: RowMakerTimes | None = None) -> Iterator[pa.Table]:
        """The columns of a dataset's files in some row groups of a split, group by group; `work` is told what each
        stretch of a file takes.

        Raises MesetaError for a file that has changed since the recipe was made, or is damaged."""
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
                    f"source {path!r} gives {num_rows:,} rows of split {split!r} where it gave {sizes[group]:,} when "
                    f"the recipe was made; {REMAKE_REMEDY}"
                )
            yield pa.Table.from_batches(batches)

    def _make(self, split: str, stretch: RowRange, work: RowMakerTimes) -> list[pa.RecordBatch]:
        """Finished rows of a split in a stretch of a file."""
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
    """What parts the rows of a dataset."""
    return Splitter(
        seed=dataset.seed,
        test_fraction=dataset.test_fraction or 0.0,
        valid_fraction=dataset.valid_fraction or 0.0,
        by=dataset.split_by,
        test_from=dataset.test_from,
        valid_from=dataset.valid_from,
    )
