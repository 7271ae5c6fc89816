"""What one training step asks of the machines: ids of every feature, and the dense part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from meseta.errors import MesetaError, nearest
from meseta.spec.checks import check_number
from meseta.spec.tables import DenseDtype, FeatureSpec, TableSpec, check_features


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


@dataclass(frozen=True, kw_only=True)
class DenseExchange:
    """What ranks exchange for the dense part, beside the sums of its gradients. A run knows it; no document says it."""

    num_tensors: int = 0
    """Parameters, of each of which it is counted on how many ranks it has a gradient."""
    number_bytes: int = 4
    """Of one number of a parameter."""
    norm_widths: tuple[int, ...] = ()
    """Columns of each batch norm."""
    cut_shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Shapes of the parameters of each module that is cut over the ranks of a host."""
    num_norms: int = 0
    """Norms of what is cut that are taken in a step."""
    num_flags: int = 0
    """Numbers that the run has ranks agree on in a step, beside the loss."""
    num_parts: int = 1
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

    def __post_init__(self) -> None:
        check_features(self.tables, self.features)
        if self.batch_size < 1:
            raise MesetaError(f"workload: batch_size must be at least 1, got {self.batch_size}")
        known = {feature.name for feature in self.features}
        for name in self.loads:
            if name not in known:
                raise MesetaError(f"workload: a load is given for the unknown feature {name!r}; {nearest(name, known)}")

    def load(self, feature: FeatureSpec) -> FeatureLoad:
        """Of one feature."""
        return self.loads.get(feature.name, FeatureLoad())
