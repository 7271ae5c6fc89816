"""Hive partitions: columns whose values come from folders named KEY=VALUE."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa

from meseta.data.schema.infer import MIN_EVIDENCE_ROWS, ColumnRole, infer_role, parse_number
from meseta.spec import MesetaError

# Folder values that mean a missing value.
_MISSING_VALUES = ("", "__HIVE_DEFAULT_PARTITION__")

Partition = Mapping[str, str | None]
"""Value of a file for each column from its folders. `None` if the value is missing."""


def parse_partition(path: str, inner: str) -> dict[str, str | None]:
    """Return the columns from the folders in `inner`, the end of `path`. Raises MesetaError if a key occurs twice or a
    name is not valid UTF-8."""
    partition: dict[str, str | None] = {}
    for folder in inner.split("/")[:-1]:
        key, sign, value = folder.partition("=")
        if not (key and sign):
            continue
        try:
            key, value = (unquote(text, errors="strict") for text in (key, value))
            # Raises UnicodeError for surrogates, which replace undecodable bytes of a path.
            f"{key}{value}".encode()
        except UnicodeError:
            raise MesetaError(f"source {path!r}: folder {folder!r} is not valid UTF-8; rename it") from None
        if key in partition:
            raise MesetaError(f"source {path!r}: two of its folders have a value for {key!r}; rename one")
        partition[key] = None if value in _MISSING_VALUES else value
    return partition


def check_partition(where: str, partition: Partition, names: Collection[str]) -> None:
    """Raise MesetaError with the prefix `where` if a key of `partition` is also in `names`, the file's columns."""
    for key, value in partition.items():
        if key in names:
            raise MesetaError(
                f"{where} has column {key!r}, but is also in folder '{key}={value}'; rename one of them, or name the "
                "files instead of a folder, so that folders are no columns"
            )


def sample_partitions(partitions: Sequence[Partition]) -> dict[str, list[str]]:
    """Return values of each column from folders, as many as are needed to infer its role."""
    keys = dict.fromkeys(key for partition in partitions for key in partition)
    # Role inference requires a minimum number of rows, so repeat the value of each file.
    return {
        key: [partition[key] or "" for partition in partitions if key in partition for _ in range(MIN_EVIDENCE_ROWS)]
        for key in keys
    }


def infer_partition_role(name: str, values: Sequence[str]) -> ColumnRole:
    """Infer the role of a column from its name and its values, as returned by `sample_partitions`."""
    guess = infer_role(name, values)
    if guess.role == "ignore" and len({*values}) == 1:
        return ColumnRole("ignore", f"a folder, and the same for all files: {values[0]!r}")
    return guess


def partition_type(values: Sequence[str]) -> pa.DataType:
    """Return int64 or float64 if all present values are numbers, null if there are none, and string otherwise."""
    present = [value for value in values if value]
    numbers = [parse_number(value) for value in present]
    if not present:
        return pa.null()
    if None in numbers:
        return pa.string()
    return pa.int64() if all(value.isdigit() for value in present) else pa.float64()
