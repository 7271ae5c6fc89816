"""Groups of features with the same batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from meseta.comm import BatchSlice, BatchTotals
from meseta.embedding.sort_ahead import SortAhead
from meseta.ops.id_policy import CheckedIds, apply_id_policy
from meseta.ops.id_policy.reference import NUM_REPORT_WORDS
from meseta.ops.step_scalars import StepScalars
from meseta.ops.step_verdict import RejectedPlace
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Float, Int
from meseta.spec import FeatureSpec, MesetaError, TableSpec
from meseta.spec.stages import StageName
from meseta.spec.transfer import EXHAUSTED, MAX_TAGS, CountsHeader
from meseta.storage import Lease


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

    def raise_rejected(self, place: RejectedPlace) -> None:
        """Raise `out_of_range_error`, unless the feature is -1."""
        if place.feature >= 0:
            raise self.out_of_range_error(*place)

    def out_of_range_error(self, feature: int, sample: int, row: int) -> MesetaError:
        """Return the error for an id that policy 'error' rejects."""
        spec = self.features[feature]
        return MesetaError(
            f"table {spec.table!r}: id {row} from feature {spec.name!r}, sample {sample}, is outside "
            f"0..{self._num_rows[feature] - 1}; "
            "set id_policy='hash' ('drop', 'clamp'), enlarge num_embeddings, or fix the data"
        )

    def divide_means(self, pooled: Tensor, lengths: Tensor) -> Tensor:
        """Divide the mean-pooled columns of `pooled` [B, sum of D] by the bag lengths [F, B] in place. Empty bags
        remain zero."""
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


RejectedId = tuple[FeatureGroup, Tensor]
"""Feature group with the `CheckedIds.report` of its ids."""


def raise_rejected_id(rejected_ids: Sequence[RejectedId]) -> None:
    """Raise the error of the first rejected id in `BatchContext.rejected_ids`. Waits for a GPU."""
    for group, report in rejected_ids:
        group.raise_rejected(RejectedPlace(*report[2:NUM_REPORT_WORDS].tolist()))


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


BatchStage = Literal["started", "exchanged", "looked up", "finished", "used", "dropped"]
StageTimer = Callable[[StageName], AbstractContextManager[None]]
"""Function that returns a context manager, which is entered during the named stage of a step."""
Clip = Callable[[Sequence[Tensor], Sequence[Tensor]], float]
"""Function that returns the factor of the row gradients of a step, given the gradients [U, D] of each shard and of each
replicated table. Collective."""
NEXT_STAGE_HINTS: dict[BatchStage, str] = {
    "started": "call input_dist next",
    "exchanged": "call lookup, then output_dist",
    "looked up": "call output_dist next",
    "finished": "run its backward pass next, or drop the batch",
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
        # The counts of a deferred check are on the host.
        self.counts = counts if self.counts is None else self.counts.to(counts.device) + counts


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
    """Gradient clipping, which requires a call of `finish_update`. `None` means no clipping."""
    deferred_update: Callable[[], object] = no_op
    defers_id_check: bool = False
    """Whether the caller raises errors for rejected ids later, by `rejected_ids`, and counts out-of-range ids then.
    Only a collection in one process defers errors. A rejected id reads row 0."""
    rejected_ids: tuple[RejectedId, ...] = ()
    found_inf: Float[Tensor, ""] | None = None
    """Device scalar (float32). If nonzero, kernels skip the row update without a host sync. `None` means always
    update."""
    scalars: StepScalars | None = None
    """Numbers of the step on a GPU. `None` passes them from the host."""
    stage_timer: StageTimer = null_timer
    """Timer of the stages 'output_dist', 'gradient_dist' and 'table_update'."""
    out_of_range_ids: OutOfRangeIds = field(default_factory=OutOfRangeIds)
    """Counter to which `output_dist` adds the out-of-range ids of this batch, unless `defers_id_check`."""
    num_out_of_range: Int[Tensor, " F"] | None = None
    """Number of out-of-range ids of this batch per feature. `None` if its ids were rejected."""
    lease: Lease | None = None
    """Rows acquired from the lookup to the end of the backward pass."""
    embeddings: Sequence[Tensor] | None = None
    """Embeddings of each group: pooled [B_local, sum of D], then one tensor of rows per unpooled feature. If they are
    set before `lookup`, from an earlier lookup of the same ids, they are used instead of a new lookup."""
    group_states: tuple[GroupStateT, ...] = ()
    """State of each feature group. Released in the backward pass."""
    sort_ahead: SortAhead | None = None
    """Sort of the ids in progress on a GPU. `None` if the update sorts them."""
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

    def finish_update(self) -> None:
        """Update the rows after the backward pass if there is a `clip`. Collective."""
        update, self.deferred_update = self.deferred_update, no_op
        update()

    def pop_sort(self) -> SortAhead | None:
        """Return the sort of the ids. The current stream waits for it."""
        sort, self.sort_ahead = self.sort_ahead, None
        if sort is not None:
            sort.wait()
        return sort

    def drop(self) -> None:
        self.stage, self.group_states, self.embeddings = "dropped", (), None
        self.pop_sort()
        self.release()

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()
