"""Features that share a batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from meseta.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meseta.ops.id_policy import CheckedIds, apply_id_policy
from meseta.spec import FeatureSpec, MesetaError, TableSpec


class FeatureGroup:
    """The features of one `FeatureSpec.batch`, in the order of the collection."""

    def __init__(self, at: Sequence[int], features: Sequence[FeatureSpec], tables: Mapping[str, TableSpec]) -> None:
        """Those of `features` whose indexes are `at`."""
        self.feature_indices = tuple(at)
        """Where its features stand in the collection."""
        self.features = tuple(features[f] for f in at)
        self.batch_name = self.features[0].batch
        self.pooled_features = tuple(f for f in self.features if f.pooling != "none")
        self.unpooled_features = tuple(f for f in self.features if f.pooling == "none")
        self.unpooled_indices = tuple(index for index, f in enumerate(self.features) if f.pooling == "none")
        """Indexes of the features that are not pooled."""
        self.pooled_names = tuple(f.name for f in self.pooled_features)
        self.dims = tuple(tables[f.table].embedding_dim for f in self.features)
        self.pooled_dims = tuple(tables[f.table].embedding_dim for f in self.pooled_features)
        self.is_weighted = any(f.weighted for f in self.features)
        self.has_means = any(f.pooling == "mean" for f in self.features)
        # Asked for in every step.
        self._names = tuple(f.name for f in self.features)
        self._weighted_names = tuple(f.name for f in self.features if f.weighted)
        self._num_rows = [tables[f.table].num_embeddings for f in self.features]
        self._policies = [f.id_policy for f in self.features]

    def check_ids(self, kjt: KeyedJaggedTensor) -> CheckedIds:
        """Select this group's features of a batch, check weights and sizes, and apply the id policies."""
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
                f"{kjt.batch_sizes[other]}, but both are of batch {self.batch_name!r}; features of another batch size "
                f"have "
                "FeatureSpec(batch='its name')"
            )
        return apply_id_policy(kjt, self._num_rows, self._policies)

    def out_of_range_error(self, feature: int, sample: int, row: int) -> MesetaError:
        """The error for an id that policy 'error' refuses."""
        spec = self.features[feature]
        return MesetaError(
            f"table {spec.table!r}: id {row} from feature {spec.name!r}, sample {sample}, is outside "
            f"0..{self._num_rows[feature] - 1}; "
            "set id_policy='hash' ('drop', 'clamp'), enlarge num_embeddings, or fix the data"
        )

    def divide_means(self, pooled: Tensor, lengths: Tensor) -> Tensor:
        """Divide the columns of mean-pooled features of `pooled` [B, sum of D] by the number of ids, in place.

        `lengths` is [F, B] in the order of `features`; an empty bag stays zero.
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
        """Gradient of the sums of bags, where `gradient` [B, sum of D] is of what was pooled; `lengths` [F * B]."""
        if not self.has_means:
            return gradient
        return self.divide_means(gradient.clone(), lengths.view(len(self.features), -1))

    def to_keyed_tensor(self, pooled: Tensor) -> KeyedTensor:
        """Names for [B, sum of D]."""
        return KeyedTensor(keys=self.pooled_names, dims=self.pooled_dims, values=pooled)

    def to_jagged_tensors(self, ids: KeyedJaggedTensor, rows: Sequence[Tensor]) -> dict[str, JaggedTensor]:
        """Names for the rows of each feature that is not pooled, [nnz_f, D]."""
        return {
            f.name: JaggedTensor(values=values, lengths=ids[f.name].lengths)
            for f, values in zip(self.unpooled_features, rows, strict=True)
        }


def group_features(features: Sequence[FeatureSpec], tables: Mapping[str, TableSpec]) -> tuple[FeatureGroup, ...]:
    """One group per batch: first '', whose samples the loss is the mean over, then the others as they come.

    Raises MesetaError where no feature is of batch ''.
    """
    members: dict[str, list[int]] = {"": []}
    for index, feature in enumerate(features):
        members.setdefault(feature.batch, []).append(index)
    if not members[""]:
        raise MesetaError(
            f"feature {features[0].name!r} is of batch {features[0].batch!r}, and so are all or they are of others; "
            "leave `batch` out at one feature at least: its samples are those that the loss is the mean over"
        )
    return tuple(FeatureGroup(at, features, tables) for at in members.values())
