"""Quantization in checkpoint files as in Check-N-Run (NSDI 2022, section 5), with an adaptive scale per row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from meseta.checkpoint.files.layout import BlockSchema, Column
from meseta.config.row_bits import ROW_BIT_WIDTHS, RowBits
from meseta.errors import format_value
from meseta.ops.quantize import RowFormat, dequantize_rows, quantize_rows
from meseta.ops.quantize.reference import CODE_BITS, row_bytes
from meseta.spec import MesetaError
from meseta.spec.shards import LOCAL_ROW_ID_BYTES
from meseta.storage import ROW, as_stored
from meseta.storage.table import from_stored

# The first format that can represent all values of a file is used.
_ROW_FORMATS: Mapping[RowBits, tuple[RowFormat, ...]] = {
    8: ("int8",),
    4: ("int4", "int8"),
    3: ("int3", "int8"),
    2: ("int2", "int8"),
}
# States with one value per element are stored as bf16. The second moments of a row differ by orders of magnitude. With
# one scale for the row, small ones would become 0, and steps are divided by their roots. States with one value per row
# stay exact.
_STATE_FORMAT: RowFormat = "bf16"
_CHUNK_VALUES = 1 << 18


ColumnFormats = Mapping[str, RowFormat]
"""Formats of quantized columns by name. Columns that are not listed are exact."""


class StoredRows(NamedTuple):
    """Rows in the encoding of a file."""

    values: dict[str, np.ndarray]
    """Encoded values by column, see `StoredColumn.values`."""
    formats: dict[str, RowFormat]
    errors: dict[str, float]
    """Largest quantization error of each quantized column."""


class StoredColumn(NamedTuple):
    """Column in the encoding of a quantized file."""

    values: np.ndarray
    """uint8 array of shape [n, bytes per row] if quantized, otherwise the exact values."""
    row_format: RowFormat | None
    """Format of the bytes. `None` if the values are exact."""
    error: float
    """Upper bound of |value - dequantized value| over the column."""


def candidate_formats(schema: BlockSchema, column: Column, bits: RowBits) -> tuple[RowFormat, ...]:
    """Return the formats of a column in order of preference, all smaller than exact values. Empty if always exact."""
    if column.kind == "row" or column.dtype not in ("float32", "float16", "bfloat16"):
        return ()
    formats = _ROW_FORMATS[bits] if column.name == ROW else (_STATE_FORMAT,)
    exact = np.dtype(column.stored_dtype).itemsize * schema.embedding_dim
    return tuple(form for form in formats if row_bytes(form, schema.embedding_dim) < exact)


def estimate_row_bytes(schema: BlockSchema, bits: RowBits | None) -> int:
    """Estimate the size of a row with id and states at `bits` bits per value. `None` means exact rows in a block."""
    if bits is None:
        return schema.row_bytes
    forms = {column.name: candidate_formats(schema, column, bits) for column in schema.columns}
    return quantized_row_bytes(schema, {name: of[0] for name, of in forms.items() if of})


def quantized_row_bytes(schema: BlockSchema, codes: ColumnFormats) -> int:
    """Return the size of a row with its id and states in a file with these formats."""
    return LOCAL_ROW_ID_BYTES + sum(
        row_bytes(codes[column.name], schema.embedding_dim)
        if column.name in codes
        else np.dtype(column.stored_dtype).itemsize * schema.width(column)
        for column in schema.columns
    )


def quantized_schema(schema: BlockSchema, codes: ColumnFormats) -> pa.Schema:
    """Return the Arrow schema of a file with some rows of a block and these formats.

    A quantized column is a list of the bytes of each row. The metadata of its field have data type and format, such as
    {'dtype': 'float32', 'codes': 'int4'}.
    """
    fields = schema.rows_to_arrow()
    for place, column in enumerate(schema.columns, start=1):
        if form := codes.get(column.name):
            item = pa.field("item", pa.uint8(), nullable=False)
            kind, metadata = (
                pa.list_(item, row_bytes(form, schema.embedding_dim)),
                {"dtype": column.dtype, "codes": form},
            )
            fields = fields.set(place, pa.field(column.name, kind, nullable=False, metadata=metadata))
    return fields


def invalid_formats_reason(schema: BlockSchema, entry: Mapping[str, Any]) -> str | None:
    """Return the reason why the formats and errors in a file's manifest entry are invalid, or `None`."""
    codes, errors = entry.get("codes"), entry.get("error")
    if codes is None and errors is None:
        return None
    if not codes or codes.keys() != (errors or {}).keys():
        return "its codes and their errors must have the same columns, and at least one"
    allowed = {
        column.name: {form for bits in ROW_BIT_WIDTHS for form in candidate_formats(schema, column, bits)}
        for column in schema.columns
    }
    for name, form in codes.items():
        if form not in allowed.get(name, ()):
            return f"its column {format_value(name)} cannot be encoded as {form}"
    return None


