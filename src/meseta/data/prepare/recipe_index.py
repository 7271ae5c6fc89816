"""Index of the rows of each split in the raw files.

It consists of two Parquet files:

    blocks.parquet  source  row  line  offset  num_rows  num_bytes  train  valid  test     one row per block
    groups.parquet  split  block  row  line  offset                                        one row per row group

All numbers are int64 and count from 0. `source` is an index in the recipe's sources, `split` one in its splits, and
`block` one in the first table. `row` and `line` count within the file, and `offset` counts bytes of decompressed text.
For Parquet, lines and bytes are 0.

`num_rows` includes bad rows. `train`, `valid` and `test` are the numbers of rows of each split in the block.

A row group extends from its first row to the first row of the next group, block by block. Rows are always parsed
together with the same bytes as when the recipe was made, so that they are identical even next to bad rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.dataset import SPLITS, Dataset
from meseta.data.formats.bad_rows import ParsedRows
from meseta.data.formats.format import Block, FilePosition
from meseta.data.prepare.encode import EncodedBlock
from meseta.data.prepare.recipe import REMAKE_REMEDY, IndexFile, Recipe
from meseta.errors import error_summary
from meseta.spec import MesetaError
from meseta.system.files import read_bounded, resolve_inside

# One column per split follows.
BLOCK_COLUMNS = ("source", "row", "line", "offset", "num_rows", "num_bytes")
GROUP_COLUMNS = ("split", "block", "row", "line", "offset")
# Maximum size of an index file. It can describe petabytes of raw files.
_MAX_BYTES = 1 << 32

Columns = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """Consecutive rows of a file, all in one block."""

    source: int
    """Index of the file in the recipe's sources."""
    start: FilePosition
    stop: FilePosition
    first_global_row: int
    """Number of rows of all sources before this range."""


class SourceIndex:
    """Positions of the rows of all splits, by row group."""

    def __init__(self, blocks: Columns, groups: Columns, splits: Sequence[str], group_rows: int) -> None:
        """Create an index from its two tables.

        `blocks` has the columns `BLOCK_COLUMNS` and one per split, each [num_blocks]. `groups` has the columns
        `GROUP_COLUMNS`, each [num_groups], ordered by split. `group_rows` is the number of rows per row group.
        """
        self._blocks, self._groups = blocks, groups
        self._splits, self._group_rows = tuple(splits), group_rows
        self._first_group = {split: int((groups["split"] < place).sum()) for place, split in enumerate(splits)}
        rows_of_source = np.bincount(blocks["source"], blocks["num_rows"]).astype(np.int64)
        self._rows_before = np.cumsum(rows_of_source) - rows_of_source

    def num_rows(self, split: str) -> int:
        return int(self._blocks[split].sum())

    def group_rows(self, split: str) -> list[int]:
        """Return the number of rows of each row group of a split."""
        num_rows, size = self.num_rows(split), self._group_rows
        return [min(size, num_rows - first) for first in range(0, num_rows, size)]

    def row_ranges(self, split: str, group: int) -> list[RowRange]:
        """Return the ranges with the rows of a row group, in order. They may contain rows of other splits too."""
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
        # The group after the last one starts at the end of all blocks.
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
        """Load the index of a recipe. Raises MesetaError if a file is missing or does not match the recipe."""
        block_columns = (*BLOCK_COLUMNS, *recipe.splits)
        blocks = _read_columns(dataset, recipe.blocks, block_columns)
        groups = _read_columns(dataset, recipe.groups, GROUP_COLUMNS)
        rows = {name: split.num_rows for name, split in dataset.splits.items()}
        if fault := _invalid_index_reason(blocks, groups, recipe, rows):
            where = f"index {str(dataset.dir / recipe.groups.path)!r}"
            raise MesetaError(f"{where} does not match the raw files: {fault}; {REMAKE_REMEDY}")
        return SourceIndex(blocks, groups, recipe.splits, recipe.group_rows)


