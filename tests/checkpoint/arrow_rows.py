"""Rows of full checkpoints, read with pyarrow alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray


def read_columns(path: Path) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the columns [rows, numbers per row] of a checkpoint by table and name: `row` and optimizer states."""
    tables = {}
    for table, entry in json.loads((path / "manifest.json").read_text())["tables"].items():
        whole = pa.concat_tables(pa.ipc.open_file(str(path / block["path"])).read_all() for block in entry["blocks"])
        columns = {}
        for name in whole.column_names[1:]:
            column = whole[name].combine_chunks()
            is_list = pa.types.is_fixed_size_list(column.type)
            flat = (column.flatten() if is_list else column).to_numpy(zero_copy_only=False)
            columns[name] = flat.reshape(len(column), -1)
        tables[table] = columns
    return tables