def encode_rows(schema: BlockSchema, values: Mapping[str, np.ndarray], bits: RowBits | None) -> StoredRows:
    """Encode all columns of some rows. If `bits` is `None`, the values stay exact."""
    if bits is None:
        return StoredRows(dict(values), {}, {})
    stored = {column.name: encode_column(schema, column, values[column.name], bits) for column in schema.columns}
    coded = {name: column for name, column in stored.items() if column.row_format is not None}
    return StoredRows(
        {name: column.values for name, column in stored.items()},
        {name: column.row_format for name, column in coded.items() if column.row_format is not None},
        {name: column.error for name, column in coded.items()},
    )


def decode_rows(schema: BlockSchema, stored: Mapping[str, np.ndarray], codes: ColumnFormats) -> dict[str, np.ndarray]:
    """Decode rows of a file to the exact types of all columns."""
    return {
        column.name: decode_column(schema, column, stored[column.name], codes[column.name])
        if column.name in codes
        else stored[column.name]
        for column in schema.columns
    }


def encode_column(schema: BlockSchema, column: Column, values: np.ndarray, bits: RowBits) -> StoredColumn:
    """Encode a column of shape [n, D] or [n] with `bits` bits per value.

    If a value is outside the range of the format, the column is stored as int8. If int8 cannot represent a value, such
    as a NaN, the column stays exact.
    """
    for form in candidate_formats(schema, column, bits):
        try:
            codes, error = _quantize(column, np.ascontiguousarray(values), form)
        except MesetaError:  # A value is outside the range of this format.
            continue
        if np.isfinite(error):
            return StoredColumn(codes, form, error)
    return StoredColumn(values, None, 0.0)


def decode_column(schema: BlockSchema, column: Column, stored: np.ndarray, codes: RowFormat) -> np.ndarray:
    """Dequantize a column of shape [n, bytes per row] to [n, D] in the column's stored type."""
    rows = dequantize_rows(torch.from_numpy(_ensure_writable(stored)), codes, schema.embedding_dim)
    return as_stored(rows.to(getattr(torch, column.dtype))).numpy()


def _quantize(column: Column, values: np.ndarray, form: RowFormat) -> tuple[np.ndarray, float]:
    """Return (quantized rows, largest error). Raises MesetaError if a value is out of range."""
    num_rows, dim = values.shape
    dtype: torch.dtype = getattr(torch, column.dtype)
    codes, errors = np.empty((num_rows, row_bytes(form, dim)), np.uint8), []
    for part in _chunks(num_rows, dim):
        rows = from_stored(_ensure_writable(values[part]), dtype)
        quantised = quantize_rows(rows, form, adaptive=form in CODE_BITS)
        codes[part] = quantised.numpy()
        restored = dequantize_rows(quantised, form, dim).to(dtype)
        errors.append((rows.double() - restored.double()).abs().amax().item())
    error = float(np.max(errors, initial=0.0))  # NaN if any error is NaN.
    # The difference of two numbers of very different magnitude is rounded to nearest. The next float is a bound.
    return codes, float(np.nextafter(error, np.inf)) if error else 0.0


def _chunks(num_rows: int, dim: int) -> Iterator[slice]:
    step = max(_CHUNK_VALUES // dim, 1)
    return (slice(first, first + step) for first in range(0, num_rows, step))


def _ensure_writable(array: np.ndarray) -> np.ndarray:
    # torch warns about arrays that are not writable.
    return array if array.flags.writeable else array.copy()
