"""Hive partitions: columns that folders named KEY=VALUE make of the files below them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa

from meseta.data.schema.infer import MIN_EVIDENCE_ROWS, ColumnRole, infer_role, parse_number
from meseta.spec import MesetaError

_MISSING_VALUES = ("", "__HIVE_DEFAULT_PARTITION__")
"""Values that mean none."""

Partition = Mapping[str, str | None]
"""Columns that the folders of a file make, and its value in each; `None` if that is missing."""


def parse_partition(path: str, inner: str) -> dict[str, str | None]:
    """Return the columns that the folders in `inner`, the end of `path`, make.

    Raises MesetaError for a key that is there twice, and for names that are not UTF-8.
    """
    partition: dict[str, str | None] = {}
    for folder in inner.split("/")[:-1]:
        key, sign, value = folder.partition("=")
        if not (key and sign):
            continue
        try:
            key, value = (unquote(text, errors="strict") for text in (key, value))
            f"{key}{value}".encode()
        except UnicodeError:
            raise MesetaError(f"source {path!r}: folder {folder!r} is not UTF-8; rename it") from None
        if key in partition:
            raise MesetaError(f"source {path!r}: two of its folders give a value of {key!r}; rename one")
        partition[key] = None if value in _MISSING_VALUES else value
    return partition


def check_partition(where: str, partition: Partition, names: Collection[str]) -> None:
    """Raise MesetaError, beginning with `where`, if one of the columns `names` of a file is a key of its folders."""
    for key, value in partition.items():
        if key in names:
            raise MesetaError(
                f"{where} has a column {key!r} and is in a folder '{key}={value}'; rename one, or name the files "
                "themselves, whose folders are no columns"
            )


def sample_partitions(partitions: Sequence[Partition]) -> dict[str, list[str]]:
    """Return column -> its values in all files, each as often as rows are needed to judge it."""
    keys = dict.fromkeys(key for partition in partitions for key in partition)
    return {
        key: [partition[key] or "" for partition in partitions if key in partition for _ in range(MIN_EVIDENCE_ROWS)]
        for key in keys
    }


def infer_partition_role(name: str, values: Sequence[str]) -> ColumnRole:
    """The role of a column by its name and values as of `sample_partitions`."""
    guess = infer_role(name, values)
    if guess.role == "ignore" and len({*values}) == 1:
        return ColumnRole("ignore", f"a folder, and the same for all files: {values[0]!r}")
    return guess


def partition_type(values: Sequence[str]) -> pa.DataType:
    """Return int64 or float64 if all values that are there are numbers, and string otherwise."""
    present = [value for value in values if value]
    numbers = [parse_number(value) for value in present]
    if not present:
        return pa.null()
    if None in numbers:
        return pa.string()
    return pa.int64() if all(value.isdigit() for value in present) else pa.float64()
