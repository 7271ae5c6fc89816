"""State of a batch in flight, from its ids to the update of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from meseta.comm import BatchSlice, BatchTotals
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError
from meseta.spec.stages import StageName
from meseta.spec.transfer import EXHAUSTED, MAX_TAGS, CountsHeader
from meseta.storage import Lease

BatchStage = Literal["started", "exchanged", "looked up", "finished", "used", "dropped"]
StageTimer = Callable[[StageName], AbstractContextManager[None]]
"""Function that returns a context manager, which is entered during the named stage of a step."""
Clip = Callable[[Sequence[Tensor]], float]
"""Function that returns the factor of all row gradients of a step, given the gradients [U, D] of each table."""
NEXT_STAGE_HINTS: dict[BatchStage, str] = {
    "started": "exchange it next",
    "exchanged": "finish it next",
    "looked up": "finish it next",
    "finished": "run its backward pass next, or leave it",
    "used": "start another of the same ids",
    "dropped": "its error was raised: start another",
}
"""Remedy in error messages, by the current stage."""


def null_timer(stage: StageName) -> AbstractContextManager[None]:
    """Return a context manager that measures nothing."""
    return nullcontext()


def no_op() -> None:
    """Do nothing."""


class OutOfRangeIds:
    """Counter of out-of-range ids, which id policies drop, clamp or hash."""

    def __init__(self) -> None:
        self.counts: Int[Tensor, " F"] | None = None
        """Number of ids per feature, or `None` before the first batch."""

    def add(self, counts: Int[Tensor, " F"]) -> None:
        self.counts = counts if self.counts is None else self.counts + counts


UNEVEN_POLICIES = ("error", "join", "drop")
"""Policies for a loop in which some ranks have batches left. `error` ends the loop with an error. `join` continues
without samples of exhausted ranks. `drop` ends the loop on all ranks."""


@dataclass(frozen=True)
class ExhaustedInput:
    """Placeholder for the ids of a rank without batches, which takes part in exchanges without samples."""

    # The header of the counts informs the other ranks.

    num_batches: int
    policy: str

    def to_header(self, device: torch.device) -> Int[Tensor, " 3"]:
        """Return the fields (feature, sample, id) of the `CountsHeader`."""
        return torch.tensor([EXHAUSTED, UNEVEN_POLICIES.index(self.policy), self.num_batches], device=device)

    @staticmethod
    def from_headers(headers: Sequence[CountsHeader]) -> dict[int, ExhaustedInput]:
        return {
            rank: ExhaustedInput(header.id, UNEVEN_POLICIES[header.sample])
            for rank, header in enumerate(headers)
            if header.feature == EXHAUSTED
        }


GroupStateT = TypeVar("GroupStateT")


@dataclass(eq=False, kw_only=True)
class BatchContext(Generic[GroupStateT]):
    """Batch in flight through a collection, created by `start_input_dist`.

    Several batches may be in flight if all ranks run the stages of all batches in the same order. A batch with invalid
    ids on any rank is dropped.
    """

    # start_input_dist   input_dist     lookup         output_dist       backward
    # counts ----------> ids ---------> rows --------> embeddings -----> gradients, update
    #          "started"    "exchanged"   "looked up"     "finished"       "used"

    index: int = 0
    """Number of batches that the collection started before this one."""
    lr_factor: float | None = None
    """Factor of the learning rates of all tables. `None` means that of the collection at the update."""
    step: int | None = None
    """Number of steps before this batch. `None` means that of the collection at the lookup."""
    local_totals: BatchTotals | None = None
    """Totals of this rank's samples in the global batch. `None` means the samples of this batch, with weight 1."""
    slice_offset: int = 0
    """Index of the first sample of this micro-batch within the rank's slice."""
    global_totals: BatchTotals | None = None
    """Totals of the global batch. `None` before `input_dist`."""
    exhausted_ranks: Mapping[int, ExhaustedInput] = field(default_factory=dict)
    """Ranks without batches, all known after `input_dist`."""
    accumulates_gradients: bool | None = None
    """Whether gradients are kept for the last micro-batch. `None` means whether the backward pass runs in
    `accumulate_gradients`."""
    overlaps_gradient_dist: bool = False
    """Whether gradients are sent during the rest of the backward pass. Rows are then updated at its end."""
    output_dist_callback: Callable[[], object] = no_op
    """Function that `output_dist` calls while embeddings are in flight."""
    pre_update_hook: Callable[[], object] = no_op
    """Function that is called on several ranks between the arrival of all gradients and the update. If it raises an
    error, no row is updated."""
    clip: Clip | None = None
    """Gradient clipping in one process. `None` means no clipping."""
    found_inf: Float[Tensor, ""] | None = None
    """Device scalar (float32). If nonzero, kernels skip the row update without a host sync. `None` means always
    update."""
    stage_timer: StageTimer = null_timer
    """Timer of the stages 'output_dist', 'gradient_dist' and 'table_update'."""
    out_of_range_ids: OutOfRangeIds = field(default_factory=OutOfRangeIds)
    """Counter to which `output_dist` adds the out-of-range ids of this batch."""
    num_out_of_range: Int[Tensor, " F"] | None = None
    """Number of out-of-range ids of this batch per feature. `None` if its ids were rejected."""
    lease: Lease | None = None
    """Rows acquired from the lookup to the end of the backward pass."""
    embeddings: Sequence[Tensor] | None = None
    """Embeddings of each group: pooled [B_local, sum of D], then one tensor of rows per unpooled feature. If they are
    set before `lookup`, from an earlier lookup of the same ids, they are used instead of a new lookup."""
    group_states: tuple[GroupStateT, ...] = ()
    """State of each feature group. Released in the backward pass."""
    batch_slice: BatchSlice | None = None
    """Slice of this rank in the global batch. `None` before the lookup."""
    stage: BatchStage = "started"

    @property
    def batch_tag(self) -> int:
        """Tag that ranks compare to detect different batches. It combines the batch number, counted from 1, with the
        step if that was passed. Both have 15 bits."""
        return 1 + self.index % (MAX_TAGS - 1) + (0 if self.step is None else (1 + self.step) % MAX_TAGS) * MAX_TAGS

    @property
    def batch_size_per_rank(self) -> tuple[int, ...]:
        """Number of samples of each rank. Empty before the lookup."""
        return () if self.batch_slice is None else self.batch_slice.batch_size_per_rank

    def enter_stage(self, stage: BatchStage, *, after: BatchStage) -> None:
        """Enter `stage`. Raises MesetaError if the batch is not in stage `after`, on all ranks that are in the same
        stage."""
        if self.stage != after:
            raise MesetaError(
                f"a batch in stage '{self.stage}' cannot enter stage '{stage}', which follows stage '{after}'; "
                f"{NEXT_STAGE_HINTS[self.stage]}"
            )
        self.stage = stage

    def pop_embeddings(self) -> Sequence[Tensor]:
        assert self.embeddings is not None
        embeddings, self.embeddings = self.embeddings, None
        return embeddings

    def pop_group_states(self) -> tuple[GroupStateT, ...]:
        parts, self.group_states = self.group_states, ()
        return parts

    @contextmanager
    def drop_on_error(self) -> Iterator[None]:
        """Context manager that drops the batch if an error is raised."""
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        self.stage, self.group_states, self.embeddings = "dropped", (), None
        self.release()

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()
