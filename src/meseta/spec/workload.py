"""Workloads: the tables, features, id statistics and dense part of one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from meseta.errors import MesetaError, check_number, suggest
from meseta.spec.codecs import Communication
from meseta.spec.documents import load_document, parse_dataclass, rename_value, strip_format
from meseta.spec.optimizer import OptimizerSpec
from meseta.spec.stages import FORMER_OVERLAPS, OVERLAPS, Overlap
from meseta.spec.tables import DenseDtype, FeatureSpec, Pooling, TableDtype, TableSpec, check_features


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """Reuse histogram: distribution of the number of lookups per row within a window of consecutive samples.

    Bin i contains the rows with more than edges[i] and at most edges[i + 1] lookups. The last bin is unbounded.
    """

    window_samples: int
    edges: tuple[int, ...]
    """Exclusive lower bounds of the bins, in ascending order, such as 0, 1, 2, 4, ..., 32768."""
    rows: tuple[float, ...]
    """Share of the distinct rows of a window in each bin."""
    lookups: tuple[float, ...]
    """Share of the lookups of a window in each bin."""
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.window_samples < 1:
            raise MesetaError(f"reuse: window_samples must be at least 1, got {self.window_samples}")
        if not self.edges or any(a >= b for a, b in pairwise(self.edges)) or self.edges[0] < 0:
            raise MesetaError(f"reuse: edges must be non-negative and strictly increasing, got {self.edges}")
        for name, shares in (("rows", self.rows), ("lookups", self.lookups)):
            if len(shares) != len(self.edges):
                raise MesetaError(
                    f"reuse: {name} must have one share for each of {len(self.edges)} edges, got {shares}"
                )
            if not all(0.0 <= share <= 1.0 for share in shares):
                raise MesetaError(f"reuse: shares of {name} must be in 0..1, got {shares}")


@dataclass(frozen=True, kw_only=True)
class FeatureLoad:
    """Statistics of the ids of one feature."""

    pooling_factor: float = 1.0
    """Mean number of ids per sample."""
    reuse: Reuse | None = None
    """Reuse histogram. `None` means that all rows of the table are equally likely."""
    is_sorted: bool = False
    """Whether rows are sorted by decreasing frequency, as in a vocabulary."""

    def __post_init__(self) -> None:
        if check_number("feature load", "pooling_factor", self.pooling_factor) < 0:
            raise MesetaError(f"pooling_factor must not be negative, got {self.pooling_factor}")


@dataclass(frozen=True, kw_only=True)
class DenseLoad:
    """Compute and memory requirements of the dense part of a model."""

    flops_per_sample: float = 0.0
    """Floating-point operations per sample in the forward and backward pass."""
    parameter_bytes: int = 0
    """Size of the parameters, and of the gradients that are all-reduced."""
    activation_bytes_per_sample: int = 0
    """Size of the activations that are saved for the backward pass."""
    dtype: DenseDtype = "float32"
    """Compute type of matrix products."""
    before_flops_per_sample: float = 0.0
    """Part of `flops_per_sample` in layers that read only dense features: the forward and backward pass of a model's
    `forward_dense`."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.before_flops_per_sample <= self.flops_per_sample:
            raise MesetaError(
                f"dense: before_flops_per_sample must be in 0..flops_per_sample ({self.flops_per_sample:g}), got "
                f"{self.before_flops_per_sample:g}"
            )


@dataclass(frozen=True, kw_only=True)
class DenseExchange:
    """Data that ranks exchange for the dense part, in addition to its gradients. Set by a run, not by workload
    files."""

    num_tensors: int = 0
    """Number of parameter tensors. For each of them, ranks count how many ranks have a gradient."""
    element_bytes: int = 4
    """Bytes per parameter element."""
    num_padding_elements: int = 0
    """Number of padding elements if a codec encodes gradients, which are padded to multiples of 16."""
    batch_norm_widths: tuple[int, ...] = ()
    """Number of columns of each batch norm."""
    sharded_shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Parameter shapes of each module that is sharded over the ranks of a host."""
    num_gradient_norms: int = 0
    """Number of gradient norms of sharded parameters that are computed per step."""
    clips_rows: bool = False
    """Whether one norm over layers and rows clips gradients."""
    num_flags: int = 0
    """Number of values that ranks agree on per step, in addition to the loss."""
    logit_bytes: int = 0
    """Bytes per sample that all ranks gather if the loss needs the logits of the global batch, otherwise 0."""
    num_masked_tasks: int = 0
    """Number of tasks if labels may be missing, otherwise 0. Ranks then sum the weights of the labels that exist."""
    num_micro_batches: int = 1
    """Number of micro-batches per rank and step."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tables, features and dense part of a model, with the batch size and id statistics of its training steps."""

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]
    batch_size: int
    """Global batch size."""
    loads: Mapping[str, FeatureLoad] = field(default_factory=dict)
    """Id statistics by feature. The default is one id per sample with all rows equally likely."""
    dense: DenseLoad = field(default_factory=DenseLoad)
    dense_exchange: DenseExchange = field(default_factory=DenseExchange)
    comm: Communication = field(default_factory=Communication)
    """Codecs and exchange algorithms. Set by the config of a run, not by workload files."""
    overlap: tuple[Overlap, ...] = ()
    """Transfers that overlap with computation, in the order of `OVERLAPS`."""

    def __post_init__(self) -> None:
        check_features(self.tables, self.features)
        if self.batch_size < 1:
            raise MesetaError(f"workload: batch_size must be at least 1, got {self.batch_size}")
        names = {feature.name for feature in self.features}
        for name in self.loads:
            if name not in names:
                raise MesetaError(f"workload: loads has the unknown feature {name!r}; {suggest(name, names)}")

    def load(self, feature: FeatureSpec) -> FeatureLoad:
        return self.loads.get(feature.name, FeatureLoad())


