"""Writer of the index of a recipe, used while the sources are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.dataset import SPLITS
from meseta.data.formats.bad_rows import ParsedRows
from meseta.data.formats.format import Block
from meseta.data.prepare.encode import EncodedBlock
from meseta.data.recipe.index import BLOCK_COLUMNS, GROUP_COLUMNS
from meseta.data.recipe.recipe import IndexFile

_FOLDER = "index"


class IndexWriter:
    """Block observer that records the positions of blocks and row groups. See `meseta.data.recipe.index`."""

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
    """Table of integers whose rows are appended to a file."""

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
