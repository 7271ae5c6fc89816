"""Blocks of a table, merged from the chain of files that hold their rows."""

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
from meseta.ops.memory import empty
from meseta.system.remote import Location

# Example of a chain:
#
# block-00003.arrow of step 500     all rows of the block
# rows-00003.arrow of step 600      rows changed since then
# rows-00003.arrow of step 700      rows changed since then; the newest version of each row is valid
#
# The first file of a block has all its rows. If they are quantized, its name also starts with rows-. A full checkpoint
# without quantization has one block-... file per block.
FileEntry = Mapping[str, Any]


def group_files_by_block(table: Mapping[str, Any]) -> list[list[FileEntry]]:
    """Return the files of each block, oldest first, from a table's entry in a manifest."""
    return [list(files) for _, files in groupby(table["blocks"], key=lambda entry: entry["first_row"])]


def read_chain(
    root: Location,
    schema: BlockSchema,
    files: Sequence[FileEntry],
    is_changed: NDArray[np.bool_] | None = None,
    *,
    copy: bool = False,
) -> Values:
    """Read all rows of a block from its files, which are ordered from oldest to newest.

    Without `copy`, the next call of this thread may overwrite the result. If `is_changed` of shape [rows] is passed, it
    is set to true for each row in a file after the first. Raises the errors of `read_block`.
    """
    block = _read_full_file(root, schema, files[0])
    num_rows = files[0]["num_rows"]
    # Values read from a URL are read-only, but later files overwrite rows.
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
    if is_block_path(entry["path"]):
        return read_block(root, schema, entry, buffer="block")
    # The ids are not needed: num_rows ascending ids below num_rows are all rows.
    return read_rows(root, schema, entry, entry["num_rows"], buffer="block")[1]


def allocate_transient(shape: tuple[int, ...], stored: str) -> np.ndarray:
    """Allocate an array outside the caching allocator, so that its memory is returned to the OS when it is freed."""
    array: np.ndarray = empty(shape, getattr(torch, stored), keep=False).numpy()
    return array
