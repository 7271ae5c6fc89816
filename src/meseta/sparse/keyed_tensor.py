"""Output of an embedding collection: pooled embeddings, and rows of features that are not pooled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from meseta.sparse.jagged_tensor import JaggedTensor
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError, suggest


@dataclass(frozen=True, eq=False)
class KeyedTensor:
    """Pooled embeddings of several features in one tensor."""

    keys: tuple[str, ...]
    dims: tuple[int, ...]
    """Number of columns of each feature."""
    values: Float[Tensor, "B sum_of_dims"]
    """Pooled embeddings, in the order of `keys`."""

    def __getitem__(self, key: str) -> Float[Tensor, "B D"]:
        """Return the pooled embeddings of one feature as a view."""
        if key not in self.keys:
            raise MesetaError(f"KeyedTensor: no key {key!r}; {suggest(key, self.keys)}")
        index = self.keys.index(key)
        start = sum(self.dims[:index])
        return self.values[:, start : start + self.dims[index]]


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Output of an embedding collection.

    `embeddings[name]` is a tensor [B, D] if the feature is pooled, and a JaggedTensor of rows otherwise.
    """

    pooled: KeyedTensor
    """Features of batch '' with pooling 'sum' or 'mean', in the order of their FeatureSpecs."""
    rows: Mapping[str, JaggedTensor] = field(default_factory=dict)
    """Features with pooling 'none' by name, with one row [D] per id."""
    pooled_by_batch: Mapping[str, KeyedTensor] = field(default_factory=dict)
    """Pooled features of batches other than '', by `FeatureSpec.batch`."""

    def __getitem__(self, key: str) -> Tensor | JaggedTensor:
        if key in self.rows:
            return self.rows[key]
        for keyed in (self.pooled, *self.pooled_by_batch.values()):
            if key in keyed.keys:
                return keyed[key]
        # Suggestions cover features of all batches, pooled or not.
        names = [name for keyed in (self.pooled, *self.pooled_by_batch.values()) for name in keyed.keys]
        raise MesetaError(f"Embeddings: no feature {key!r}; {suggest(key, [*names, *self.rows])}")
