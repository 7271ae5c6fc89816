"""Rows of a split that a recipe makes from raw files, by row group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import pyarrow as pa

from meseta.data.dataset.dataset import Dataset
from meseta.data.prepare.recipe import Recipe
from meseta.data.prepare.recipe_rows import RowMaker, RowMakerTimes
from meseta.data.read.options import CancellationCheck, never_cancelled
from meseta.data.read.rows import Rows, WindowTimer, decode_rows
from meseta.data.read.selection import ExcludedRows, RowSelection
from meseta.spec import MesetaError


class RecipeRows:
    """Row groups with selected rows in a split of a recipe."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        selection: RowSelection,
        group_row_counts: Mapping[int, int] | None = None,
        *,
        shuffle: bool,
        num_threads: int | None = None,
        check_cancelled: CancellationCheck = never_cancelled,
    ) -> None:
        """Check the sources against the recipe and, if the selection depends on columns, count the selected rows.

        Counting makes all rows once. `num_threads` of `None` means the number of `meseta doctor`. See
        `open_split_rows` for the other arguments. Raises MesetaError if a file is missing, damaged or has changed, or
        if `shuffle` is set, but a file cannot be read in any order.
        """
        dataset.split(split)
        recipe = Recipe.load(dataset)
        if shuffle:
            _check_seekable(recipe, split)
        self._dataset, self._split, self._selection = dataset, split, selection
        self._maker = RowMaker.from_recipe(dataset, recipe, num_threads)
        sizes = self._maker.group_rows(split)
        self._first_rows = list(accumulate(sizes, initial=0))
        self.excluded_rows = ExcludedRows()
        self.group_row_counts = dict(enumerate(sizes))
        """Number of selected rows by number of the row group in the split. Groups without selected rows are left
        out."""
        if group_row_counts is not None:
            self.group_row_counts = {
                number: group_row_counts[number] for number in self.group_row_counts if number in group_row_counts
            }
        elif selection.columns:
            self.group_row_counts = self._count_selected(check_cancelled)
        self._groups = list(self.group_row_counts)

    @property
    def int64_features(self) -> list[str]:
        return [feature.name for feature in self._dataset.sparse if feature.num_embeddings > 2**31]

    @property
    def group_rows(self) -> list[int]:
        return list(self.group_row_counts.values())

    def read(
        self,
        groups: Sequence[int],
        *,
        by_row: bool,
        times: WindowTimer | None = None,
        check_cancelled: CancellationCheck = never_cancelled,
    ) -> Rows:
        numbers = [self._groups[place] for place in groups]
        begin_s, work = time.perf_counter(), RowMakerTimes()
        tables = [table for table, _ in self._select_rows(numbers, check_cancelled, work)]
        rows = decode_rows(self._dataset, tables, by_row=by_row)
        if times is not None:
            times.add_transform(time.perf_counter() - begin_s, work.read_share)
        return rows

    def _select_rows(
        self, numbers: Sequence[int], check: CancellationCheck, work: RowMakerTimes | None = None
    ) -> Iterator[tuple[pa.Table, ExcludedRows]]:
        for number, table in zip(numbers, self._maker.make_groups(self._split, numbers, work), strict=True):
            check()
            if not self._selection.columns:
                yield table, ExcludedRows()
                continue
            mask, left_out = self._selection.mask(table, self._first_rows[number])
            yield table.filter(pa.array(mask)), left_out

    def _count_selected(self, check: CancellationCheck) -> dict[int, int]:
        counted = {}
        for number, (table, left_out) in zip(
            self.group_row_counts, self._select_rows(list(self.group_row_counts), check), strict=True
        ):
            self.excluded_rows = ExcludedRows(
                self.excluded_rows.by_filter + left_out.by_filter,
                self.excluded_rows.negatives + left_out.negatives,
            )
            if table.num_rows:
                counted[number] = table.num_rows
        return counted


def _check_seekable(recipe: Recipe, split: str) -> None:
    for source in recipe.sources:
        if not source.can_enter and source.split in ("both", split):
            raise MesetaError(
                f"source {source.path!r} is compressed, or not in UTF-8, so its rows can only be read in order and not "
                "shuffled: convert it and make the recipe again, prepare without --recipe-only, or set "
                "data.shuffle=false"
            )
