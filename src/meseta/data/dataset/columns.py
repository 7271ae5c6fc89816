"""Columns of the Parquet files of a prepared dataset, with their roles and valid values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from meseta.data.dataset.dataset import Dataset
from meseta.data.weights import WEIGHT_RULE

DataColumnRole = Literal["label", "dense", "ids", "id weights", "weight", "group", "time"]


@dataclass(frozen=True, kw_only=True)
class DataColumn:
    """One column of the Parquet files."""

    name: str
    role: DataColumnRole
    is_list: bool = False
    """Whether each sample has a list of values."""
    num_embeddings: int = 0
    """Number of rows of the embedding table, if the column holds ids."""
    can_be_missing: bool = False
    """Whether values may be missing. Missing values are null in the file."""

    @property
    def expected_type(self) -> str:
        """Description of the values that the column must hold, for error messages."""
        numbers = "whole numbers" if self.role in ("ids", "group") else "numbers"
        return f"lists of {numbers}" if self.is_list else numbers

    def accepts_type(self, kind: pa.DataType) -> bool:
        """Whether an Arrow type can hold the values of this column."""
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
