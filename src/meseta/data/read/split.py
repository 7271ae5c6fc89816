"""Rows of one split, from Parquet files or from a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.decode import SplitFiles
from meseta.data.read.options import CancellationCheck, never_cancelled
from meseta.data.read.recipe_rows import RecipeRows
from meseta.data.read.rows import Rows, WindowTimer
from meseta.data.read.selection import ExcludedRows, RowSelection


@runtime_checkable  # Tests check all calls with beartype, which needs it.
class SplitRows(Protocol):
    """Thread-safe access to the row groups of a split that have selected rows."""

    excluded_rows: ExcludedRows

    @property
    def group_row_counts(self) -> dict[int, int]:
        """Number of selected rows by number of the row group in the split. Groups without selected rows are left
        out."""

    @property
    def int64_features(self) -> list[str]:
        """Sparse features whose ids are int64 in some file. The ids of other features are int32."""

    @property
    def group_rows(self) -> list[int]:
        """Number of selected rows of each row group."""

    def read(
        self,
        groups: Sequence[int],
        *,
        by_row: bool,
        times: WindowTimer | None = None,
        check_cancelled: CancellationCheck = never_cancelled,
    ) -> Rows:
        """Decode row groups, given by their indices in `group_rows`.

        `by_row` optimizes the result for taking single rows. The time spent is added to `times`. `check_cancelled` is
        called before each row group. Raises MesetaError if a file is damaged, and any error of `check_cancelled`.
        """


def open_split_rows(
    dataset: Dataset,
    split: str,
    selection: RowSelection,
    group_row_counts: Mapping[int, int] | None = None,
    *,
    shuffle: bool,
    check_cancelled: CancellationCheck = never_cancelled,
) -> SplitRows:
    """Open the rows of a split, from Parquet files or from a recipe.

    `selection` selects rows. `group_row_counts` has the number of selected rows of each row group, without empty
    groups, if they were counted before. `shuffle` means that groups will be read in any order. `check_cancelled` is
    called before the rows of each row group are counted, and may raise to stop.

    Raises MesetaError as `SplitFiles` and `RecipeRows` do.
    """
    if dataset.recipe is not None:
        return RecipeRows(dataset, split, selection, group_row_counts, shuffle=shuffle, check_cancelled=check_cancelled)
    return SplitFiles(dataset, split, selection, group_row_counts, check_cancelled)
