"""Selection, order and names of the columns of a predictions file."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from meseta.errors import UnknownColumnError, duplicates
from meseta.spec import MesetaError, suggest

ROW, PREDICTION, LABEL = "row", "prediction", "label"
"""Columns of predictions in addition to keys. With several labels they are prediction.NAME and label.NAME."""


@dataclass(frozen=True)
class OutputColumns:
    """Selected columns in order. If empty, the file has all columns under their own names."""

    pairs: tuple[tuple[str, str], ...] = ()
    """Pairs (name in the file, source column). A source is `row`, a key, `prediction...` or `label...`."""

    @staticmethod
    def parse(entries: Sequence[str]) -> OutputColumns:
        """Parse entries NEW=OLD, or NAME to keep a name. Raises MesetaError if a name is missing or occurs twice."""
        pairs = []
        for entry in entries:
            new, equals, old = (part.strip() for part in entry.partition("="))
            if not new or (equals and not old):
                raise MesetaError(
                    f"predict: --columns {entry!r} lacks a name; use NEW=OLD, or NAME to keep the name of a column"
                )
            pairs.append((new, old or new))
        if twice := duplicates(new for new, _ in pairs):
            old = [old for new, old in pairs if new == twice[0]][-1]
            raise MesetaError(
                f"predict: --columns has two columns with the name {twice[0]!r}; rename one, for example "
                f"{f'{twice[0]}_2={old}'!r}"
            )
        return OutputColumns(tuple(pairs))

    @property
    def keys(self) -> list[str]:
        """Selected columns of the data."""
        return list(dict.fromkeys(old for _, old in self.pairs if old != ROW and _kind(old) not in (PREDICTION, LABEL)))

    def check_keys(self, keys: Sequence[str]) -> None:
        """Raise MesetaError if a key of `--keys` is not selected."""
        for key in keys:
            if self.pairs and key not in self.keys:
                raise MesetaError(f"predict: --keys has {key!r}, but --columns does not; add it to --columns")

    def check(self, names: Sequence[str]) -> None:
        """Raise MesetaError if a selected column is not in `names`, the columns of predictions and keys."""
        has_labels = any(_kind(name) == LABEL for name in names)
        for _, old in self.pairs:
            if old not in names:
                why = "the rows have no labels; " if _kind(old) == LABEL and not has_labels else ""
                raise MesetaError(f"predict: --columns has the unknown column {old!r}; {why}{suggest(old, names)}")

    def explain_missing(self, error: MesetaError) -> MesetaError:
        """Extend the error for an unknown key by a similarly named column of predictions, if there is one."""
        if isinstance(error, UnknownColumnError) and error.column in self.keys:
            for close in difflib.get_close_matches(error.column, (ROW, PREDICTION, LABEL), n=1):
                return error.with_suffix(f"; the column of predictions is {close!r}")
        return error


def _kind(name: str) -> str:
    return name.partition(".")[0]


SUFFIXES = (".csv", ".parquet")


def check_suffix(path: Path) -> None:
    """Raise MesetaError unless the name ends in .csv or .parquet."""
    if path.suffix.lower() not in SUFFIXES:
        raise MesetaError(f"predictions: {str(path)!r} must end in .csv or .parquet, to select the format")


def open_table_writer(path: Path, suffix: str, schema: pa.Schema) -> pq.ParquetWriter | CsvWriter:
    """Open a CSV file if `suffix` is .csv, else Parquet. Raises OSError on failure, MesetaError for lists in CSV."""
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
