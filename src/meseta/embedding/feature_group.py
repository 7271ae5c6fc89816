"""Groups of features with the same batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from meseta.ops.id_policy import CheckedIds, apply_id_policy
from meseta.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meseta.spec import FeatureSpec, MesetaError, TableSpec


class FeatureGroup:
    """Features with the same `FeatureSpec.batch`, in the order of the collection."""

    def __init__(self, at: Sequence[int], features: Sequence[FeatureSpec], tables: Mapping[str, TableSpec]) -> None:
        """Create a group of the features with indices `at`."""
        self.feature_indices = tuple(at)
        self.features = tuple(features[f] for f in at)
        self.batch_name = self.features[0].batch
        self.pooled_features = tuple(f for f in self.features if f.pooling != "none")
        self.unpooled_features = tuple(f for f in self.features if f.pooling == "none")
        self.unpooled_indices = tuple(index for index, f in enumerate(self.features) if f.pooling == "none")
        self.pooled_names = tuple(f.name for f in self.pooled_features)
        self.dims = tuple(tables[f.table].embedding_dim for f in self.features)
        self.pooled_dims = tuple(tables[f.table].embedding_dim for f in self.pooled_features)
        self.is_weighted = any(f.weighted for f in self.features)
        self.has_means = any(f.pooling == "mean" for f in self.features)
        # Cached because each step uses them.
        self._names = tuple(f.name for f in self.features)
        self._weighted_names = tuple(f.name for f in self.features if f.weighted)
        self._num_rows = [tables[f.table].num_embeddings for f in self.features]
        self._policies = [f.id_policy for f in self.features]

    def check_ids(self, kjt: KeyedJaggedTensor) -> CheckedIds:
        """Select the features of this group from a batch, check weights and batch sizes, and apply id policies."""
        kjt = kjt.select(self._names)
        if kjt.weights is None and self._weighted_names:
            raise MesetaError(
                f"feature {self._weighted_names[0]!r} is weighted, but the batch has no weights; "
                "give KeyedJaggedTensor(weights=...), or set weighted=False"
            )
        if len(set(kjt.batch_sizes)) > 1:
            other = next(f for f, size in enumerate(kjt.batch_sizes) if size != kjt.batch_sizes[0])
            raise MesetaError(
                f"feature {self._names[0]!r} has {kjt.batch_sizes[0]} samples and {self._names[other]!r} "
                f"{kjt.batch_sizes[other]}, but both have batch {self.batch_name!r}; set another "
                "FeatureSpec(batch=...) for features with another batch size"
            )
        return apply_id_policy(kjt, self._num_rows, self._policies)

    def out_of_range_error(self, feature: int, sample: int, row: int) -> MesetaError:
        """Return the error for an id that policy 'error' rejects."""
        spec = self.features[feature]
        return MesetaError(
            f"table {spec.table!r}: id {row} from feature {spec.name!r}, sample {sample}, is outside "
            f"0..{self._num_rows[feature] - 1}; "
            "set id_policy='hash' ('drop', 'clamp'), enlarge num_embeddings, or fix the data"
        )

    def divide_means(self, pooled: Tensor, lengths: Tensor) -> Tensor:
        """Divide the mean-pooled columns of `pooled` [B, sum of D] by the bag lengths [F, B] in place.

        Empty bags remain zero.
        """
        column = 0
        for index, feature in enumerate(self.features):
            if feature.pooling == "none":
                continue
            width = self.dims[index]
            if feature.pooling == "mean":
                pooled[:, column : column + width].div_(lengths[index].clamp(min=1).to(pooled.dtype)[:, None])
            column += width
        return pooled

    def to_sum_gradient(self, gradient: Tensor, lengths: Tensor) -> Tensor:
        """Return the gradient of bag sums, given that of pooled bags [B, sum of D] and the bag lengths [F * B]."""
        if not self.has_means:
            return gradient
        return self.divide_means(gradient.clone(), lengths.view(len(self.features), -1))

    def to_keyed_tensor(self, pooled: Tensor) -> KeyedTensor:
        """Return pooled embeddings [B, sum of D] with their feature names."""
        return KeyedTensor(keys=self.pooled_names, dims=self.pooled_dims, values=pooled)

    def to_jagged_tensors(self, ids: KeyedJaggedTensor, rows: Sequence[Tensor]) -> dict[str, JaggedTensor]:
        """Return the rows [nnz_f, D] of each unpooled feature."""
        return {
            f.name: JaggedTensor(values=values, lengths=ids[f.name].lengths)
            for f, values in zip(self.unpooled_features, rows, strict=True)
        }


def group_features(features: Sequence[FeatureSpec], tables: Mapping[str, TableSpec]) -> tuple[FeatureGroup, ...]:
    """Group features by batch name. The first group has the name '', over whose samples the loss is averaged.

    The other groups are in order of first occurrence. Raises MesetaError if no feature has the batch name ''.
    """
    members: dict[str, list[int]] = {"": []}
    for index, feature in enumerate(features):
        members.setdefault(feature.batch, []).append(index)
    if not members[""]:
        raise MesetaError(
            f"feature {features[0].name!r} has batch {features[0].batch!r}, and no feature has the default batch; "
            "leave `batch` out for at least one feature, because the loss is averaged over its samples"
        )
    return tuple(FeatureGroup(at, features, tables) for at in members.values())
