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
from meseta.data.prepare.earlier import encoders_of, layout_of_dataset
from meseta.data.prepare.encode import Encoder
from meseta.data.prepare.splitting import Splitter
from meseta.data.prepare.write import Finisher
from meseta.data.recipe.cursors import Cursors, check_unchanged
from meseta.data.recipe.index import SourceIndex, Stretch
from meseta.data.recipe.recipe import WAY_OUT, Recipe
from meseta.data.workers import in_order
from meseta.machine.processors import num_cores
from meseta.spec import MesetaError


@dataclass
class MakingWork:
    """What threads have done to make rows. They share it."""

    stretches: list[tuple[float, float]] = field(default_factory=list)
    """Seconds that each stretch of a file was waited for, and that rows were made of it."""

    @property
    def read_share(self) -> float:
        """Of the time of these threads, that they waited for files."""
        read_s, made_s = (sum(seconds) for seconds in zip(*self.stretches, strict=True)) if self.stretches else (0, 0)
        return read_s / (read_s + made_s) if read_s else 0.0


class RowMaker:
    """Makes row groups of a split. Threads may share it; several of its own parse what one call asks for."""

    def __init__(
        self,
        sources: Sequence[Source],
        index: SourceIndex,
        encoder: Encoder,
        finisher: Finisher,
        *,
        skips_bad_rows: bool,
        num_threads: int | None = None,
    ) -> None:
        """`num_threads`: None: the cores this process may use."""
        self._sources, self._index = sources, index
        self._encoder, self._finisher = encoder, finisher
        self._skips_bad_rows = skips_bad_rows
        self._cursors = Cursors(sources, encoder.layout.columns)
        self._num_threads = num_threads or num_cores()
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="meseta-make")

    @staticmethod
    def of(dataset: Dataset, recipe: Recipe, num_threads: int | None = None) -> RowMaker:
        """By the recipe of a dataset. Raises MesetaError for files of either that are missing, damaged or changed."""
        sources = recipe.sources_of(dataset)
        for source in sources:
            check_unchanged(source)
        encoder, finisher = encoders_of(dataset, layout_of_dataset(dataset), splitter_of(dataset))
        index = SourceIndex.load(recipe, dataset)
        skips = recipe.skips_bad_rows
        return RowMaker(sources, index, encoder, finisher, skips_bad_rows=skips, num_threads=num_threads)

    def group_rows(self, split: str) -> list[int]:
        """Rows of each row group of a split."""
        return self._index.group_rows(split)

    def groups(self, split: str, groups: Sequence[int], work: MakingWork | None = None) -> Iterator[pa.Table]:
        """The columns of a dataset's files in some row groups of a split, group by group; `work` is told what each
        stretch of a file takes.

        Raises MesetaError for a file that has changed since the recipe was made, or is damaged."""
        work = work or MakingWork()
        sizes = self._index.group_rows(split)
        parts = {group: self._index.stretches(split, group) for group in groups}
        jobs: Iterator[Callable[[], list[pa.RecordBatch]]] = (
            partial(self._make, split, stretch, work) for group in groups for stretch in parts[group]
        )
        made = in_order(self._pool, jobs, self._num_threads + 1)
        for group in groups:
            batches = [batch for _ in parts[group] for batch in next(made)]
            num_rows = sum(batch.num_rows for batch in batches)
            if num_rows != sizes[group]:
                path = self._sources[parts[group][0].source].path
                raise MesetaError(
                    f"source {path!r} gives {num_rows:,} rows of split {split!r} where it gave {sizes[group]:,} when "
                    f"the recipe was made; {WAY_OUT}"
                )
            yield pa.Table.from_batches(batches)

    def _make(self, split: str, stretch: Stretch, work: MakingWork) -> list[pa.RecordBatch]:
        """Finished rows of a split in a stretch of a file."""
        begin_s = time.perf_counter()
        block = self._cursors.read(stretch)
        read_s = time.perf_counter()
        rows_before = stretch.first_global_row - block.first_row

        def encode(part: Block) -> pa.RecordBatch:
            picks = not self._skips_bad_rows
            return self._encoder.encode_split(part, rows_before + part.first_row, split, picks=picks)

        batches = parse_good_rows(block, encode).results if self._skips_bad_rows else [encode(block)]
        finished = [self._finisher.finish(batch) for batch in batches]
        work.stretches.append((read_s - begin_s, time.perf_counter() - read_s))
        return finished


def splitter_of(dataset: Dataset) -> Splitter:
    """What parts the rows of a dataset."""
    return Splitter(
        seed=dataset.seed,
        test_fraction=dataset.test_fraction or 0.0,
        valid_fraction=dataset.valid_fraction or 0.0,
        by=dataset.split_by,
        test_from=dataset.test_from,
        valid_from=dataset.valid_from,
    )
