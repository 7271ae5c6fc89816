"""The columns of a prepared dataset's Parquet files: what each one is for, and the values that it may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from meseta.data.dataset import Dataset

Role = Literal["label", "dense", "ids", "id weights", "weight", "group", "time"]

_TYPES: dict[Role, tuple[pa.DataType, ...]] = {
    "label": (pa.float32(),),
    "dense": (pa.float32(),),
    "ids": (pa.int32(), pa.int64()),
    "id weights": (pa.float32(),),
    "weight": (pa.float32(),),
    "group": (pa.int64(),),
    "time": (pa.float64(),),
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the Parquet files."""

    name: str
    role: Role
    is_list: bool = False
    """Whether a sample has a list of values."""
    num_embeddings: int = 0
    """Of ids: the rows of their table."""

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        """Arrow types that it may have."""
        return tuple(pa.list_(kind) if self.is_list else kind for kind in _TYPES[self.role])

    @property
    def rule(self) -> str:
        """What holds for each of its values."""
        return {
            "label": "labels must be in 0..1",
            "dense": "dense values must be finite",
            "ids": f"ids must be in 0..{self.num_embeddings - 1}",
            "id weights": "weights of ids must be finite",
            "weight": "weights of samples must be finite and at least 0",
            "group": "keys of groups must be whole numbers",
            "time": "times must be numbers",
        }[self.role]


def columns_of(dataset: Dataset) -> tuple[Column, ...]:
    """Every column that the files of `dataset` have: labels, weight, group, time, dense, ids, weights of ids."""
    columns = [Column(name=name, role="label") for name in dataset.labels]
    samples: list[tuple[str | None, Role]] = [
        (dataset.weight, "weight"),
        (dataset.group, "group"),
        (dataset.time, "time"),
    ]
    columns += [Column(name=name, role=role) for name, role in samples if name is not None]
    columns += [Column(name=feature.name, role="dense") for feature in dataset.dense]
    for feature in dataset.sparse:
        many, rows = feature.multi_valued, feature.num_embeddings
        columns.append(Column(name=feature.name, role="ids", is_list=many, num_embeddings=rows))
    weighted = [feature for feature in dataset.sparse if feature.weighted]
    columns += [Column(name=f"{f.name}.weight", role="id weights", is_list=f.multi_valued) for f in weighted]
    return tuple(columns)
