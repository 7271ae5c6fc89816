"""What one training step asks of the machines: ids of every feature, and the dense part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from meseta.errors import MesetaError, check_number, suggest
from meseta.spec.codecs import Communication
from meseta.spec.documents import load_document, parse_dataclass, strip_format
from meseta.spec.optimizer import OptimizerSpec
from meseta.spec.stages import OVERLAPS, Overlap
from meseta.spec.tables import DenseDtype, FeatureSpec, Pooling, TableDtype, TableSpec, check_features


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """How often a row is looked up within a window of consecutive samples.

    Bin i holds the rows looked up more than edges[i] and at most edges[i + 1] times; the last bin has no upper edge.
    """

    window_samples: int
    """Samples of a window."""
    edges: tuple[int, ...]
    """Lower edges of the bins: 0, 1, 2, 4, ..., 32768."""
    rows: tuple[float, ...]
    """Share of the distinct rows of a window, per bin."""
    lookups: tuple[float, ...]
    """Share of the lookups, per bin."""
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.window_samples < 1:
            raise MesetaError(f"reuse: window_samples must be at least 1, got {self.window_samples}")
        if not self.edges or any(a >= b for a, b in pairwise(self.edges)) or self.edges[0] < 0:
            raise MesetaError(f"reuse: edges must ascend from 0 or more, got {self.edges}")
        for name, shares in (("rows", self.rows), ("lookups", self.lookups)):
            if len(shares) != len(self.edges):
                raise MesetaError(f"reuse: {name} must hold a share for each of {len(self.edges)} edges, got {shares}")
            if not all(0.0 <= share <= 1.0 for share in shares):
                raise MesetaError(f"reuse: shares of {name} must be in 0..1, got {shares}")


@dataclass(frozen=True, kw_only=True)
class FeatureLoad:
    """What is known of the ids of one feature."""

    pooling_factor: float = 1.0
    """Mean ids per sample."""
    reuse: Reuse | None = None
    """How soon rows come again; None: every row of the table is as likely as any other."""
    is_sorted: bool = False
    """Whether the most frequent rows come first, as those of a vocabulary do; else they lie anywhere."""

    def __post_init__(self) -> None:
        if check_number("feature load", "pooling_factor", self.pooling_factor) < 0:
            raise MesetaError(f"pooling_factor must be finite and not negative, got {self.pooling_factor}")


@dataclass(frozen=True, kw_only=True)
class DenseLoad:
    """The dense part of a model."""

    flops_per_sample: float = 0.0
    """Floating-point operations of one sample, forwards and backwards."""
    parameter_bytes: int = 0
    """Parameters; their gradients, which are added over ranks, take as much."""
    activation_bytes_per_sample: int = 0
    """What the forward pass keeps for the backward pass."""
    dtype: DenseDtype = "float32"
    """Type that matrix products compute in."""
    before_flops_per_sample: float = 0.0
    """Of `flops_per_sample`, those of layers that read dense inputs alone: what `forward_dense` of a model computes,
    and its way back."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.before_flops_per_sample <= self.flops_per_sample:
            raise MesetaError(
                f"dense: before_flops_per_sample must be in 0..flops_per_sample ({self.flops_per_sample:g}), got "
                f"{self.before_flops_per_sample:g}"
            )


