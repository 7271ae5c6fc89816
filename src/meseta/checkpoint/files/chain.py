"""A block of a table, put together from the files that hold its rows.

    block-00003.arrow of step 500     all rows of the block
    rows-00003.arrow of step 600      those that have changed by then
    rows-00003.arrow of step 700      ...; of a row that several files hold, the newest is the row

The first file of a block holds all its rows; where they are quantised, its name begins with rows- too. A checkpoint
that is whole and exact has one file per block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meseta.checkpoint.files.block import Values, read_block, read_rows
from meseta.checkpoint.files.layout import BlockSchema
from meseta.checkpoint.files.paths import is_block_path
from meseta.machine.remote import Location
from meseta.ops.memory import empty

FileEntry = Mapping[str, Any]
"""Of a file in a manifest."""


def group_files_by_block(table: Mapping[str, Any]) -> list[list[FileEntry]]:
    """The files of each block, oldest first, of a table's entry in a manifest."""
    return [list(files) for _, files in groupby(table["blocks"], key=lambda entry: entry["first_row"])]


def read_chain(
    root: Location,
    schema: BlockSchema,
    files: Sequence[FileEntry],
    is_changed: NDArray[np.bool_] | None = None,
    *,
    copy: bool = False,
) -> Values:
    """All rows of a block, of its files from the oldest to the newest; `is_changed` [rows] becomes true where a file
    behind the first has the row.

    They lie in memory that this thread's next call may use again, unless they are to be kept. Raises what `read_block`
    raises.
    """
    block = _read_full_file(root, schema, files[0])
    num_rows = files[0]["num_rows"]
    if copy or (len(files) > 1 and not all(value.flags.writeable for value in block.values())):
        values = block
        block = {
            column.name: allocate_transient(schema.shape(column, num_rows), column.stored_dtype)
            for column in schema.columns
        }
        for name, value in values.items():
            np.copyto(block[name], value)
    for entry in files[1:]:
        ids, some = read_rows(root, schema, entry, num_rows)
        if is_changed is not None:
            is_changed[ids] = True
        for name, value in some.items():
            block[name][ids] = value
    return block


def _read_full_file(root: Location, schema: BlockSchema, entry: FileEntry) -> Values:
    """All rows of a block, of a file that holds them as they are or in codes."""
    if is_block_path(entry["path"]):
        return read_block(root, schema, entry, buffer="block")
    return read_rows(root, schema, entry, entry["num_rows"], buffer="block")[1]  # so many ids that rise are all


def allocate_transient(shape: tuple[int, ...], stored: str) -> np.ndarray:
    """An array whose memory goes back to the system with it: a process would keep that of every block."""
    array: np.ndarray = empty(shape, getattr(torch, stored), keep=False).numpy()
    return array
