"""A batch under way: all that belongs to it, from its ids to the update of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from meseta.comm import BatchSlice, BatchTotals
from meseta.jagged.shapes import Float, Int
from meseta.spec import MesetaError
from meseta.spec.stages import StageName
from meseta.spec.transfer import EXHAUSTED, MAX_TAGS, CountsHeader
from meseta.storage import Lease

BatchStage = Literal["started", "exchanged", "looked up", "finished", "used", "dropped"]
StageTimer = Callable[[StageName], AbstractContextManager[None]]
"""Called with the name of a stage of a step, and entered while it lasts."""
Clip = Callable[[Sequence[Tensor]], float]
"""Takes the gradients [U, D] of all rows of a step, and returns what they are to be multiplied by."""
NEXT_STAGE_HINTS: dict[BatchStage, str] = {
    "started": "exchange it next",
    "exchanged": "finish it next",
    "looked up": "finish it next",
    "finished": "run its backward pass next, or leave it",
    "used": "start another of the same ids",
    "dropped": "its error was raised: start another",
}
"""The way on from each stage."""


def null_timer(stage: StageName) -> AbstractContextManager[None]:
    """Nobody times it."""
    return nullcontext()


def no_op() -> None:
    """Nothing is waited for."""


class OutOfRangeIds:
    """Ids outside their table, counted over batches (after the policies drop, clamp and hash)."""

    def __init__(self) -> None:
        self.counts: Int[Tensor, " F"] | None = None
        """Per feature; None before any batch."""

    def add(self, counts: Int[Tensor, " F"]) -> None:
        """Those of one batch."""
        self.counts = counts if self.counts is None else self.counts + counts


UNEVEN_POLICIES = ("error", "join", "drop")
"""What may come of a loop whose ranks run out of batches unevenly: it ends with an error, goes on without the samples
of those that have none, or ends for all."""


@dataclass(frozen=True)
class ExhaustedInput:
    """Stands for the ids of a rank that has no batch left: it takes part without samples, and tells so with its
    counts."""

    num_batches: int
    """Those that it has had."""
    policy: str

    def to_header(self, device: torch.device) -> Int[Tensor, " 3"]:
        """[feature, sample, id] of its header."""
        return torch.tensor([EXHAUSTED, UNEVEN_POLICIES.index(self.policy), self.num_batches], device=device)

    @staticmethod
    def from_headers(headers: Sequence[CountsHeader]) -> dict[int, ExhaustedInput]:
        """By rank: those that have none left."""
        return {
            rank: ExhaustedInput(header.id, UNEVEN_POLICIES[header.sample])
            for rank, header in enumerate(headers)
            if header.feature == EXHAUSTED
        }


GroupStateT = TypeVar("GroupStateT")


@dataclass(eq=False, kw_only=True)
class BatchContext(Generic[GroupStateT]):
    """One batch on its way through a collection, made by `start` and carried on by the other stages:

        start        exchange     look_up       finish            backward
        ids -------> counts ----> rows -------> rows, pooled ---> gradients, update
          "started"    "exchanged"  "looked up"   "finished"        "used"

    Several may be open at once; every rank takes the stages of all its batches in the same order. One whose ids are
    refused, on any rank, is dropped.
    """

    index: int = 0
    """Batches that its collection has started before."""
    lr_factor: float | None = None
    """What every table's learning rate is multiplied by in its update; None: the collection's when that begins."""
    step: int | None = None
    """Steps trained before it; None until `look_up` asks the collection."""
    local_totals: BatchTotals | None = None
    """Of the samples of this rank in the global batch, of which it may be a micro-batch; None: of its own, each of
    weight 1."""
    slice_offset: int = 0
    """Of its first sample among these."""
    global_totals: BatchTotals | None = None
    """Of the global batch; None until it is exchanged."""
    exhausted_ranks: Mapping[int, ExhaustedInput] = field(default_factory=dict)
    """By rank: those that have no batch left; of all ranks once it is exchanged."""
    accumulates_gradients: bool | None = None
    """Whether its gradients are kept for the last part of the same global batch; None: whether its backward pass runs
    in `accumulate_gradients`."""
    overlaps_gradient_dist: bool = False
    """Whether its gradients travel while the rest of the backward pass is computed, and its rows move at its end."""
    output_dist_callback: Callable[[], object] = no_op
    """Called by `finish` while its rows and bags are on their way."""
    pre_update_hook: Callable[[], object] = no_op
    """Called on several ranks when all gradients are there, before the first row moves; none does where it raises."""
    clip: Clip | None = None
    """Called in one process before the first row moves; None: gradients are taken as they are."""
    found_inf: Float[Tensor, ""] | None = None
    """On the device of the rows, float32: no row moves where it is not 0, and the host need not know. None: all
    move."""
    stage_timer: StageTimer = null_timer
    """Told of 'output_dist', 'gradient_dist' and 'table_update'."""
    out_of_range_ids: OutOfRangeIds = field(default_factory=OutOfRangeIds)
    """Counts its ids outside their table when it is finished."""
    num_out_of_range: Int[Tensor, " F"] | None = None
    """The same of this batch alone; None where its ids were refused."""
    lease: Lease | None = None
    """Rows that are lent from its lookup to the end of its backward pass."""
    embeddings: Sequence[Tensor] | None = None
    """Of each group, pooled [B_local, sum of D] and the rows of each unpooled feature, once they are here; where they
    are before `look_up`, of an earlier lookup of the same ids, it takes these."""
    group_states: tuple[GroupStateT, ...] = ()
    """What each group of features has on the way; let go with the backward pass."""
    batch_slice: BatchSlice | None = None
    """Where its samples lie in the global batch; None until it is looked up."""
    stage: BatchStage = "started"

    @property
    def batch_tag(self) -> int:
        """What ranks compare to see that they are at the same batch: its number from 1, and its step where it brought
        one, in 15 bits each."""
        return 1 + self.index % (MAX_TAGS - 1) + (0 if self.step is None else (1 + self.step) % MAX_TAGS) * MAX_TAGS

    @property
    def batch_size_per_rank(self) -> tuple[int, ...]:
        """Samples of each rank, once it is looked up."""
        return () if self.batch_slice is None else self.batch_slice.batch_size_per_rank

    def enter_stage(self, stage: BatchStage, *, after: BatchStage) -> None:
        """Go on from stage `after`; raises MesetaError, alike on all ranks that are at one place, for another one."""
        if self.stage != after:
            raise MesetaError(
                f"a batch under way is {self.stage} and cannot be {stage}, which comes once and after {after}; "
                f"{NEXT_STAGE_HINTS[self.stage]}"
            )
        self.stage = stage

    def pop_embeddings(self) -> Sequence[Tensor]:
        """Its answers, which it holds no longer."""
        assert self.embeddings is not None
        answers, self.embeddings = self.embeddings, None
        return answers

    def pop_group_states(self) -> tuple[GroupStateT, ...]:
        """Its parts, which it holds no longer."""
        parts, self.group_states = self.group_states, ()
        return parts

    @contextmanager
    def drop_on_error(self) -> Iterator[None]:
        """Whatever raises inside drops the batch."""
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Let go of all that it has."""
        self.stage, self.group_states, self.embeddings = "dropped", (), None
        self.release()

    def release(self) -> None:
        """End the lease of rows, if there is one."""
        if self.lease is not None:
            self.lease.release()
