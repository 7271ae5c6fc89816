"""What the unsharded and the sharded collection share: the specs, the step, and the node in the autograd graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meseta.comm import BatchSlice, Totals, World
from meseta.embedding.accumulate import GradientSegment
from meseta.embedding.feature_group import group_features
from meseta.embedding.flight import Flight, GroupPart, IdsOutside, RanOut, Timer, at_once, no_timer
from meseta.jagged import Embeddings, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meseta.jagged.shapes import Int
from meseta.ops.device_words import device_words
from meseta.ops.id_policy import CheckedIds
from meseta.ops.row_program.optimizer import compute_dtype
from meseta.ops.row_update import TableRows
from meseta.spec import FeatureSpec, MesetaError, TableSpec, check_features
from meseta.storage import Lease, TableStorage

NO_BACKWARD = -1
"""What torch says where no backward pass runs."""


class UpdateInBackward(torch.autograd.Function):
    """Gives out `answers` forward and runs `update` backward; tables have no gradient tensor and autograd does not see
    them.

    `update` returns the gradient of each tensor of `weights`, the weights of ids, or None for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        answers: Sequence[Tensor],
        update: Callable[..., Sequence[Tensor | None]],
        *weights: Tensor | None,
    ) -> Any:
        ctx.update = update
        return tuple(answers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.update(*gradients)


class Collection(nn.Module, ABC, Generic[GroupPart]):
    """Tables, the features that read them, and how far they have learned. Tables are not nn.Parameters.

    What belongs to one batch is in its Flight; the module knows which one is in hand.
    """

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
        self.lr_factor = 1.0
        """What a schedule multiplies every table's learning rate by, where a batch brings no factor of its own."""
        self.clamped: Tensor | None = None
        """[1]: numbers that were too large for fp16 on their way to other ranks so far; None where none travel so."""
        self._outside = IdsOutside()
        self._in_hand: Flight[GroupPart] | None = None
        self._last_slice: BatchSlice | None = None
        """Of the batch that was finished last."""
        self._num_started = 0
        self._rows: tuple[TableRows, ...] | None = None
        """What operators were told of last, of each shard; None before any."""
        self._backward: tuple[int, BatchSlice | None] = (NO_BACKWARD, None)
        """Number of the last backward pass, and the slice of its batch."""
        self._is_accumulating = False
        self._backward_is_part = NO_BACKWARD, False
        """Number of the last backward pass that came to the tables, and whether its gradients wait for the next."""
        self.kept_dense: list[Tensor] = []
        """What backward passes of `accumulating` have left of dense gradients."""
        self._kept: list[Callable[[], Sequence[GradientSegment]]] = []
        """Of each backward pass of `accumulating`: a segment per group, which may still be on its way."""
        self._kept_leases: list[Lease] = []
        """Of these passes, whose rows move with the next."""
        self._table = {table.name: table for table in self.tables}
        self.groups = group_features(self.features, self._table)
        """Features by batch size; the first ones are those that the loss is the mean over."""
        # An input that requires grad makes autograd call `update`; it is not a parameter and holds nothing.
        self._anchor = torch.zeros(0, requires_grad=True)

    @property
    def num_ranks(self) -> int:
        """Over which the tables lie."""
        return 1

    @property
    @abstractmethod
    def shards(self) -> Sequence[TableStorage]:
        """The pieces of tables on this rank."""

    @abstractmethod
    def _describe(self, rows: Sequence[TableRows]) -> None:
        """Make what operators are told of the rows of each shard, where others were lent before."""

    def _borrow(self, flight: Flight[GroupPart], looked_up: Sequence[tuple[int, Tensor]] = ()) -> list[Tensor]:
        """Borrow all rows until the backward pass of a batch is over. `looked_up` are rows that it looks up, each with
        the index of its shard; returned is where they lie in what is lent."""
        far = [(index, rows) for index, rows in looked_up if index in self._far]
        flight.lease = Lease(self.shards, far, to_read=not torch.is_grad_enabled())
        rows = flight.lease.rows
        if self._rows is None or any(lent is not former for lent, former in zip(rows, self._rows, strict=True)):
            self._rows = rows
            self._describe(rows)
        places = iter(flight.lease.places)
        return [next(places).to(rows) if index in self._far else rows for index, rows in looked_up]

    @property
    def lies_far(self) -> bool:
        """Whether rows of any rank are lent only while a batch needs them."""
        return bool(self._far)

    def fetch(self, flight: Flight[GroupPart]) -> None:
        """Begin to bring the rows of a batch that was exchanged, where they lie far, while others are trained; what
        there is no room for yet is left to `look_up`. Collective."""

    @cached_property
    def _far(self) -> frozenset[int]:
        """Shards, by index, whose rows are lent only while a batch needs them."""
        return frozenset(index for index, shard in enumerate(self.shards) if shard.lies_far)

    def forward(self, sparse: KeyedJaggedTensor | Flight[GroupPart]) -> Embeddings:
        """Rows for the ids of this rank's slice (of a batch that may hold other features too), or for a batch that was
        exchanged: pooled [B, sum of D] and unpooled [nnz_f, D]."""
        return self.finish(self.exchange(self.start(sparse)) if isinstance(sparse, KeyedJaggedTensor) else sparse)

    @abstractmethod
    def _begin(self, flight: Flight[GroupPart], kjt: KeyedJaggedTensor | RanOut | Exception) -> None:
        """Give a batch its parts."""

    def start(
        self,
        kjt: KeyedJaggedTensor | RanOut | Exception,
        *,
        step: int | None = None,
        lr_factor: float | None = None,
        totals: Totals | None = None,
        is_part: bool | None = None,
        stage_timer: Timer = no_timer,
        outside: IdsOutside | None = None,
    ) -> Flight[GroupPart]:
        """Check the ids, begin to send their counts to the owners of rows. No host sync, unless ids are dropped.

        `kjt` may be what kept this rank from having a batch: in one process it is raised here, else by `exchange`, on
        all ranks and as a MesetaError; or that there is none any more, which all ranks know from `exchange` on. The
        options are those of Flight; what is not given follows from the collection when it is needed. `outside` counts
        the ids outside their table of this batch instead of the collection.
        """
        flight: Flight[GroupPart] = Flight(
            number=self._num_started,
            step=step,
            lr_factor=lr_factor,
            totals=totals,
            is_part=is_part,
            stage_timer=stage_timer,
            outside=self._outside if outside is None else outside,
        )
        self._begin(flight, kjt)
        self._num_started += 1
        return flight

    @abstractmethod
    def exchange(self, flight: Flight[GroupPart]) -> Flight[GroupPart]:
        """Read the counts, agree on errors, begin to send the ids; raises MesetaError for those that are refused."""

    @abstractmethod
    def look_up(self, flight: Flight[GroupPart]) -> Flight[GroupPart]:
        """Look up the rows as they are now, and begin to bring rows or bags to the ranks of the samples."""

    def hand_on(self, flight: Flight[GroupPart]) -> None:
        """Where ids, or rows and bags, take two levels between hosts, begin the second; `look_up` and `finish` else do
        it. Collective."""

    def finish(self, flight: Flight[GroupPart]) -> Embeddings:
        """Wait for the rows or bags of this rank's samples, after looking them up where that was not done before."""
        if flight.stage == "exchanged":
            self.look_up(flight)
        flight.enter("finished", after="looked up")
        with flight.dropped_by_errors():
            if flight.meanwhile is not at_once:
                self.hand_on(flight)
                flight.meanwhile()
            if flight.num_outside is not None:
                flight.outside.add(flight.num_outside)
            return self._finish(flight)

    @abstractmethod
    def _finish(self, flight: Flight[GroupPart]) -> Embeddings:
        """The same."""

    def answers(self, flight: Flight[GroupPart]) -> Sequence[Tensor]:
        """Those of a batch that was looked up, which is not finished by that: see Flight."""
        if flight.answers is None:
            with torch.no_grad():
                flight.answers = self._assemble(flight)
        return flight.answers

    @abstractmethod
    def _assemble(self, flight: Flight[GroupPart]) -> Sequence[Tensor]:
        """Wait for them."""

    def drop(self, flight: Flight[GroupPart]) -> None:
        """Give up a batch that is not finished, when what it has under way is there."""
        flight.drop()

    @contextmanager
    def in_hand(self, flight: Flight[GroupPart]) -> Iterator[None]:
        """While this is entered, `batch_slice` and `local_share` are those of `flight`: for its forward and backward
        pass, where several batches are open."""
        before, self._in_hand = self._in_hand, flight
        try:
            yield
        finally:
            self._in_hand = before

    @property
    def batch_slice(self) -> BatchSlice | None:
        """Where samples lie in the global batch: those of the backward pass that runs, else those of the batch in hand,
        else those of the batch that was finished last; None before any."""
        backward = torch._C._current_graph_task_id()
        if backward != NO_BACKWARD and backward == self._backward[0]:
            return self._backward[1]
        batch_slice = self._last_slice if self._in_hand is None else self._in_hand.batch_slice
        if backward != NO_BACKWARD:
            self._backward = backward, batch_slice
        return batch_slice

    @property
    def num_outside(self) -> Int[Tensor, " F"] | None:
        """Ids outside their table so far, per feature (after policies drop, clamp and hash); None before any batch was
        finished."""
        return self._outside.counts

    def go_on_from(self, step: int, num_outside: Int[Tensor, " F"] | None) -> None:
        """Count on from where a saved run stood: its backward passes, and its ids outside their table."""
        self.step = step
        if num_outside is not None:
            self._outside.counts = num_outside

    def _looked_up(
        self, flight: Flight[GroupPart], world: World, sizes: tuple[int, ...], totals: Sequence[Totals]
    ) -> None:
        """Note where samples lie: `sizes` are those of each rank, of its `totals` in the global batch."""
        step = self.step if flight.step is None else flight.step
        first = sum(own.num_samples for own in totals[: world.rank]) + flight.place
        flight.batch_slice = BatchSlice(world=world, step=step, sizes=sizes, first=first)
        self._last_slice = flight.batch_slice

    @abstractmethod
    def _send_gradients(
        self, flight: Flight[GroupPart], *gradients: Tensor
    ) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Begin to bring the gradients of what the lookup of a batch returned to its rows. Returns the gradients of the
        weights of ids, and what steps the rows, or keeps their gradients for the last part of the batch."""

    def _run_backward(self, flight: Flight[GroupPart], *gradients: Tensor) -> Sequence[Tensor | None]:
        """What autograd calls; with the update, here or when the pass ends, the batch is over."""
        self._begin_backward(flight)
        with flight.dropped_by_errors():
            of_weights, update = self._send_gradients(flight, *gradients)
        if flight.overlaps:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, flight, update))
        else:
            self._end_backward(flight, update)
        return of_weights

    def _end_backward(self, flight: Flight[GroupPart], update: Callable[[], None]) -> None:
        waits = self._waits(flight)
        try:
            update()
        finally:
            if waits and flight.lease is not None:
                self._kept_leases.append(flight.lease)
                flight.lease = None
            else:
                flight.give_back()
                self._end_kept_leases()

    def _begin_backward(self, flight: Flight[GroupPart]) -> None:
        """Note whose backward pass runs; raises MesetaError where dense gradients have been weighed as another's."""
        flight.enter("used", after="finished")
        backward, weighed = torch._C._current_graph_task_id(), self._backward
        if weighed[0] == backward and weighed[1] is not None and weighed[1].sizes != flight.sizes:
            raise MesetaError(
                f"a backward pass goes through a batch whose ranks have {list(flight.sizes)} samples, and has weighed "
                f"gradients by {list(weighed[1].sizes)}; run the passes of batches one by one, each in "
                "embeddings.in_hand(flight)"
            )
        self._backward = backward, flight.batch_slice
        self._backward_is_part = backward, self._waits(flight)

    @property
    def is_part(self) -> bool:
        """Whether gradients of the backward pass that runs wait for those of the next."""
        backward, is_part = self._backward_is_part
        if backward == torch._C._current_graph_task_id():
            return is_part
        return self._is_accumulating if self._in_hand is None else self._waits(self._in_hand)

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
        self._forget_rows()
        self._end_kept_leases()
        self.kept_dense.clear()

    def _forget_rows(self) -> None:
        """The same of the gradients of rows."""
        self._kept.clear()

    def _end_kept_leases(self) -> None:
        leases, self._kept_leases = self._kept_leases, []
        for lease in leases:
            lease.end()

    def lr(self, flight: Flight[GroupPart], table: TableSpec) -> float:
        """Learning rate of a table in the update of a batch."""
        return table.optimizer.lr * (self.lr_factor if flight.lr_factor is None else flight.lr_factor)

    def _waits(self, flight: Flight[GroupPart]) -> bool:
        """Whether the gradients of a batch wait for those of the next."""
        return self._is_accumulating if flight.is_part is None else flight.is_part

    def check_ids(self, kjt: KeyedJaggedTensor) -> list[CheckedIds]:
        """Select each group's features, check weights, and apply the id policies."""
        return [group.check_ids(kjt) for group in self.groups]

    def _no_samples(self, device: torch.device) -> KeyedJaggedTensor:
        """Ids of all features, of no sample."""
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        weights = nothing.to(self.dtype) if any(group.is_weighted for group in self.groups) else None
        return KeyedJaggedTensor(tuple(feature.name for feature in self.features), nothing, nothing, weights)

    def count_outside(self, checked: Sequence[CheckedIds]) -> Int[Tensor, " F"]:
        """Ids outside their table, per feature in the order of the collection."""
        if len(checked) == 1:
            return checked[0].num_outside
        counts = torch.cat([of_group.num_outside for of_group in checked])
        order = device_words(tuple(f for group in self.groups for f in group.at), counts.device)
        return torch.empty_like(counts).index_copy_(0, order, counts)

    def _embeddings(
        self, flight: Flight[GroupPart], ids: Sequence[KeyedJaggedTensor], found: Sequence[Tensor]
    ) -> Embeddings:
        """Names for the outputs, group after group: pooled [B, sum of D] and the rows of each feature that is not
        pooled [nnz_f, D]. The rows of a lookup that has no way back are given back."""
        if not torch.is_grad_enabled():
            flight.give_back()
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
