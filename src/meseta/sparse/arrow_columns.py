"""Ids of the columns of an Arrow table. Imports pyarrow when called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from meseta.errors import MesetaError
from meseta.spec import suggest

if TYPE_CHECKING:
    import pyarrow as pa

_CALLER = "KeyedJaggedTensor.from_arrow"


def read_id_columns(table: Any, features: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return values [nnz] and lengths [F * B], both int64. See `KeyedJaggedTensor.from_arrow`."""
    arrow = _as_table(table)
    columns = [_read_ids(name, _find_column(arrow, name)) for name in features]
    empty = np.empty(0, np.int64)  # np.concatenate needs at least one array.
    values, lengths = (np.concatenate([empty, *(column[i] for column in columns)]) for i in range(2))
    return torch.from_numpy(values), torch.from_numpy(lengths)


def _as_table(table: Any) -> pa.Table:
    import pyarrow as pa

    if not hasattr(table, "__arrow_c_stream__") and not hasattr(table, "__arrow_c_array__"):
        raise MesetaError(
            f"{_CALLER}: expected an Arrow table, got {type(table).__name__}; give a pyarrow Table or RecordBatch, or "
            "a DataFrame of pandas or polars"
        )
    try:
        return pa.table(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise MesetaError(
            f"{_CALLER}: cannot convert {type(table).__name__} to an Arrow table ({error}); give a pyarrow Table"
        ) from error


def _find_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    indices = table.schema.get_all_field_indices(name)
    if not indices:
        raise MesetaError(f"{_CALLER}: no column {name!r}; {suggest(name, table.column_names)}")
    if len(indices) > 1:
        raise MesetaError(f"{_CALLER}: the table has {len(indices)} columns {name!r}; rename or drop all but one")
    return table.column(indices[0])


def _read_ids(name: str, column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    # Returns the ids and the number of ids of each row, both int64.
    import pyarrow as pa
    import pyarrow.compute as pc

    is_list = any(check(column.type) for check in (pa.types.is_list, pa.types.is_large_list, _is_fixed_size_list))
    ids_type = column.type.value_type if is_list else column.type
    # A column in which all values are missing has the type null.
    if not pa.types.is_integer(ids_type) and not pa.types.is_null(ids_type):
        raise MesetaError(
            f"{_CALLER}: column {name!r} has type {column.type}, but must have integers or lists of integers; "
            "cast it, and map categories to ids first"
        )
    if is_list:
        ids, lengths = pc.list_flatten(column), pc.fill_null(pc.list_value_length(column).cast(pa.int64()), 0)
        if ids.null_count:
            raise MesetaError(
                f"{_CALLER}: column {name!r} has {ids.null_count} null ids inside lists; remove them from the lists"
            )
    else:
        ids, lengths = column.drop_null(), pc.is_valid(column).cast(pa.int64())
    try:
        return ids.cast(pa.int64()).to_numpy(), lengths.to_numpy()
    except pa.ArrowInvalid as error:
        raise MesetaError(
            f"{_CALLER}: column {name!r} has an id that does not fit into int64 ({error}); take it modulo the number "
            "of rows of its table"
        ) from error


def _is_fixed_size_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_fixed_size_list(kind))