def _read_columns(dataset: Dataset, file: IndexFile, names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    where = f"index {str(dataset.dir / file.path)!r}"
    try:
        content = read_bounded(resolve_inside(dataset.dir, file.path), _MAX_BYTES)
        if sha256(content).hexdigest() != file.sha256:
            raise MesetaError(f"{where} does not match the checksum in the recipe; {REMAKE_REMEDY}")
        table = pq.read_table(pa.BufferReader(content))
        if table.schema.names != list(names) or any(kind != pa.int64() for kind in table.schema.types):
            raise MesetaError(f"{where} must have the int64 columns {', '.join(names)}; {REMAKE_REMEDY}")
        if any(column.null_count for column in table.columns):
            raise MesetaError(f"{where} has missing values; {REMAKE_REMEDY}")
    except (pa.ArrowException, OSError) as error:
        raise MesetaError(f"{where} cannot be read ({error_summary(error)}); {REMAKE_REMEDY}") from None
    return {name: table.column(name).to_numpy() for name in names}


def _invalid_index_reason(blocks: Columns, groups: Columns, recipe: Recipe, rows: Mapping[str, int]) -> str | None:
    """Return the rule that the tables break, or `None`. `rows` has the number of rows per split."""
    source, number = blocks["source"], blocks["source"].size
    # Numbers below 2^53 cannot overflow when they are added.
    numbers = [*blocks.values(), *groups.values()]
    if not number or any((column < 0).any() or (column >= 1 << 53).any() for column in numbers):
        return "it has no blocks, or numbers out of range"
    is_first = np.concatenate([[True], source[1:] != source[:-1]])
    if (np.diff(source) < 0).any() or source[-1] >= len(recipe.sources) or blocks["row"][is_first].any():
        return "its blocks are not in the order of the sources"
    for begin, size in (("row", "num_rows"), ("offset", "num_bytes")):
        ends = blocks[begin] + blocks[size]
        if (blocks[begin][1:] != ends[:-1])[~is_first[1:]].any():
            return "its blocks are not contiguous"
    if (np.diff(groups["split"]) < 0).any() or (groups["split"] >= len(recipe.splits)).any():
        return "its row groups are not in the order of the splits"
    if (groups["block"] >= number).any():
        return "a row group begins in a block that does not exist"
    return _invalid_groups_reason(blocks, groups, recipe, rows)


def _invalid_groups_reason(blocks: Columns, groups: Columns, recipe: Recipe, rows: Mapping[str, int]) -> str | None:
    for place, split in enumerate(recipe.splits):
        starts = {name: column[groups["split"] == place] for name, column in groups.items()}
        until = np.cumsum(blocks[split])
        if until[-1] != rows[split]:
            return f"it has {until[-1]} rows of split {split!r}, but dataset.json has {rows[split]}"
        firsts = np.arange(0, rows[split], recipe.group_rows)
        if not np.array_equal(starts["block"], np.searchsorted(until, firsts, side="right")):
            return f"row groups of split {split!r} begin in other blocks than their rows"
        inside_block = starts["row"] >= blocks["row"][starts["block"]]
        inside_block &= starts["offset"] >= blocks["offset"][starts["block"]]
        ends = (blocks["offset"] + blocks["num_bytes"])[starts["block"]]
        same = starts["block"][1:] == starts["block"][:-1]
        if not inside_block.all() or (starts["offset"] > ends).any() or (np.diff(starts["row"])[same] <= 0).any():
            return f"a row group of split {split!r} begins outside its block"
    return None


_FOLDER = "index"


class IndexWriter:
    """Block observer that records the positions of blocks and row groups. See `meseta.data.prepare.recipe_index`."""

    def __init__(self, scratch: Path, splits: Sequence[str], group_rows: int) -> None:
        """Create a writer. Intermediate files are stored in the folder `scratch`."""
        self._splits, self._group_rows = tuple(splits), group_rows
        self._num_rows = dict.fromkeys(splits, 0)
        self._blocks = _AppendOnlyTable(scratch / "blocks.i64", len(BLOCK_COLUMNS) + len(splits))
        self._groups = _AppendOnlyTable(scratch / "groups.i64", len(GROUP_COLUMNS))

    def add(self, source: int, block: Block, parts: ParsedRows[EncodedBlock]) -> None:
        before = dict(self._num_rows)
        for encoded in parts.results:
            for split, batch in encoded.splits.items():
                self._add_groups(split, encoded, batch.num_rows)
        counts = [self._num_rows[split] - before[split] for split in self._splits]
        start = block.start
        num_bytes = block.end.offset - start.offset
        self._blocks.add([source, start.row, start.line, start.offset, block.num_rows, num_bytes, *counts])

    def get_state(self) -> dict[str, Any]:
        return {
            "num_rows": self._num_rows,
            "blocks": self._blocks.flush(),
            "groups": self._groups.flush(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._num_rows = dict(state["num_rows"])
        self._blocks.truncate(state["blocks"])
        self._groups.truncate(state["groups"])

    def finish(self, folder: Path) -> tuple[IndexFile, IndexFile]:
        """Write the two index files to the dataset in `folder`."""
        (folder / _FOLDER).mkdir(exist_ok=True)
        groups = self._groups.read()
        # Blocks contain rows of several splits, but the index is ordered by split.
        groups = groups[np.argsort(groups[:, 0], kind="stable")]
        return (
            _write(folder, "blocks", (*BLOCK_COLUMNS, *self._splits), self._blocks.read()),
            _write(folder, "groups", GROUP_COLUMNS, groups),
        )

    def _add_groups(self, split: str, encoded: EncodedBlock, num_rows: int) -> None:
        # `encoded` contains the next `num_rows` rows of the split. Record the row groups that begin in them.
        before = self._num_rows[split]
        self._num_rows[split] += num_rows
        first = -(-before // self._group_rows) * self._group_rows
        if first >= before + num_rows:
            return
        places = np.flatnonzero(encoded.split_ids == SPLITS.index(split))
        for row in range(first, before + num_rows, self._group_rows):
            block = encoded.block
            start = block.source.format.row_position(block, int(places[row - before]))
            number = self._splits.index(split)
            self._groups.add([number, self._blocks.num_rows, start.row, start.line, start.offset])


class _AppendOnlyTable:
    def __init__(self, path: Path, num_columns: int) -> None:
        self.num_rows = 0
        self._path, self._num_columns = path, num_columns
        self._num_written = 0
        """Number of rows in the file. Any further content comes from an interrupted run."""
        self._unwritten: list[list[int]] = []

    def add(self, row: list[int]) -> None:
        self._unwritten.append(row)
        self.num_rows += 1

    def flush(self) -> int:
        # The file may have further rows, from an interrupted run.
        with self._path.open("ab") as file:
            file.truncate(self._num_written * self._num_columns * 8)
            np.array(self._unwritten, np.int64).tofile(file)
        self._num_written, self._unwritten = self.num_rows, []
        return self.num_rows

    def truncate(self, num_rows: int) -> None:
        # The next `flush` truncates the file to `num_rows` rows.
        self.num_rows = self._num_written = num_rows

    def read(self) -> NDArray[np.int64]:
        self.flush()
        return np.fromfile(self._path, np.int64).reshape(-1, self._num_columns)


def _write(folder: Path, name: str, columns: Sequence[str], rows: NDArray[np.int64]) -> IndexFile:
    path = f"{_FOLDER}/{name}.parquet"
    table = pa.table({column: rows[:, place] for place, column in enumerate(columns)})
    pq.write_table(
        table,
        folder / path,
        compression="zstd",
        use_dictionary=False,
        column_encoding="DELTA_BINARY_PACKED",
        write_statistics=False,
    )
    return IndexFile(path=path, sha256=sha256((folder / path).read_bytes()).hexdigest())
