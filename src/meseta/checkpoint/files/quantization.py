"""Values of a table in fewer bits, as a quantised file stores them.

Rows have the codes of meseta.ops.quantize, each row on its own adaptive scale (Check-N-Run, NSDI 2022, section 5).
States with one number per row stay as they are. A state with one number per element is kept in bf16, whatever the rows
are in: a row's second moments lie decades apart, and codes on one scale for all of them would make zeros of the small
ones, by whose roots steps are divided.
"""

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
from meseta.spec.checkpoint_blocks import LOCAL_ROW_ID_BYTES
from meseta.storage import ROW, as_stored
from meseta.storage.table import from_stored

_ROW_FORMATS: Mapping[RowBits, tuple[RowFormat, ...]] = {
    8: ("int8",),
    4: ("int4", "int8"),
    3: ("int3", "int8"),
    2: ("int2", "int8"),
}
"""Of rows: the first one that takes all values of a file."""
_STATE_FORMAT: RowFormat = "bf16"
_CHUNK_VALUES = 1 << 18
"""Values that are restored and compared at a time."""


ColumnFormats = Mapping[str, RowFormat]
"""By column; those that are not there are exact."""


class StoredRows(NamedTuple):
    """Some rows as a file stores them."""

    values: dict[str, np.ndarray]
    """By column, as `StoredColumn` has them."""
    formats: dict[str, RowFormat]
    errors: dict[str, float]
    """Of each column in codes."""


class StoredColumn(NamedTuple):
    """The values of one column in a quantised file."""

    values: np.ndarray
    """uint8 [n, bytes of a row], or, without codes, the values themselves."""
    row_format: RowFormat | None
    """What the bytes are; None: the values are exact."""
    error: float
    """The largest |value - restored value|, at least."""


def candidate_formats(schema: BlockSchema, column: Column, bits: RowBits) -> tuple[RowFormat, ...]:
    """What a column may be stored in, the best first; each takes fewer bytes than the values do, so there may be
    none."""
    if column.kind == "row" or column.dtype not in ("float32", "float16", "bfloat16"):
        return ()
    formats = _ROW_FORMATS[bits] if column.name == ROW else (_STATE_FORMAT,)
    exact = np.dtype(column.stored_dtype).itemsize * schema.embedding_dim
    return tuple(form for form in formats if row_bytes(form, schema.embedding_dim) < exact)


def estimate_row_bytes(schema: BlockSchema, bits: RowBits | None) -> int:
    """Bytes of a row with its id and states in a file of so many bits; None: in a block."""
    if bits is None:
        return schema.row_bytes
    forms = {column.name: candidate_formats(schema, column, bits) for column in schema.columns}
    return quantized_row_bytes(schema, {name: of[0] for name, of in forms.items() if of})


def quantized_row_bytes(schema: BlockSchema, codes: ColumnFormats) -> int:
    """Bytes of a row with its id and states in a file of such codes."""
    return LOCAL_ROW_ID_BYTES + sum(
        row_bytes(codes[column.name], schema.embedding_dim)
        if column.name in codes
        else np.dtype(column.stored_dtype).itemsize * schema.width(column)
        for column in schema.columns
    )


def quantized_schema(schema: BlockSchema, codes: ColumnFormats) -> pa.Schema:
    """As `BlockSchema.rows_to_arrow`; a column in codes is a list of the bytes of a row, and its field's metadata say
    what it means: {'dtype': 'float32', 'codes': 'int4'}."""
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
    """In what a file's entry in a manifest has other codes than a column may have, or states no error of them; None
    where nothing is wrong, as where there are none."""
    codes, errors = entry.get("codes"), entry.get("error")
    if codes is None and errors is None:
        return None
    if not codes or codes.keys() != (errors or {}).keys():
        return "its codes and their errors must be of the same columns, at least of one"
    known = {
        column.name: {form for bits in ROW_BIT_WIDTHS for form in candidate_formats(schema, column, bits)}
        for column in schema.columns
    }
    for name, form in codes.items():
        if form not in known.get(name, ()):
            return f"its column {format_value(name)} cannot be in {form}"
    return None


def encode_rows(schema: BlockSchema, values: Mapping[str, np.ndarray], bits: RowBits | None) -> StoredRows:
    """All columns of some rows; of `bits` None exact."""
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
    """The way back, with the exact types of all columns."""
    return {
        column.name: decode_column(schema, column, stored[column.name], codes[column.name])
        if column.name in codes
        else stored[column.name]
        for column in schema.columns
    }


def encode_column(schema: BlockSchema, column: Column, values: np.ndarray, bits: RowBits) -> StoredColumn:
    """The values of a column, [n, D] or [n], in about `bits` bits each. Where a value is beyond what codes of this
    width take, the column has int8, and where that cannot hold it either (a NaN, an infinity), it is exact."""
    for form in candidate_formats(schema, column, bits):
        try:
            codes, error = _quantize(column, np.ascontiguousarray(values), form)
        except MesetaError:  # a value that this format does not take
            continue
        if np.isfinite(error):
            return StoredColumn(codes, form, error)
    return StoredColumn(values, None, 0.0)


def decode_column(schema: BlockSchema, column: Column, stored: np.ndarray, codes: RowFormat) -> np.ndarray:
    """Values [n, D] of the column's type, bfloat16 as uint16, of codes [n, bytes of a row]."""
    rows = dequantize_rows(torch.from_numpy(_ensure_writable(stored)), codes, schema.embedding_dim)
    return as_stored(rows.to(getattr(torch, column.dtype))).numpy()


def _quantize(column: Column, values: np.ndarray, form: RowFormat) -> tuple[np.ndarray, float]:
    """Codes of all rows, and the largest error; raises MesetaError for values that the format does not take."""
    num_rows, dim = values.shape
    dtype: torch.dtype = getattr(torch, column.dtype)
    codes, errors = np.empty((num_rows, row_bytes(form, dim)), np.uint8), []
    for part in _chunks(num_rows, dim):
        rows = from_stored(_ensure_writable(values[part]), dtype)
        quantised = quantize_rows(rows, form, adaptive=form in CODE_BITS)
        codes[part] = quantised.numpy()
        restored = dequantize_rows(quantised, form, dim).to(dtype)
        errors.append((rows.double() - restored.double()).abs().amax().item())
    error = float(np.max(errors, initial=0.0))  # a NaN where there is one
    # Differences of numbers that are many powers of two apart are rounded, to the nearest: the next one is no less.
    return codes, float(np.nextafter(error, np.inf)) if error else 0.0


def _chunks(num_rows: int, dim: int) -> Iterator[slice]:
    step = max(_CHUNK_VALUES // dim, 1)
    return (slice(first, first + step) for first in range(0, num_rows, step))


def _ensure_writable(array: np.ndarray) -> np.ndarray:
    """The same values where torch takes them: it warns of arrays that may not be written to."""
    return array if array.flags.writeable else array.copy()
