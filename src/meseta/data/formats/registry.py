"""All raw formats, in the order in which a file is asked whether it is of them."""

from __future__ import annotations

from meseta.data.formats.csv import Csv
from meseta.data.formats.delimited_text import DelimitedText
from meseta.data.formats.format import RawFormat
from meseta.data.formats.json_lines import JsonLines
from meseta.data.formats.parquet import Parquet
from meseta.data.formats.svm import Libffm, Libsvm
from meseta.data.formats.tsv import CriteoTsv

FORMATS: tuple[RawFormat, ...] = (Parquet(), JsonLines(), Libsvm(), Libffm(), DelimitedText(), Csv(), CriteoTsv())


def find_format(name: str) -> RawFormat:
    """The format that dataset.json calls `name`, which must be one."""
    return next(entry for entry in FORMATS if entry.name == name)
