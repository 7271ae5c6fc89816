"""What the unsharded and the sharded collection share: the specs, the step, and the node in the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meseta.comm import BatchSlice
from meseta.embedding.accumulate import Segment
from meseta.jagged import Embeddings, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meseta.ops.id_policy import CheckedIds, apply_id_policy
from meseta.ops.row_optimizer import Hyper, compute_dtype
from meseta.spec import FeatureSpec, MesetaError, TableSpec, check_features


class UpdateInBackward(torch.autograd.Function):
    """Runs `lookup` forward and `update` backward; tables have no gradient tensor and autograd does not see them.

    `update` returns the gradient of the weights of ids, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        lookup: Callable[[], list[Tensor]],
        update: Callable[..., Tensor | None],
    ) -> Any:
        ctx.update = update
        return tuple(lookup())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        return None, ctx.update(*gradients), None, None


class Collection(nn.Module):
    """Tables, the features that read them, and how far they have learned. Tables are not nn.Parameters."""

    def __init__(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], seed: int) -> None:
        super().__init__()
        check_features(tables, features)
        if not features:
            raise MesetaError("a collection needs at least one feature; give FeatureSpec(name=..., table=...)")
        dtypes = {table.dtype for table in tables}
        if len(dtypes) != 1:
            raise MesetaError(f"tables of one collection must have one dtype, got {sorted(dtypes) or 'no table'}")
        self.tables = tuple(tables)
        self.features = tuple(features)
        self.seed = seed
        self.dtype = compute_dtype(getattr(torch, dtypes.pop()))
        """Type of what a lookup returns: float32, or float64 for float64 tables."""
        self.step = 0
        """Backward passes so far, the global step of bias correction."""
        self.batch_slice: BatchSlice | None = None
        """Where the samples of the last lookup lie in the global batch; None before any."""
        self.first_sample: int | None = None
        """Place in the global batch of this rank's first sample in the next lookup, if that is a micro-batch of
        `accumulating`; None: a whole batch is looked up."""
        self.lr_factor = 1.0
        """What a schedule multiplies every table's learning rate by."""
        self.num_outside: Tensor | None = None
        """Ids outside their table so far, per feature [F] (after policies drop, clamp and hash); None before any
        batch."""
        self._is_accumulating = False
        self._kept: list[Segment] = []
        self.pooled_features = tuple(f for f in self.features if f.pooling != "none")
        self.row_features = tuple(f for f in self.features if f.pooling == "none")
        self._table = {table.name: table for table in self.tables}
        # Asked for in every step.
        self._names = tuple(f.name for f in self.features)
        self._unpooled = tuple(index for index, f in enumerate(self.features) if f.pooling == "none")
        self._weighted_names = tuple(f.name for f in self.features if f.weighted)
        self._num_rows = [self._table[f.table].num_embeddings for f in self.features]
        self._policies = [f.id_policy for f in self.features]
        self._pooled_names = tuple(f.name for f in self.pooled_features)
        self._pooled_dims = tuple(self._table[f.table].embedding_dim for f in self.pooled_features)
        # An input that requires grad makes autograd call `update`; it is not a parameter and holds nothing.
        self._anchor = torch.zeros(0, requires_grad=True)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside move no row: their gradients are kept, and the next pass outside adds them to its own
        and steps each touched row once, as one pass over all the samples would.

            for part in parts[:-1]:
                with embeddings.accumulating():
                    (loss_of(part) / len(parts)).backward()
            (loss_of(parts[-1]) / len(parts)).backward()

        Kept are ids and the upstream gradients of bags: of n samples, n * (sum of D of the pooled features) numbers,
        and D for each id that is not pooled. On several ranks all must enter and leave alike.
        """
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def forget_kept(self) -> None:
        """Drop what `accumulating` has kept, where its step is not to be taken."""
        self._kept.clear()

    def lr(self, table: TableSpec) -> float:
        """Learning rate of the step in hand."""
        return table.optimizer.lr * self.lr_factor

    def hyper(self, table: TableSpec) -> Hyper:
        """Learning rate, number of the step in hand, and width."""
        return Hyper(lr=self.lr(table), step=self.step + 1, embedding_dim=table.embedding_dim)

    def check_ids(self, kjt: KeyedJaggedTensor) -> CheckedIds:
        """Select this collection's features, check weights, and apply the id policies."""
        kjt = kjt.select(self._names)
        if kjt.weights is None and self._weighted_names:
            raise MesetaError(
                f"feature {self._weighted_names[0]!r} is weighted, but the batch has no weights; "
                "give KeyedJaggedTensor(weights=...), or set weighted=False"
            )
        checked = apply_id_policy(kjt, self._num_rows, self._policies)
        self.num_outside = checked.num_outside if self.num_outside is None else self.num_outside + checked.num_outside
        return checked

    def refuse(self, feature: int, sample: int, row: int) -> MesetaError:
        """The error for an id that policy 'error' refuses."""
        spec = self.features[feature]
        limit = self._table[spec.table].num_embeddings
        return MesetaError(
            f"table {spec.table!r}: id {row} from feature {spec.name!r}, sample {sample}, is outside 0..{limit - 1}; "
            "set id_policy='hash' ('drop', 'clamp'), enlarge num_embeddings, or fix the data"
        )

    def embeddings(self, ids: KeyedJaggedTensor, pooled: Tensor, rows: Sequence[Tensor]) -> Embeddings:
        """Names for the outputs: pooled [B, sum of D] and the rows of each unpooled feature [nnz_f, D]."""
        keyed = KeyedTensor(keys=self._pooled_names, dims=self._pooled_dims, values=pooled)
        jagged = {
            f.name: JaggedTensor(values=values, lengths=ids[f.name].lengths)
            for f, values in zip(self.row_features, rows, strict=True)
        }
        return Embeddings(pooled=keyed, rows=jagged)

    def divide_means(self, pooled: Tensor, lengths: Tensor) -> Tensor:
        """Divide the columns of mean-pooled features of `pooled` [B, sum of D] by the number of ids, in place.

        `lengths` is [F, B] in the order of `features`; an empty bag stays zero.
        """
        column = 0
        for index, feature in enumerate(self.features):
            if feature.pooling == "none":
                continue
            width = self._table[feature.table].embedding_dim
            if feature.pooling == "mean":
                pooled[:, column : column + width].div_(lengths[index].clamp(min=1).to(pooled.dtype)[:, None])
            column += width
        return pooled
