"""The rows of a split as a recipe makes them, row group by row group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import pyarrow as pa

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.options import Check, unchecked
from meseta.data.read.rows import Rows, decode
from meseta.data.read.selection import LeftOut, Selection
from meseta.data.read.window_times import WindowTimes
from meseta.data.recipe.made_rows import MakingWork, RowMaker
from meseta.data.recipe.recipe import Recipe
from meseta.spec import MesetaError


class RecipeRows:
    """The row groups of a split that have rows to read, of a dataset whose rows are made as they are read."""

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        selection: Selection,
        counted: Mapping[int, int] | None = None,
        *,
        shuffles: bool,
        num_threads: int | None = None,
        check: Check = unchecked,
    ) -> None:
        """Holds the sources against the recipe, and makes all rows once where the selection looks at columns, to count
        those that are read; unless others have `counted` them. `shuffles`: whether groups will be read in any order;
        `num_threads`: None: the cores this process may use. `check` is called before each row group is counted, and may
        raise to end that.

        Raises MesetaError for a file that is missing, damaged or has changed, and for one that cannot be shuffled.
        """
        dataset.split(split)
        recipe = Recipe.load(dataset)
        if shuffles:
            _check_enterable(recipe, split)
        self._dataset, self._split, self._selection = dataset, split, selection
        self._maker = RowMaker.of(dataset, recipe, num_threads)
        sizes = self._maker.group_rows(split)
        self._first_rows = list(accumulate(sizes, initial=0))
        self.left_out = LeftOut()
        """Rows of the split that the selection leaves out."""
        self.counted = dict(enumerate(sizes))
        """Rows that are read of each row group that has any, by its number in the split."""
        if counted is not None:
            self.counted = {number: counted[number] for number in self.counted if number in counted}
        elif selection.columns:
            self.counted = self._select(check)
        self._groups = list(self.counted)

    @property
    def wide_features(self) -> list[str]:
        """Sparse features whose ids are int64, and not int32 as otherwise."""
        return [feature.name for feature in self._dataset.sparse if feature.num_embeddings > 2**31]

    @property
    def group_rows(self) -> list[int]:
        """Rows that are read of each row group."""
        return list(self.counted.values())

    def read(
        self, groups: Sequence[int], *, by_row: bool, times: WindowTimes | None = None, check: Check = unchecked
    ) -> Rows:
        """Make the rows of row groups, by their place in `group_rows`; `by_row`: whether rows will be taken one by one.
        What that takes is added to `times`. `check` is called before each row group. Raises MesetaError for a file that
        is damaged or has changed, and what `check` raises."""
        numbers = [self._groups[place] for place in groups]
        begin_s, work = time.perf_counter(), MakingWork()
        tables = [table for table, _ in self._selected(numbers, check, work)]
        rows = decode(self._dataset, tables, by_row=by_row)
        if times is not None:
            times.add_making(time.perf_counter() - begin_s, work.read_share)
        return rows

    def _selected(
        self, numbers: Sequence[int], check: Check, work: MakingWork | None = None
    ) -> Iterator[tuple[pa.Table, LeftOut]]:
        """The rows that are read of some row groups, and how many are not."""
        for number, table in zip(numbers, self._maker.groups(self._split, numbers, work), strict=True):
            check()
            if not self._selection.columns:
                yield table, LeftOut()
                continue
            mask, left_out = self._selection.mask(table, self._first_rows[number])
            yield table.filter(pa.array(mask)), left_out

    def _select(self, check: Check) -> dict[int, int]:
        """Rows that are read of each row group, those without any left out."""
        counted = {}
        for number, (table, left_out) in zip(self.counted, self._selected(list(self.counted), check), strict=True):
            self.left_out = LeftOut(
                self.left_out.by_filter + left_out.by_filter, self.left_out.negatives + left_out.negatives
            )
            if table.num_rows:
                counted[number] = table.num_rows
        return counted


def _check_enterable(recipe: Recipe, split: str) -> None:
    for source in recipe.sources:
        if not source.can_enter and source.split in ("both", split):
            raise MesetaError(
                f"source {source.path!r} is compressed, or not in UTF-8, so its rows can be read in order alone, and "
                "not shuffled: convert it and make the recipe anew, prepare without --recipe-only, or set "
                "data.shuffle=false"
            )
