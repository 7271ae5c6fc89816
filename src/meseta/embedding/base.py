"""What the unsharded and the sharded collection share: the specs, the step, and the node in the autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meseta.comm import BatchSlice
from meseta.embedding.accumulate import Segment
from meseta.embedding.feature_group import group_features
from meseta.jagged import Embeddings, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meseta.ops.id_policy import CheckedIds
from meseta.ops.row_optimizer import Hyper, compute_dtype
from meseta.spec import FeatureSpec, MesetaError, TableSpec, check_features


def untimed(stage: str) -> AbstractContextManager[None]:
    """Nobody times it."""
    return nullcontext()


class UpdateInBackward(torch.autograd.Function):
    """Runs `lookups` forward and `update` backward; tables have no gradient tensor and autograd does not see them.

    `update` returns the gradient of each tensor of `weights`, the weights of ids, or None for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        lookups: Sequence[Callable[[], list[Tensor]]],
        update: Callable[..., Sequence[Tensor | None]],
        *weights: Tensor | None,
    ) -> Any:
        ctx.update = update
        return tuple(tensor for look_up in lookups for tensor in look_up())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.update(*gradients)


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
        self.stage: Callable[[str], AbstractContextManager[None]] = untimed
        """Who times a step sets it: called with 'output_dist', 'gradient_dist' and 'table_update' around each."""
        self._is_accumulating = False
        self._kept: list[list[Segment]] = []
        """Of each backward pass of `accumulating`: a segment per group."""
        self._table = {table.name: table for table in self.tables}
        self.groups = group_features(self.features, self._table)
        """Features by batch size; the first ones are those that the loss is the mean over."""
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

    def check_ids(self, kjt: KeyedJaggedTensor) -> list[CheckedIds]:
        """Select each group's features, check weights, and apply the id policies."""
        checked = [group.check_ids(kjt) for group in self.groups]
        counts = checked[0].num_outside
        if len(checked) > 1:
            order = torch.tensor([f for group in self.groups for f in group.at], device=counts.device)
            found = torch.cat([own.num_outside for own in checked])
            counts = torch.empty_like(found).index_copy_(0, order, found)
        self.num_outside = counts if self.num_outside is None else self.num_outside + counts
        return checked

    def embeddings(self, ids: Sequence[KeyedJaggedTensor], found: Sequence[Tensor]) -> Embeddings:
        """Names for the outputs, group after group: pooled [B, sum of D] and the rows of each feature that is not
        pooled [nnz_f, D]."""
        keyed: list[KeyedTensor] = []
        rows: dict[str, JaggedTensor] = {}
        for group, own, (pooled, *single) in zip(self.groups, ids, self.by_group(found), strict=True):
            keyed.append(group.keyed(pooled))
            rows |= group.jagged(own, single)
        others = {group.batch: matrix for group, matrix in zip(self.groups[1:], keyed[1:], strict=True)}
        return Embeddings(pooled=keyed[0], rows=rows, others=others)

    def by_group(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Of each group: its part of what a lookup returned or its gradients, pooled, then one per unpooled feature."""
        stops = list(accumulate((1 + len(group.row_features) for group in self.groups), initial=0))
        return [tensors[a:b] for a, b in pairwise(stops)]