WORKLOAD_FORMAT = "meseta.workload/1"
MAX_COPIES = 100_000


@dataclass(frozen=True, kw_only=True)
class _WorkloadTable:
    """Table entry of a workload document. With `copies`, it describes several identical tables."""

    num_embeddings: int
    embedding_dim: int
    dtype: TableDtype = "float32"
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    copies: int | None = None
    pooling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.copies is not None and not 0 < self.copies <= MAX_COPIES:
            raise MesetaError(f"copies must be an integer in 1..{MAX_COPIES:,}, got {self.copies!r}")

    def specs(self, name: str) -> list[TableSpec]:
        """Return the tables. If there are copies, their names are `name`_0, `name`_1 and so on."""
        names = [name] if self.copies is None else [f"{name}_{i}" for i in range(self.copies)]
        common = {key: getattr(self, key) for key in ("num_embeddings", "embedding_dim", "dtype", "optimizer")}
        return [TableSpec(name=table_name, **common) for table_name in names]


@dataclass(frozen=True, kw_only=True)
class _WorkloadFeature:
    table: str
    pooling: Pooling = "sum"
    weighted: bool = False
    pooling_factor: float = 1.0
    reuse: Reuse | None = None
    is_sorted: bool = False

    def spec(self, name: str) -> FeatureSpec:
        return FeatureSpec(name=name, table=self.table, pooling=self.pooling, weighted=self.weighted)

    @property
    def load(self) -> FeatureLoad:
        return FeatureLoad(pooling_factor=self.pooling_factor, reuse=self.reuse, is_sorted=self.is_sorted)


@dataclass(frozen=True, kw_only=True)
class _WorkloadDocument:
    batch_size: int
    tables: Mapping[str, _WorkloadTable]
    features: Mapping[str, _WorkloadFeature] = field(default_factory=dict)
    dense: DenseLoad = field(default_factory=DenseLoad)
    overlap: tuple[Overlap, ...] = ()


def is_workload_document(document: Mapping[Any, Any]) -> bool:
    """Whether a document describes a workload, and not the config of a run."""
    return document.get("format") == WORKLOAD_FORMAT or "tables" in document


def read_workload(document: Mapping[Any, Any]) -> Workload:
    """Parse a workload from plain data.

    A minimal workload has a batch size and tables:

        {"batch_size": 65536, "tables": {"user": {"num_embeddings": 1000000, "embedding_dim": 64}}}

    Optional keys of a table are `dtype`, `optimizer` (a name, or the fields of `OptimizerSpec`), `pooling_factor` and
    `copies`, which creates the tables name_0, name_1 and so on. Optional keys of the workload are:

        features: {name: {table: ..., pooling_factor: ...}}. A table without a feature gets one with its name and its
            `pooling_factor`.
        dense: Fields of `DenseLoad`.
        overlap: Transfers that overlap with computation.

    Raises MesetaError if a key is unknown or missing, or a value is invalid.
    """
    document = strip_format("workload", document, WORKLOAD_FORMAT)
    for entry in _copy_entries(document, "tables"):
        if isinstance(entry.get("optimizer"), str):
            entry["optimizer"] = {"name": entry["optimizer"]}
    for name, entry in zip(document.get("features") or (), _copy_entries(document, "features"), strict=True):
        entry.setdefault("table", str(name))
        _check_reuse(f"workload: features.{name}", entry.get("reuse"))
    if isinstance(document.get("overlap"), list | tuple):
        document["overlap"] = [rename_value(name, FORMER_OVERLAPS) for name in document["overlap"]]
    parsed = parse_dataclass("workload", _WorkloadDocument, document)
    tables: list[TableSpec] = []
    factors: dict[str, float] = {}
    for name, copies in parsed.tables.items():
        for table in copies.specs(name):
            tables.append(table)
            factors[table.name] = copies.pooling_factor
    features = [feature.spec(name) for name, feature in parsed.features.items()]
    loads = {name: feature.load for name, feature in parsed.features.items()}
    read = {spec.table for spec in features}
    for table in tables:
        if table.name not in read:
            features.append(FeatureSpec(name=table.name, table=table.name))
            loads[table.name] = FeatureLoad(pooling_factor=factors[table.name])
    return Workload(
        tables=tuple(tables),
        features=tuple(features),
        batch_size=parsed.batch_size,
        loads=loads,
        dense=parsed.dense,
        overlap=tuple(name for name in OVERLAPS if name in parsed.overlap),
    )


def load_workload(path: str | Path) -> Workload:
    """Load a workload from a YAML or JSON file. Raises MesetaError if it cannot be read or is invalid."""
    return load_document("workload", path, read_workload)


def _copy_entries(document: dict[Any, Any], key: str) -> list[dict[Any, Any]]:
    """Replace the entries of a mapping in `document` by copies that the caller may modify, and return the copies."""
    # Entries that are not mappings are left for `parse_dataclass` to reject.
    part = document.get(key)
    if not isinstance(part, Mapping):
        return []
    document[key] = {name: dict(entry) if isinstance(entry, Mapping) else entry for name, entry in part.items()}
    return [entry if isinstance(entry, dict) else {} for entry in document[key].values()]


def _check_reuse(where: str, reuse: Any) -> None:
    keys = [entry.name for entry in fields(Reuse)]
    if isinstance(reuse, Mapping) and set(keys) - set(reuse):
        raise MesetaError(f"{where}: reuse must have the keys {', '.join(keys)}")
