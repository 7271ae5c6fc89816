"""Registry of raw formats."""

from __future__ import annotations

from meseta.data.formats.csv import Csv, DelimitedText
from meseta.data.formats.format import RawFormat
from meseta.data.formats.json_lines import JsonLines
from meseta.data.formats.parquet import Parquet
from meseta.data.formats.svm import Libffm, Libsvm
from meseta.data.formats.tsv import CriteoTsv

# Detection takes the first format that accepts a file. `CriteoTsv` accepts any text, so it is last.
FORMATS: tuple[RawFormat, ...] = (Parquet(), JsonLines(), Libsvm(), Libffm(), DelimitedText(), Csv(), CriteoTsv())


def find_format(name: str) -> RawFormat:
    """Return the format called `name` in dataset.json, which must exist."""
    return next(entry for entry in FORMATS if entry.name == name)
