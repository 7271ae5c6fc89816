"""Workloads as people write them: a model that has no config, or no data yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from meseta.errors import MesetaError
from meseta.spec.documents import load_document, read_record, without_format
from meseta.spec.optimizer import OptimizerSpec
from meseta.spec.tables import FeatureSpec, Pooling, TableDtype, TableSpec
from meseta.spec.workload import DenseLoad, FeatureLoad, Reuse, Workload

FORMAT = "meseta.workload/1"
MAX_COPIES = 100_000


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What a workload says of a table, or of some that are alike."""

    num_embeddings: int
    embedding_dim: int
    dtype: TableDtype = "float32"
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    copies: int | None = None
    pooling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.copies is not None and not 0 < self.copies <= MAX_COPIES:
            raise MesetaError(f"copies must be a whole number from 1 to {MAX_COPIES:,}, got {self.copies!r}")

    def specs(self, name: str) -> list[TableSpec]:
        """The tables."""
        names = [name] if self.copies is None else [f"{name}_{i}" for i in range(self.copies)]
        common = {key: getattr(self, key) for key in ("num_embeddings", "embedding_dim", "dtype", "optimizer")}
        return [TableSpec(name=one, **common) for one in names]


@dataclass(frozen=True, kw_only=True)
class _Feature:
    """What it says of a feature."""

    table: str
    pooling: Pooling = "sum"
    weighted: bool = False
    pooling_factor: float = 1.0
    reuse: Reuse | None = None
    is_sorted: bool = False

    def spec(self, name: str) -> FeatureSpec:
        """The feature."""
        return FeatureSpec(name=name, table=self.table, pooling=self.pooling, weighted=self.weighted)

    @property
    def load(self) -> FeatureLoad:
        """Its ids."""
        return FeatureLoad(pooling_factor=self.pooling_factor, reuse=self.reuse, is_sorted=self.is_sorted)


@dataclass(frozen=True, kw_only=True)
class _Document:
    """The file."""

    batch_size: int
    tables: Mapping[str, _Table]
    features: Mapping[str, _Feature] = field(default_factory=dict)
    dense: DenseLoad = field(default_factory=DenseLoad)


def is_workload(document: Mapping[Any, Any]) -> bool:
    """Whether a file describes a workload, and not a run."""
    return document.get("format") == FORMAT or "tables" in document


def read_workload(document: Mapping[Any, Any]) -> Workload:
    """A workload from plain data:

        {"batch_size": 65536, "tables": {"user": {"num_embeddings": 1000000, "embedding_dim": 64}}}

    A table may have a `dtype`, an `optimizer` (a name, or the fields of OptimizerSpec) and `copies`, tables name_0,
    name_1 and so on. `features` reads `{name: {table: ..., pooling_factor: ...}}`; a table that none reads gets one of
    its own name with the `pooling_factor` of the table, 1 where it has none. `dense` has the fields of DenseLoad.
    Raises MesetaError for an unknown or missing key, and a value that breaks its rule.
    """
    document = without_format("workload", document, FORMAT)
    for one in _entries(document, "tables"):
        if isinstance(one.get("optimizer"), str):
            one["optimizer"] = {"name": one["optimizer"]}
    for name, one in zip(document.get("features") or (), _entries(document, "features"), strict=True):
        one.setdefault("table", str(name))
        _check_reuse(f"workload: features.{name}", one.get("reuse"))
    written = read_record("workload", _Document, document)
    tables: list[TableSpec] = []
    factors: dict[str, float] = {}
    for name, tables_alike in written.tables.items():
        for table in tables_alike.specs(name):
            tables.append(table)
            factors[table.name] = tables_alike.pooling_factor
    features = [feature.spec(name) for name, feature in written.features.items()]
    loads = {name: feature.load for name, feature in written.features.items()}
    read = {spec.table for spec in features}
    for table in tables:
        if table.name not in read:
            features.append(FeatureSpec(name=table.name, table=table.name))
            loads[table.name] = FeatureLoad(pooling_factor=factors[table.name])
    return Workload(
        tables=tuple(tables),
        features=tuple(features),
        batch_size=written.batch_size,
        loads=loads,
        dense=written.dense,
    )


def load_workload(path: str | Path) -> Workload:
    """Read a YAML or JSON file; raises MesetaError as `read_workload` does, naming the file."""
    return load_document("workload", path, read_workload)


def _entries(document: dict[Any, Any], key: str) -> list[dict[Any, Any]]:
    """The entries of a part of the document, copied, to be completed; of none where it has another form."""
    part = document.get(key)
    if not isinstance(part, Mapping):
        return []
    document[key] = {name: dict(entry) if isinstance(entry, Mapping) else entry for name, entry in part.items()}
    return [entry if isinstance(entry, dict) else {} for entry in document[key].values()]


def _check_reuse(where: str, reuse: Any) -> None:
    known = [entry.name for entry in fields(Reuse)]
    if isinstance(reuse, Mapping) and set(known) - set(reuse):
        raise MesetaError(f"{where}: reuse must have {', '.join(known)}")