@dataclass(frozen=True, kw_only=True)
class DenseExchange:
    """What ranks exchange for the dense part, beside the sums of its gradients. A run knows it; no document says it."""

    num_tensors: int = 0
    """Parameters, of each of which it is counted on how many ranks it has a gradient."""
    element_bytes: int = 4
    """Of one number of a parameter."""
    num_padding_elements: int = 0
    """Numbers that fill parameters up to multiples of 16, where a codec writes their gradients."""
    batch_norm_widths: tuple[int, ...] = ()
    """Columns of each batch norm."""
    sharded_shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Shapes of the parameters of each module that is cut over the ranks of a host."""
    num_gradient_norms: int = 0
    """Norms of what is cut that are taken in a step."""
    num_flags: int = 0
    """Numbers that the run has ranks agree on in a step, beside the loss."""
    logit_bytes: int = 0
    """Of a sample, which all ranks are told of for a loss of the global batch; 0 where there is none."""
    num_masked_tasks: int = 0
    """Tasks, if samples may lack labels: ranks add up the weights of the known ones; else 0."""
    num_micro_batches: int = 1
    """Micro-batches that each rank takes its slice in."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model's tables and features under one batch size, with what is known of their ids."""

    tables: tuple[TableSpec, ...]
    """All tables of the model."""
    features: tuple[FeatureSpec, ...]
    """All features that read them."""
    batch_size: int
    """Samples of a step, over all ranks."""
    loads: Mapping[str, FeatureLoad] = field(default_factory=dict)
    """By feature; one id per sample, any row as likely as any other, where none is given."""
    dense: DenseLoad = field(default_factory=DenseLoad)
    """Nothing where not given."""
    dense_exchange: DenseExchange = field(default_factory=DenseExchange)
    """What its layers exchange."""
    comm: Communication = field(default_factory=Communication)
    """How ranks write and route it. A run's config says it; no workload's document does."""
    overlap: tuple[Overlap, ...] = ()
    """What travels while ranks compute, in the order of OVERLAPS."""

    def __post_init__(self) -> None:
        check_features(self.tables, self.features)
        if self.batch_size < 1:
            raise MesetaError(f"workload: batch_size must be at least 1, got {self.batch_size}")
        known = {feature.name for feature in self.features}
        for name in self.loads:
            if name not in known:
                raise MesetaError(f"workload: a load is given for the unknown feature {name!r}; {suggest(name, known)}")

    def load(self, feature: FeatureSpec) -> FeatureLoad:
        """Of one feature."""
        return self.loads.get(feature.name, FeatureLoad())


WORKLOAD_FORMAT = "meseta.workload/1"
MAX_COPIES = 100_000


@dataclass(frozen=True, kw_only=True)
class _WorkloadTable:
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
class _WorkloadFeature:
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
class _WorkloadDocument:
    """The file."""

    batch_size: int
    tables: Mapping[str, _WorkloadTable]
    features: Mapping[str, _WorkloadFeature] = field(default_factory=dict)
    dense: DenseLoad = field(default_factory=DenseLoad)
    overlap: tuple[Overlap, ...] = ()


def is_workload_document(document: Mapping[Any, Any]) -> bool:
    """Whether a file describes a workload, and not a run."""
    return document.get("format") == WORKLOAD_FORMAT or "tables" in document


def read_workload(document: Mapping[Any, Any]) -> Workload:
    """A workload from plain data:

        {"batch_size": 65536, "tables": {"user": {"num_embeddings": 1000000, "embedding_dim": 64}}}

    A table may have a `dtype`, an `optimizer` (a name, or the fields of OptimizerSpec) and `copies`, tables name_0,
    name_1 and so on. `features` reads `{name: {table: ..., pooling_factor: ...}}`; a table that none reads gets one of
    its own name with the `pooling_factor` of the table, 1 where it has none. `dense` has the fields of DenseLoad;
    `overlap` names what travels while ranks compute.
    Raises MesetaError for an unknown or missing key, and a value that breaks its rule.
    """
    document = strip_format("workload", document, WORKLOAD_FORMAT)
    for one in _copy_entries(document, "tables"):
        if isinstance(one.get("optimizer"), str):
            one["optimizer"] = {"name": one["optimizer"]}
    for name, one in zip(document.get("features") or (), _copy_entries(document, "features"), strict=True):
        one.setdefault("table", str(name))
        _check_reuse(f"workload: features.{name}", one.get("reuse"))
    written = parse_dataclass("workload", _WorkloadDocument, document)
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
        overlap=tuple(name for name in OVERLAPS if name in written.overlap),
    )


def load_workload(path: str | Path) -> Workload:
    """Read a YAML or JSON file; raises MesetaError as `read_workload` does, naming the file."""
    return load_document("workload", path, read_workload)


def _copy_entries(document: dict[Any, Any], key: str) -> list[dict[Any, Any]]:
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
