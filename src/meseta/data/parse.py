"""One block of raw rows to numbers and strings, with errors that name file, line and field."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from meseta.data.layout import CRITEO
from meseta.data.parse_csv import parse_csv
from meseta.data.parse_svm import parse_svm
from meseta.data.raw_rows import RawRows, RawSparse, is_label, log1p
from meseta.data.schema import Layout, SparseColumn
from meseta.data.sources import Block
from meseta.spec import MesetaError

_COLUMN_TYPES = {
    **{name: pa.float32() for name in [CRITEO.label]},
    **{name: pa.int64() for name in CRITEO.dense},
    **{column.name: pa.binary() for column in CRITEO.sparse},
}
_INTEGER = re.compile(rb"-?\d{1,18}")


def parse_block(block: Block, layout: Layout) -> RawRows:
    """Parse and check every row. Raises MesetaError naming the file, the line or row, and the field."""
    if isinstance(block.raw, bytes):
        if block.source.kind == "csv":
            return parse_csv(block, block.raw, layout)
        return _parse_tsv(block, block.raw) if block.source.kind == "tsv" else parse_svm(block, block.raw, layout)
    return _parse_parquet(block, block.raw, layout)


def _parse_tsv(block: Block, raw: bytes) -> RawRows:
    try:
        table = csv.read_csv(
            pa.BufferReader(raw),
            # One block per call: the caller has cut the file, and parallel calls use the cores.
            csv.ReadOptions(use_threads=False, block_size=len(raw) + 1, column_names=list(_COLUMN_TYPES)),
            csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            csv.ConvertOptions(column_types=_COLUMN_TYPES, null_values=[""], strings_can_be_null=False),
        ).combine_chunks()
    except pa.ArrowInvalid as error:
        raise _explain_tsv(block, raw, str(error).splitlines()[0]) from None
    if table.num_rows != block.num_rows:
        raise _explain_tsv(block, raw, f"{block.num_rows} lines gave {table.num_rows} rows")
    label = table.column(0).to_numpy()
    if not is_label(label).all():
        raise _explain_tsv(block, raw, "a label is outside 0..1")
    dense = [log1p(column.to_numpy(zero_copy_only=False)) for column in _chunks(table, CRITEO.dense)]
    return RawRows(label, dense, [RawSparse(column) for column in _chunks(table, [s.name for s in CRITEO.sparse])])


def _chunks(table: pa.Table, names: list[str] | tuple[str, ...]) -> list[pa.Array]:
    return [table.column(name).chunk(0) for name in names]


def _explain_tsv(block: Block, raw: bytes, detail: str) -> MesetaError:
    """Go through the lines of a block that did not parse and name the first bad field."""
    names = list(_COLUMN_TYPES)
    for number, line in enumerate(raw.split(b"\n")[:-1], start=block.first_row + 1):
        where = f"source {str(block.source.path)!r}, line {number}"
        fields = line.rstrip(b"\r").split(b"\t")
        if len(fields) != len(names):
            return MesetaError(
                f"{where}: {len(fields)} tab-separated fields, expected {len(names)}: label, 13 integers, "
                "26 categories; fix or remove the line"
            )
        for index in range(1 + len(CRITEO.dense)):
            problem = _field_problem(fields[index], is_label=index == 0)
            if problem:
                shown = fields[index][:40].decode(errors="replace")
                return MesetaError(
                    f"{where}, field {index + 1} ({names[index]}): {shown!r} {problem}; fix or remove the line"
                )
    return MesetaError(f"source {str(block.source.path)!r}, after line {block.first_row}: {detail}")


def _field_problem(field: bytes, *, is_label: bool) -> str | None:
    if not is_label:
        return None if not field or _INTEGER.fullmatch(field) else "is not an integer"
    try:
        return None if 0 <= float(field) <= 1 else "is outside 0..1"
    except ValueError:
        return "is not a label 0..1"


def _parse_parquet(block: Block, batch: pa.RecordBatch, layout: Layout) -> RawRows:
    label = _numbers(batch.column(layout.label)).astype(np.float32)
    bad = np.flatnonzero(~is_label(label))
    if bad.size:
        raise _explain_row(block, int(bad[0]), layout.label, f"label {label[bad[0]]} is outside 0..1 or missing")
    dense = []
    for name in layout.dense:
        values = _numbers(batch.column(name))
        infinite = np.flatnonzero(np.isposinf(values))
        if infinite.size:
            raise _explain_row(block, int(infinite[0]), name, "the value is infinite")
        dense.append(log1p(values))
    return RawRows(label, dense, [_raw_sparse(block, batch, column) for column in layout.sparse])


def _numbers(column: pa.Array) -> NDArray[np.float64]:
    """float64, null as NaN."""
    return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def _raw_sparse(block: Block, batch: pa.RecordBatch, column: SparseColumn) -> RawSparse:
    array = batch.column(column.name)
    if not column.multi_valued:
        return RawSparse(_as_strings(array))
    lengths = _list_lengths(array)
    values = array.flatten()
    if not column.weighted:
        return RawSparse(_as_strings(values), lengths)
    weight_name = column.weight or column.name
    if column.weight is None:
        values, weights = pc.struct_field(values, [0]), pc.struct_field(values, [1])
    else:
        weight_array = batch.column(column.weight)
        unequal = np.flatnonzero(lengths != _list_lengths(weight_array))
        if unequal.size:
            raise _explain_row(
                block, int(unequal[0]), weight_name, f"a list must be as long as that of {column.name!r}"
            )
        weights = weight_array.flatten()
    with np.errstate(over="ignore"):  # what overflows is not finite, and told below
        numbers = _numbers(weights).astype(np.float32)
    if not np.isfinite(numbers).all():
        owner = np.searchsorted(np.cumsum(lengths), np.flatnonzero(~np.isfinite(numbers))[0], side="right")
        raise _explain_row(block, int(owner), weight_name, "a weight is missing or not finite")
    return RawSparse(_as_strings(values), lengths, numbers)


def _list_lengths(array: pa.Array) -> NDArray[np.int64]:
    """int64 [n]; a missing list is an empty one."""
    return pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _as_strings(array: pa.Array) -> pa.Array:
    """Integers as decimal text, dictionaries spelled out, missing values as the empty string."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_integer(array.type):
        array = array.cast(pa.string())
    return array.fill_null(b"" if "binary" in str(array.type) else "") if array.null_count else array


def _explain_row(block: Block, index: int, column: str, problem: str) -> MesetaError:
    row = block.first_row + index + 1
    return MesetaError(f"source {str(block.source.path)!r}, row {row}, column {column!r}: {problem}; fix the row")
