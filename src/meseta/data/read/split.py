"""One split as readers see it, wherever its rows come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.decode import SplitFiles
from meseta.data.read.options import Check, unchecked
from meseta.data.read.recipe_rows import RecipeRows
from meseta.data.read.rows import Rows
from meseta.data.read.selection import LeftOut, Selection
from meseta.data.read.window_times import WindowTimes


@runtime_checkable  # beartype asks for it where the tests check every call
class SplitRows(Protocol):
    """The row groups of a split that have rows to read. Threads may share it."""

    left_out: LeftOut
    """Rows of the split that the selection leaves out."""

    @property
    def counted(self) -> dict[int, int]:
        """Rows that are read of each row group that has any, by its number in the split."""

    @property
    def wide_features(self) -> list[str]:
        """Sparse features whose ids are int64 somewhere, and not int32 as otherwise."""

    @property
    def group_rows(self) -> list[int]:
        """Rows that are read of each row group."""

    def read(
        self, groups: Sequence[int], *, by_row: bool, times: WindowTimes | None = None, check: Check = unchecked
    ) -> Rows:
        """Decode row groups, by their place in `group_rows`; `by_row`: whether rows will be taken one by one. What that
        takes is added to `times`. `check` is called before each row group. Raises MesetaError for a damaged file, and
        what `check` raises."""


def rows_of_split(
    dataset: Dataset,
    split: str,
    selection: Selection,
    counted: Mapping[int, int] | None = None,
    *,
    shuffles: bool,
    check: Check = unchecked,
) -> SplitRows:
    """The rows in the files of a dataset, or those that its recipe makes; `counted`: rows that are read of each row
    group, where others have counted them; `shuffles`: whether groups will be read in any order; `check` is called
    before each row group is counted. Raises MesetaError as SplitFiles and RecipeRows do."""
    if dataset.recipe is not None:
        return RecipeRows(dataset, split, selection, counted, shuffles=shuffles, check=check)
    return SplitFiles(dataset, split, selection, counted, check)
