"""One split as readers see it, wherever its rows come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.decode import SplitFiles
from meseta.data.read.options import CancellationCheck, never_cancelled
from meseta.data.read.recipe_rows import RecipeRows
from meseta.data.read.rows import Rows
from meseta.data.read.selection import ExcludedRows, RowSelection
from meseta.data.read.window_times import WindowTimer


@runtime_checkable  # beartype asks for it where the tests check every call
class SplitRows(Protocol):
    """The row groups of a split that have rows to read. Threads may share it."""

    excluded_rows: ExcludedRows
    """Rows of the split that the selection leaves out."""

    @property
    def group_row_counts(self) -> dict[int, int]:
        """Rows that are read of each row group that has any, by its number in the split."""

    @property
    def int64_features(self) -> list[str]:
        """Sparse features whose ids are int64 somewhere, and not int32 as otherwise."""

    @property
    def group_rows(self) -> list[int]:
        """Rows that are read of each row group."""

    def read(
        self,
        groups: Sequence[int],
        *,
        by_row: bool,
        times: WindowTimer | None = None,
        check_cancelled: CancellationCheck = never_cancelled,
    ) -> Rows:
        """Decode row groups, by their place in `group_rows`; `by_row`: whether rows will be taken one by one. What that
        takes is added to `times`. `check_cancelled` is called before each row group. Raises MesetaError for a damaged
        file, and what `check_cancelled` raises."""


def open_split_rows(
    dataset: Dataset,
    split: str,
    selection: RowSelection,
    group_row_counts: Mapping[int, int] | None = None,
    *,
    shuffle: bool,
    check_cancelled: CancellationCheck = never_cancelled,
) -> SplitRows:
    """The rows in the files of a dataset, or those that its recipe makes; `group_row_counts`: rows that are read of
    each row group, where others have counted them; `shuffle`: whether groups will be read in any order;
    `check_cancelled` is called before each row group is counted. Raises MesetaError as SplitFiles and RecipeRows do."""
    if dataset.recipe is not None:
        return RecipeRows(dataset, split, selection, group_row_counts, shuffle=shuffle, check_cancelled=check_cancelled)
    return SplitFiles(dataset, split, selection, group_row_counts, check_cancelled)
