"""What comes back from an embedding: pooled features side by side, and rows of the features that are not pooled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from meseta.jagged.jagged_tensor import JaggedTensor
from meseta.jagged.shapes import Float
from meseta.spec import MesetaError, suggest


@dataclass(frozen=True, eq=False)
class KeyedTensor:
    """Pooled features side by side: feature `keys[f]` holds `dims[f]` columns."""

    keys: tuple[str, ...]
    """Feature names."""
    dims: tuple[int, ...]
    """Columns of each feature."""
    values: Float[Tensor, "B sum_of_dims"]
    """All features in one tensor, ready for a matrix product."""

    def __getitem__(self, key: str) -> Float[Tensor, "B D"]:
        """Columns of one feature (a view)."""
        if key not in self.keys:
            raise MesetaError(f"KeyedTensor: no key {key!r}; {suggest(key, self.keys)}")
        index = self.keys.index(key)
        start = sum(self.dims[:index])
        return self.values[:, start : start + self.dims[index]]


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Output of an embedding collection: `out["feature"]` is [B, D] when pooled, a JaggedTensor of rows when not."""

    pooled: KeyedTensor
    """Features of batch '' with pooling 'sum' or 'mean', in the order of their FeatureSpecs."""
    rows: Mapping[str, JaggedTensor] = field(default_factory=dict)
    """Features with pooling 'none': one row [D] per id."""
    pooled_by_batch: Mapping[str, KeyedTensor] = field(default_factory=dict)
    """Pooled features of other batch sizes, by `FeatureSpec.batch`."""

    def __getitem__(self, key: str) -> Tensor | JaggedTensor:
        if key in self.rows:
            return self.rows[key]
        for keyed in (self.pooled, *self.pooled_by_batch.values()):
            if key in keyed.keys:
                return keyed[key]
        known = [name for keyed in (self.pooled, *self.pooled_by_batch.values()) for name in keyed.keys]
        raise MesetaError(f"Embeddings: no feature {key!r}; {suggest(key, [*known, *self.rows])}")
