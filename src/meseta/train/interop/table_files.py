"""Tables as files that grow: CSV or Parquet, by the suffix of their name."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from meseta.spec import MesetaError

SUFFIXES = (".csv", ".parquet")


def check_suffix(path: Path) -> None:
    """Raise MesetaError where the name does not say which of both it is to be."""
    if path.suffix.lower() not in SUFFIXES:
        raise MesetaError(f"predictions: {str(path)!r} must end in .csv or .parquet, which says the format")


def open_table_writer(path: Path, suffix: str, schema: pa.Schema) -> pq.ParquetWriter | CsvWriter:
    """A file at `path`: CSV where `suffix` says so, else Parquet. Raises OSError, and MesetaError for lists in CSV."""
    return CsvWriter(path, schema) if suffix.lower() == ".csv" else pq.ParquetWriter(path, schema)


class CsvWriter:
    """A CSV file with a line of names (RFC 4180, lines end as on Unix): fields are quoted where they must be, missing
    values are empty, and numbers have the fewest digits that give the same bits."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        for column in schema:
            if pa.types.is_nested(column.type):
                raise MesetaError(
                    f"keys: column {column.name!r} is {column.type}, which CSV cannot hold; write .parquet"
                )
        self._text = path.open("w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._text, lineterminator="\n")
        self._rows.writerow(schema.names)

    def write_table(self, table: pa.Table) -> None:
        """Add rows."""
        self._rows.writerows(zip(*(_to_strings(column) for column in table.columns), strict=True))

    def close(self) -> None:
        """End the file; raises OSError where it cannot be written."""
        self._text.close()


def _to_strings(column: pa.ChunkedArray) -> list[str]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [(value or b"").decode(errors="replace") for value in column.to_pylist()]
    return pc.fill_null(column.cast(pa.string()), "").to_pylist()
