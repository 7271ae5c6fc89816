"""Writers that append tables to a CSV or Parquet file, depending on the suffix of its name."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from meseta.spec import MesetaError

SUFFIXES = (".csv", ".parquet")


def check_suffix(path: Path) -> None:
    """Raise MesetaError unless the name ends in .csv or .parquet."""
    if path.suffix.lower() not in SUFFIXES:
        raise MesetaError(f"predictions: {str(path)!r} must end in .csv or .parquet, to select the format")


def open_table_writer(path: Path, suffix: str, schema: pa.Schema) -> pq.ParquetWriter | CsvWriter:
    """Open a file for writing: CSV if `suffix` is .csv, else Parquet.

    Raises OSError if it cannot be opened, and MesetaError if a column of a CSV file has lists.
    """
    return CsvWriter(path, schema) if suffix.lower() == ".csv" else pq.ParquetWriter(path, schema)


class CsvWriter:
    """Writer of CSV files with a header (RFC 4180, but with Unix line ends).

    Fields are quoted only if needed, and missing values are empty. Numbers have the fewest digits that restore the same
    value.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        for column in schema:
            if pa.types.is_nested(column.type):
                raise MesetaError(
                    f"keys: column {column.name!r} is {column.type}, which CSV does not support; write .parquet"
                )
        self._text = path.open("w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._text, lineterminator="\n")
        self._rows.writerow(schema.names)

    def write_table(self, table: pa.Table) -> None:
        """Append rows."""
        self._rows.writerows(zip(*(_to_strings(column) for column in table.columns), strict=True))

    def close(self) -> None:
        """Close the file. Raises OSError if it cannot be written."""
        self._text.close()


def _to_strings(column: pa.ChunkedArray) -> list[str]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [(value or b"").decode(errors="replace") for value in column.to_pylist()]
    return pc.fill_null(column.cast(pa.string()), "").to_pylist()
