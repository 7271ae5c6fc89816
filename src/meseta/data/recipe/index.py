"""Where the rows of each split lie in the raw files: the blocks in which these were read, and where in them the row
groups of a split begin.

    blocks.parquet  source  row  line  offset  num_rows  num_bytes  train  valid  test     a row for each block
    groups.parquet  split  block  row  line  offset                                        one for each row group

All numbers are int64 and count from 0: `source` in the recipe, `row` and `line` in the file, `offset` in bytes of
unzipped text, `split` in the recipe's splits, `block` in the first table. A block has `num_rows` rows in the numbers
by which splits are drawn, and so many of each split; of Parquet lines and bytes are 0.

A row group is read from its first row to that of the next one, block by block: each part is parsed from the very
bytes that were parsed together when the recipe was made, so that it becomes the same rows, also beside bad ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.data.formats.format import FilePosition
from meseta.data.recipe.recipe import REMAKE_REMEDY, IndexFile, Recipe
from meseta.errors import error_summary
from meseta.machine.files import read_bounded, resolve_inside
from meseta.spec import MesetaError

BLOCK_COLUMNS = ("source", "row", "line", "offset", "num_rows", "num_bytes")
"""Before one for each split."""
GROUP_COLUMNS = ("split", "block", "row", "line", "offset")
_MAX_BYTES = 1 << 32
"""Of one of the files, which may tell of petabytes."""

Columns = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """Consecutive rows of a file that lie in one block."""

    source: int
    """Number of the file in the recipe."""
    start: FilePosition
    stop: FilePosition
    first_global_row: int
    """Rows of all sources before it."""


class SourceIndex:
    """The rows of all splits, row group by row group."""

    def __init__(self, blocks: Columns, groups: Columns, splits: Sequence[str], group_rows: int) -> None:
        """`blocks`: columns [number of blocks] by BLOCK_COLUMNS and splits; `groups`: those of GROUP_COLUMNS [number of
        groups], split by split; `group_rows`: rows of a row group."""
        self._blocks, self._groups = blocks, groups
        self._splits, self._group_rows = tuple(splits), group_rows
        self._first_group = {split: int((groups["split"] < place).sum()) for place, split in enumerate(splits)}
        rows_of_source = np.bincount(blocks["source"], blocks["num_rows"]).astype(np.int64)
        self._rows_before = np.cumsum(rows_of_source) - rows_of_source

    def num_rows(self, split: str) -> int:
        """Of a split."""
        return int(self._blocks[split].sum())

    def group_rows(self, split: str) -> list[int]:
        """Rows of each row group of a split."""
        num_rows, size = self.num_rows(split), self._group_rows
        return [min(size, num_rows - first) for first in range(0, num_rows, size)]

    def row_ranges(self, split: str, group: int) -> list[RowRange]:
        """Where the rows of a row group lie, in order; rows of other splits are among them."""
        first, last = self._group_start(split, group), self._group_start(split, group + 1)
        stretches = []
        for block in range(first[0], last[0] + 1):
            start = first[1] if block == first[0] else self._block_start(block)
            stop = last[1] if block == last[0] else self._block_end(block)
            if self._blocks[split][block] and (start.row, start.offset) != (stop.row, stop.offset):
                source = int(self._blocks["source"][block])
                before = int(self._rows_before[source])
                stretches.append(RowRange(source=source, start=start, stop=stop, first_global_row=before + start.row))
        return stretches

    def _group_start(self, split: str, group: int) -> tuple[int, FilePosition]:
        """The block of a group's first row, and where that begins; behind the last group, the end of all blocks."""
        if group * self._group_rows >= self.num_rows(split):
            last = self._blocks["source"].size - 1
            return last, self._block_end(last)
        place = self._first_group[split] + group
        row, line, offset = (int(self._groups[name][place]) for name in ("row", "line", "offset"))
        return int(self._groups["block"][place]), FilePosition(row=row, line=line, offset=offset)

    def _block_start(self, block: int) -> FilePosition:
        row, line, offset = (int(self._blocks[name][block]) for name in ("row", "line", "offset"))
        return FilePosition(row=row, line=line, offset=offset)

    def _block_end(self, block: int) -> FilePosition:
        begin = self._block_start(block)
        num_rows, num_bytes = (int(self._blocks[name][block]) for name in ("num_rows", "num_bytes"))
        return FilePosition(row=begin.row + num_rows, line=begin.line + num_rows, offset=begin.offset + num_bytes)

    @staticmethod
    def load(recipe: Recipe, dataset: Dataset) -> SourceIndex:
        """Read the files of a recipe. Raises MesetaError for one that is missing, or not what the recipe speaks of."""
        block_columns = (*BLOCK_COLUMNS, *recipe.splits)
        blocks = _read_columns(dataset, recipe.blocks, block_columns)
        groups = _read_columns(dataset, recipe.groups, GROUP_COLUMNS)
        rows = {name: split.num_rows for name, split in dataset.splits.items()}
        if fault := _invalid_index_reason(blocks, groups, recipe, rows):
            where = f"index {str(dataset.dir / recipe.groups.path)!r}"
            raise MesetaError(f"{where} cannot be that of these files: {fault}; {REMAKE_REMEDY}")
        return SourceIndex(blocks, groups, recipe.splits, recipe.group_rows)


