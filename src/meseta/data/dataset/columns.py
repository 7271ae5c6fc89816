"""The columns of a prepared dataset's Parquet files: what each one is for, and the values that it may hold."""

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
    """Whether a sample has a list of values."""
    num_embeddings: int = 0
    """Of ids: the rows of their table."""
    can_be_missing: bool = False
    """Whether a sample may have no value, which is null in the file."""

    @property
    def expected_type(self) -> str:
        """What it must hold, in words. Other programs than prepare may write files, with numbers of other widths."""
        numbers = "whole numbers" if self.role in ("ids", "group") else "numbers"
        return f"lists of {numbers}" if self.is_list else numbers

    def accepts_type(self, kind: pa.DataType) -> bool:
        """Whether an Arrow type holds that."""
        if self.is_list:
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
                return False
            kind = kind.value_type
        if self.role in ("ids", "group"):
            return bool(pa.types.is_signed_integer(kind))
        return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))

    @property
    def rule(self) -> str:
        """What holds for each of its values."""
        return {
            "label": "labels must be in 0..1",
            "dense": "dense values must be finite",
            "ids": f"ids must be in 0..{self.num_embeddings - 1}",
            "id weights": "weights of ids must be finite",
            "weight": f"weights of samples must be {WEIGHT_RULE}",
            "group": "keys of groups must be whole numbers",
            "time": "times must be numbers",
        }[self.role]


def dataset_columns(dataset: Dataset) -> tuple[DataColumn, ...]:
    """Every column that the files of `dataset` have: labels, weight, group, time, dense, ids, weights of ids."""
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
