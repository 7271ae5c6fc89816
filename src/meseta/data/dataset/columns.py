"""Valid weights of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.data.schema.layout import WEIGHT_RULE, is_weight
from meseta.spec import MesetaError

DataColumnRole = Literal["label", "dense", "ids", "id weights", "weight", "group", "time"]


@dataclass(frozen=True, kw_only=True)
class DataColumn:
    """One column of the Parquet files."""

    name: str
    role: DataColumnRole
    is_list: bool = False
    """Whether each sample has a list of values."""
    num_embeddings: int = 0
    can_be_missing: bool = False
    """Whether values may be missing, which are null in the file."""

    @property
    def expected_type(self) -> str:
        """Description of the values that the column must hold, for error messages."""
        numbers = "whole numbers" if self.role in ("ids", "group") else "numbers"
        return f"lists of {numbers}" if self.is_list else numbers

    def accepts_type(self, kind: pa.DataType) -> bool:
        """Whether values of an Arrow type are valid in this column."""
        if self.is_list:
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
                return False
            kind = kind.value_type
        # Other programs may write the files with numbers of other widths, so any width is accepted.
        if self.role in ("ids", "group"):
            return bool(pa.types.is_signed_integer(kind))
        return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))

    @property
    def rule(self) -> str:
        """Rule for valid values, for error messages."""
        return {
            "label": "labels must be in 0..1",
            "dense": "dense values must be finite",
            "ids": f"ids must be in 0..{self.num_embeddings - 1}",
            "id weights": "id weights must be finite",
            "weight": f"sample weights must be {WEIGHT_RULE}",
            "group": "group keys must be whole numbers",
            "time": "times must be numbers",
        }[self.role]


def dataset_columns(dataset: Dataset) -> tuple[DataColumn, ...]:
    """Return all columns of the files of `dataset`: labels, weight, group, time, dense features, ids, id weights."""
    masked = dataset.masked_labels
    columns = [DataColumn(name=name, role="label", can_be_missing=name in masked) for name in dataset.label_columns]
    samples: list[tuple[str | None, DataColumnRole]] = [
        (dataset.weight, "weight"),
        (dataset.group, "group"),
        (dataset.time, "time"),
    ]
    columns += [DataColumn(name=name, role=role) for name, role in samples if name is not None]
    columns += [DataColumn(name=feature.name, role="dense") for feature in dataset.dense]
    for feature in dataset.sparse:
        many, rows = feature.multi_valued, feature.num_embeddings
        columns.append(DataColumn(name=feature.name, role="ids", is_list=many, num_embeddings=rows))
    weighted = [feature for feature in dataset.sparse if feature.weighted]
    columns += [DataColumn(name=f"{f.name}.weight", role="id weights", is_list=f.multi_valued) for f in weighted]
    return tuple(columns)


_PREPARE_AGAIN = "prepare the dataset again"


def check_types(path: Path, schema: pa.Schema, dataset: Dataset) -> None:
    """Raise MesetaError if a column of the file is missing, ambiguous or has a type that cannot be read."""
    types: dict[str, list[pa.DataType]] = {}
    for field in schema:
        types.setdefault(field.name, []).append(field.type)
    for column in (column for column in dataset_columns(dataset) if column.name in {*dataset.columns}):
        name = column.name
        if name not in types:
            raise MesetaError(f"dataset file {str(path)!r} has no column {name!r}; {_PREPARE_AGAIN}")
        if len(types[name]) > 1:
            raise MesetaError(f"dataset file {str(path)!r} has several columns {name!r}; {_PREPARE_AGAIN}")
        [data_type] = types[name]
        if not column.accepts_type(data_type):
            raise MesetaError(
                f"dataset file {str(path)!r}: column {name!r} must hold {column.expected_type}, got {data_type}; "
                f"{_PREPARE_AGAIN}"
            )


def check_values(path: Path, first_row: int, table: pa.Table, dataset: Dataset) -> None:
    """Raise MesetaError if the table has invalid values: missing values, invalid labels, sample weights or id weights.

    The message names file, column and row, counted from 0. `first_row` is the number of the table's first row in the
    file.
    """
    where = f"dataset file {str(path)!r}, row"
    for data_column in _batch_columns(dataset):
        name, column = data_column.name, table.column(data_column.name)
        if column.null_count and not data_column.can_be_missing:
            row = first_row + pc.index(pc.is_null(column), True).as_py()
            raise MesetaError(f"{where} {row}: column {name!r} has a missing value; fill it, or {_PREPARE_AGAIN}")
        values = pc.list_flatten(column) if data_column.is_list else column
        if data_column.is_list and values.null_count:
            row = first_row + pc.list_parent_indices(column).filter(pc.is_null(values))[0].as_py()
            raise MesetaError(
                f"{where} {row}: a list of column {name!r} has a missing value; fill it, or {_PREPARE_AGAIN}"
            )
    for role in ("label", "weight"):
        for column in _batch_columns(dataset):
            if column.role == role:
                _check_numbers(where, first_row, table, column)
    for feature in dataset.sparse:
        if feature.weighted:
            _check_weights(where, first_row, table, feature.name)


def find_violations(column: DataColumn, values: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Return which values [n] violate `DataColumn.rule` of their column, or `None` if none does."""
    if not values.size or column.role in ("group", "time"):
        return None
    if column.role == "weight":
        fits = is_weight(values)
        return None if fits.all() else ~fits
    finite = (-np.finfo(np.float32).max, np.finfo(np.float32).max)
    low, high = {"label": (0, 1), "ids": (0, column.num_embeddings - 1)}.get(column.role, finite)
    # NaN fails both comparisons. The minimum and maximum of an array with NaN are NaN.
    if values.min() >= low and values.max() <= high:
        return None
    return ~((values >= low) & (values <= high))


def _check_numbers(where: str, first_row: int, table: pa.Table, column: DataColumn) -> None:
    array = table.column(column.name)
    present = array.is_valid().to_numpy() if array.null_count else None
    values = array.drop_null().to_numpy()
    bad = find_violations(column, values)
    if bad is not None:
        bad_place = int(bad.argmax())
        place = bad_place if present is None else int(np.flatnonzero(present)[bad_place])
        rule = WEIGHT_RULE if column.role == "weight" else "in 0..1"
        raise MesetaError(
            f"{where} {first_row + place}: {column.name!r} must be {rule}, got {values[bad_place]:g}; "
            f"fix the data, or {_PREPARE_AGAIN}"
        )


def _check_weights(where: str, first_row: int, table: pa.Table, name: str) -> None:
    ids, weights = table.column(name), table.column(f"{name}.weight")
    counts = [pc.list_value_length(column).to_numpy() for column in (ids, weights)]
    if not np.array_equal(*counts):
        place = int(np.flatnonzero(counts[0] != counts[1])[0])
        raise MesetaError(
            f"{where} {first_row + place}: feature {name!r} has {counts[0][place]} ids but {counts[1][place]} weights; "
            f"give one weight per id, or {_PREPARE_AGAIN}"
        )
    values = pc.list_flatten(weights).to_numpy()
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        place = int(np.searchsorted(np.cumsum(counts[1]), bad, side="right"))
        raise MesetaError(
            f"{where} {first_row + place}: weights of feature {name!r} must be finite, got {values[bad]}; fix the "
            f"data, or {_PREPARE_AGAIN}"
        )


def _batch_columns(dataset: Dataset) -> Iterator[DataColumn]:
    return (column for column in dataset_columns(dataset) if column.role != "time")