def _read_columns(dataset: Dataset, file: IndexFile, names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """The columns of one file."""
    where = f"index {str(dataset.dir / file.path)!r}"
    try:
        content = read_bounded(resolve_inside(dataset.dir, file.path), _MAX_BYTES)
        if sha256(content).hexdigest() != file.sha256:
            raise MesetaError(f"{where} is not the one that the recipe was written with; {REMAKE_REMEDY}")
        table = pq.read_table(pa.BufferReader(content))
        if table.schema.names != list(names) or any(kind != pa.int64() for kind in table.schema.types):
            raise MesetaError(f"{where} has other columns than {', '.join(names)}; {REMAKE_REMEDY}")
        if any(column.null_count for column in table.columns):
            raise MesetaError(f"{where} has values missing; {REMAKE_REMEDY}")
    except (pa.ArrowException, OSError) as error:
        raise MesetaError(f"{where} cannot be read ({error_summary(error)}); {REMAKE_REMEDY}") from None
    return {name: table.column(name).to_numpy() for name in names}


def _invalid_index_reason(blocks: Columns, groups: Columns, recipe: Recipe, rows: Mapping[str, int]) -> str | None:
    """What no index can be; None where nothing is."""
    source, number = blocks["source"], blocks["source"].size
    numbers = [*blocks.values(), *groups.values()]
    if not number or any((column < 0).any() or (column >= 1 << 53).any() for column in numbers):
        return "it has no blocks, or numbers out of bounds"
    is_first = np.concatenate([[True], source[1:] != source[:-1]])
    if (np.diff(source) < 0).any() or source[-1] >= len(recipe.sources) or blocks["row"][is_first].any():
        return "its blocks do not go through the sources in order"
    for begin, size in (("row", "num_rows"), ("offset", "num_bytes")):
        ends = blocks[begin] + blocks[size]
        if (blocks[begin][1:] != ends[:-1])[~is_first[1:]].any():
            return "its blocks do not follow each other"
    if (np.diff(groups["split"]) < 0).any() or (groups["split"] >= len(recipe.splits)).any():
        return "its row groups do not go through the splits in order"
    if (groups["block"] >= number).any():
        return "a row group begins in no block"
    return _invalid_groups_reason(blocks, groups, recipe, rows)


def _invalid_groups_reason(blocks: Columns, groups: Columns, recipe: Recipe, rows: Mapping[str, int]) -> str | None:
    for place, split in enumerate(recipe.splits):
        mine = {name: column[groups["split"] == place] for name, column in groups.items()}
        until = np.cumsum(blocks[split])
        if until[-1] != rows[split]:
            return f"it has {until[-1]} rows of split {split!r}, and dataset.json {rows[split]}"
        firsts = np.arange(0, rows[split], recipe.group_rows)
        if not np.array_equal(mine["block"], np.searchsorted(until, firsts, side="right")):
            return f"row groups of split {split!r} begin in other blocks than their rows"
        inside_block = mine["row"] >= blocks["row"][mine["block"]]
        inside_block &= mine["offset"] >= blocks["offset"][mine["block"]]
        ends = (blocks["offset"] + blocks["num_bytes"])[mine["block"]]
        same = mine["block"][1:] == mine["block"][:-1]
        if not inside_block.all() or (mine["offset"] > ends).any() or (np.diff(mine["row"])[same] <= 0).any():
            return f"a row group of split {split!r} begins outside of its block"
    return None
