"""Criteo's lines by pyarrow; it alone decides what is a row."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from pyarrow import csv

from meseta.data.raw_rows import RawRows, RawSparse, log_transform


def parse_tsv(raw: bytes, types: Mapping[str, pa.DataType]) -> RawRows:
    """Columns of the lines in `raw`, of which `types` gives names and types: one label, whole numbers, then strings.

    Raises pyarrow.ArrowInvalid for a line with another number of fields, or a field of another type.
    """
    table = csv.read_csv(
        pa.BufferReader(raw),
        # One block per call: the caller has cut the file, and parallel calls use the cores.
        csv.ReadOptions(use_threads=False, block_size=len(raw) + 1, column_names=list(types)),
        csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        csv.ConvertOptions(column_types=dict(types), null_values=[""], strings_can_be_null=False),
    ).combine_chunks()
    columns = [column.chunk(0) for column in table.columns]
    dense = [log_transform(c.to_numpy(zero_copy_only=False)) for c in columns if pa.types.is_integer(c.type)]
    sparse = [RawSparse(column) for column in columns if pa.types.is_binary(column.type)]
    return RawRows([columns[0].to_numpy(zero_copy_only=False)], dense, sparse)
