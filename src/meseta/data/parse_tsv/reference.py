"""Reference parser of Criteo's TSV lines with pyarrow. It defines which lines are valid."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from pyarrow import csv

from meseta.data.schema.layout import RawRows, RawSparse, log_transform


def parse_tsv(raw: bytes, types: Mapping[str, pa.DataType]) -> RawRows:
    """Parse the lines in `raw` into columns: a label, then whole numbers, then strings. `types` has their names and
    types.

    Raises pyarrow.ArrowInvalid if a line has another number of fields, or a field has another type.
    """
    table = csv.read_csv(
        pa.BufferReader(raw),
        # The caller already splits the file into blocks and parses them in parallel.
        csv.ReadOptions(use_threads=False, block_size=len(raw) + 1, column_names=list(types)),
        csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        csv.ConvertOptions(column_types=dict(types), null_values=[""], strings_can_be_null=False),
    ).combine_chunks()
    columns = [column.chunk(0) for column in table.columns]
    dense = [log_transform(c.to_numpy(zero_copy_only=False)) for c in columns if pa.types.is_integer(c.type)]
    sparse = [RawSparse(column) for column in columns if pa.types.is_binary(column.type)]
    return RawRows([columns[0].to_numpy(zero_copy_only=False)], dense, sparse)
