"""Workloads as people write them: a model that has no config, or no data yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from meseta.spec.checks import check_keys, is_whole
from meseta.spec.errors import MesetaError
from meseta.spec.optimizer import OptimizerSpec
from meseta.spec.tables import FeatureSpec, TableSpec
from meseta.spec.workload import DenseLoad, FeatureLoad, Reuse, Workload

FORMAT = "meseta.workload/1"
_KEYS = ("format", "batch_size", "tables", "features", "dense")
_TABLE_KEYS = ("num_embeddings", "embedding_dim", "dtype", "optimizer", "copies", "pooling_factor")
_FEATURE_KEYS = ("table", "pooling", "weighted", "pooling_factor", "reuse", "is_sorted")
MAX_COPIES = 100_000


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
    check_keys("workload", document, _KEYS)
    if document.get("format", FORMAT) != FORMAT:
        raise MesetaError(f"workload: its format is unknown; this version reads {FORMAT!r}")
    for key in ("batch_size", "tables"):
        if key not in document:
            raise MesetaError(f"workload: key {key!r} is missing")
    batch_size = document["batch_size"]
    if not is_whole(batch_size):
        raise MesetaError(f"workload: batch_size must be a whole number, got {batch_size!r}")
    tables: list[TableSpec] = []
    factors: dict[str, Any] = {}
    for name, entry in _mapping("tables", document["tables"]).items():
        for table in _read_tables(str(name), _mapping(f"tables: {name}", entry)):
            tables.append(table)
            factors[table.name] = entry.get("pooling_factor", 1.0)
    features: list[FeatureSpec] = []
    loads: dict[str, FeatureLoad] = {}
    for name, entry in _mapping("features", document.get("features") or {}).items():
        feature, load = _read_feature(str(name), _mapping(f"features: {name}", entry))
        features.append(feature)
        loads[feature.name] = load
    read = {feature.table for feature in features}
    for table in tables:
        if table.name not in read:
            features.append(FeatureSpec(name=table.name, table=table.name))
            loads[table.name] = FeatureLoad(pooling_factor=_number("pooling_factor", factors[table.name]))
    dense = _mapping("dense", document.get("dense") or {})
    check_keys("workload: dense", dense, [entry.name for entry in fields(DenseLoad)])
    return Workload(
        tables=tuple(tables),
        features=tuple(features),
        batch_size=batch_size,
        loads=loads,
        dense=DenseLoad(**{key: _number(f"dense.{key}", value) for key, value in dense.items()}),
    )


def load_workload(path: str | Path) -> Workload:
    """Read a YAML or JSON file; raises MesetaError as `read_workload` does, naming the file."""
    from meseta.spec.documents import load_document  # Needs PyYAML, which a machine with bare torch lacks.

    return load_document("workload", path, read_workload)


def _mapping(where: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise MesetaError(f"workload: {where} must be a mapping, got {value!r}")
    return value


def _number(where: str, value: Any) -> Any:
    """YAML 1.1 reads 638e6, which has no point, as text."""
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise MesetaError(f"workload: {where} must be a number, got {value!r}")
    return int(number) if "_bytes" in where and number.is_integer() else number


def _read_tables(name: str, entry: Mapping[Any, Any]) -> list[TableSpec]:
    where = f"workload: table {name!r}"
    check_keys(where, entry, _TABLE_KEYS)
    for key in ("num_embeddings", "embedding_dim"):
        if key not in entry:
            raise MesetaError(f"{where}: key {key!r} is missing")
    optimizer = entry.get("optimizer", {})
    optimizer = {"name": optimizer} if isinstance(optimizer, str) else _mapping(f"{where}: optimizer", optimizer)
    check_keys(f"{where}: optimizer", optimizer, [one.name for one in fields(OptimizerSpec)])
    copies = entry.get("copies")
    if copies is not None and (not is_whole(copies) or not 0 < copies <= MAX_COPIES):
        raise MesetaError(f"{where}: copies must be a whole number from 1 to {MAX_COPIES:,}, got {copies!r}")
    names = [name] if copies is None else [f"{name}_{i}" for i in range(copies)]
    rest = {key: entry[key] for key in ("num_embeddings", "embedding_dim", "dtype") if key in entry}
    if isinstance(rest["num_embeddings"], float) and rest["num_embeddings"].is_integer():  # people write 1.0e9
        rest["num_embeddings"] = int(rest["num_embeddings"])
    return [TableSpec(name=one, optimizer=OptimizerSpec(**optimizer), **rest) for one in names]


def _read_reuse(where: str, entry: Mapping[Any, Any]) -> Reuse:
    parts = {}
    for key in ("edges", "rows", "lookups"):
        if not isinstance(entry[key], list) or len(entry[key]) != len(entry["edges"]):
            raise MesetaError(f"{where}: reuse.{key} must be a list with one number per bin, got {entry[key]!r}")
        parts[key] = [_number(f"{where}: reuse.{key}", value) for value in entry[key]]
    return Reuse(
        window_samples=int(_number(f"{where}: reuse.window_samples", entry["window_samples"])),
        edges=tuple(int(edge) for edge in parts["edges"]),
        rows=tuple(parts["rows"]),
        lookups=tuple(parts["lookups"]),
    )


def _read_feature(name: str, entry: Mapping[Any, Any]) -> tuple[FeatureSpec, FeatureLoad]:
    where = f"workload: feature {name!r}"
    check_keys(where, entry, _FEATURE_KEYS)
    spec = {key: entry[key] for key in ("pooling", "weighted") if key in entry}
    reuse = entry.get("reuse")
    if reuse is not None:
        reuse = _mapping(f"{where}: reuse", reuse)
        known = [one.name for one in fields(Reuse)]
        check_keys(f"{where}: reuse", reuse, known)
        if set(reuse) != set(known):
            raise MesetaError(f"{where}: reuse must have {', '.join(known)}")
        reuse = _read_reuse(where, reuse)
    load = FeatureLoad(
        pooling_factor=_number(f"{where}: pooling_factor", entry.get("pooling_factor", 1.0)),
        reuse=reuse,
        is_sorted=bool(entry.get("is_sorted", False)),
    )
    return FeatureSpec(name=name, table=str(entry.get("table", name)), **spec), load
