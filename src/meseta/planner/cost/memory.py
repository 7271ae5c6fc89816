"""Bytes that a rank holds in every phase of a run: the one place that turns a plan, a workload and what a run adds to
them into bytes. Searches, the check before a run, saves in the background and reports ask it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meseta.planner.cost.exchange import UNPARTITIONED, Partitioning, count_items, shard_transfer_bytes
from meseta.planner.cost.loads import ShardLoads, WorkloadLoads
from meseta.planner.cost.placement import CacheOptions, Placement
from meseta.planner.cost.reuse import Floats
from meseta.planner.cost.sizes import compute_bytes, state_bytes_per_row, value_bytes
from meseta.spec import Plan, Shard, TableSpec, Workload
from meseta.spec.checkpoint_blocks import (
    BLOCK_BYTES,
    GLOBAL_ROW_ID_BYTES,
    NUM_PARALLEL_CHAIN_READS,
    NUM_PARALLEL_READS,
    NUM_PENDING_WRITES,
    rows_per_block,
)
from meseta.spec.tiers import (
    CACHE_SLOT_OVERHEAD_BYTES,
    DISK,
    HBM,
    HOST,
    MEMORIES,
    NUM_PREFETCHED_PARTS,
    OFFLOADED_TIERS,
    ROW_INDEX_BYTES,
    TIERS,
    Memory,
    StorageOptions,
    memory_shares,
    rows_per_part,
)
from meseta.spec.transfer import FORWARDED_TRANSFERS, Transfer, step_transfers

Phase = Literal["start", "first step", "steady", "evaluation", "checkpoint"]
PHASES: tuple[Phase, ...] = ("start", "first step", "steady", "evaluation", "checkpoint")
MemoryPart = Literal["tables", "optimizer_state", "dense_part", "activations", "reading", "saving", "copies", "process"]
MEMORY_PARTS: tuple[MemoryPart, ...] = (
    "tables", "optimizer_state", "dense_part", "activations", "reading", "saving", "copies", "process",
)  # fmt: skip
"""Rows, and gradients of replicas; state of the rows; parameters, gradients and moments; a batch on its way, with the
buffers of its exchange; batches made ahead; blocks of a checkpoint on their way to files; what a save in the background
is written from; what the process takes beside."""
DENSE_COPIES = 4
"""A parameter, its gradient, and the two moments of Adam; other optimizers keep fewer."""
SORT_BYTES_PER_ID = 24
"""Scratch of an id while an update sorts it: row and position, twice, and its bag."""
MAX_FRAME_BYTES = 16384
"""What the file of a block has beside its rows, at most."""
PROCESS_OVERHEAD_BYTES = 64 << 20
"""Of a rank, beside what is counted: stacks of threads, what allocators keep, results of an evaluation; 0 to 52 MB by
/proc of runs with 1 GB of tables on one rank and on two (tests/train/test_phases.py)."""
ALLOCATOR_RETAINED_SHARE = 0.5
"""Of what a save in the background held, what allocators keep after it: 8 to 85 of 239 MB on two ranks, likewise."""

MemoryBytes = Mapping[Phase, Mapping[Memory, Floats]]
MemoryPartBytes = Mapping[Phase, Mapping[Memory, Mapping[MemoryPart, Floats]]]


NUM_ROW_SETS = 3
"""Sets of rows, one bit a row, that a delta holds: changed rows, those of the save, and what they are counted by."""


@dataclass(frozen=True, kw_only=True)
class SaveKind:
    """Properties of a run's saves that decide what they hold in memory."""

    has_deltas: bool = False
    """Whether some checkpoints hold changed rows alone, or rows in codes."""
    has_offloaded_rows: bool = False
    """Whether rows of some pieces are copied block by block, as those of 'cached' are."""
    has_disk_rows: bool = False
    """Whether rows of some pieces are read from a disk."""


@dataclass(frozen=True, kw_only=True)
class RunBytes:
    """What a run adds to a plan and a workload; the defaults are those of a workload that no run is known of."""

    dense_bytes: int | None = None
    """Of the dense part on a rank, with gradients and moments; None: every parameter DENSE_COPIES times."""
    step_bytes: int | None = None
    """Of a micro-batch of a rank forwards and backwards, bags and activations with their gradients, at its peak, and of
    bags that were looked up ahead; None: as the workload says of a sample."""
    evaluation_bytes: int | None = None
    """The same of a rank's batch in an evaluation, which has no way back."""
    eval_batch_size: int | None = None
    """Samples of an evaluation's batch, over all ranks; None: as many as a step has."""
    num_micro_batches: int = 1
    """Micro-batches that each rank takes its slice in."""
    reading_bytes: int = 0
    """Decoded windows and batches made ahead, in the host's memory of a rank."""
    process_bytes: int = 0
    """What the process takes beside, see PROCESS_OVERHEAD_BYTES."""
    has_deltas: bool = False
    """Whether checkpoints hold changed rows alone, or rows in codes."""
    saves_during_training: bool = False
    """Whether checkpoints are written while training goes on, where that takes no copy of a table."""
    saves_from_copies: bool = False
    """Whether checkpoints are written in the background, from copies that are kept: see `copy_bytes`."""
    storage: StorageOptions | None = None
    """Room for rows that lie near, where the plan does not say how many do; None: a share of them, and no run whose
    saves read rows of a disk."""


def row_and_state_bytes(table: TableSpec, shard: Shard) -> tuple[int, int]:
    """Bytes of the rows of one shard, and of their optimizer state: exact."""
    per_element, per_row = table.optimizer.num_states
    cells = shard.num_rows * shard.num_columns
    state = (per_element * cells + per_row * shard.num_rows) * compute_bytes(table)
    return cells * value_bytes(table), state


def copy_bytes(pieces: Iterable[tuple[TableSpec, Shard]]) -> int:
    """Bytes of the copy that a save in the background makes of a rank's pieces, in the memory of its host: rows and
    state of those that lie on no disk, of which it takes a frozen view."""
    return sum(sum(row_and_state_bytes(table, shard)) for table, shard in pieces if shard.tier != DISK)


def save_bytes(tables: Sequence[TableSpec], num_ranks: int, num_joined: int, kind: SaveKind | None = None) -> int:
    """Bytes that a save or a load holds at a time in the memory of a rank's host, at most: blocks that are being
    written, as they came and as they go to files, and what the rank sends in a round; or blocks that are being read.

    What travels lies first on a device that is not its host, in memory that steps keep reserved.

    Args:
        tables: all tables.
        num_ranks: that write; each has every num_ranks-th block.
        num_joined: blocks that are put together of several pieces of a table, at most.
        kind: what the save has to hold beside whole blocks of rows in memory.
    """
    kind = kind or SaveKind()
    block = ids = rest = num_blocks = parts = row_sets = 0
    for table in tables:
        record_bytes = table.embedding_dim * value_bytes(table) + state_bytes_per_row(table)
        row_bytes = GLOBAL_ROW_ID_BYTES + record_bytes
        rows = rows_per_block(row_bytes)
        held = min(rows, table.num_embeddings)
        block, ids = max(block, held * row_bytes), max(ids, held * GLOBAL_ROW_ID_BYTES)
        num_blocks += math.ceil(table.num_embeddings / rows)
        rest += table.num_embeddings % rows * row_bytes
        parts = max(parts, _file_part_bytes(table.num_embeddings, record_bytes, held * record_bytes))
        row_sets += NUM_ROW_SETS * math.ceil(table.num_embeddings / 8)
    writes = min(NUM_PENDING_WRITES, math.ceil(num_blocks / num_ranks))
    reads = min(NUM_PARALLEL_CHAIN_READS if kind.has_deltas else NUM_PARALLEL_READS, num_blocks)
    written = writes * (block + MAX_FRAME_BYTES + ids) + min(writes, num_joined) * block
    if kind.has_deltas:
        written += writes * ids + row_sets
    if kind.has_disk_rows:
        written += parts
    elif kind.has_deltas or kind.has_offloaded_rows:
        written += (writes + 1) * block  # copies of rows
    if num_ranks > 1:
        # A round has one whole block for each rank that writes, and last blocks of tables beside it.
        more = max(BLOCK_BYTES - block, 0)
        written += writes * block + min(writes * more, rest) + block + min(more, rest)
    return max(written, reads * block * (3 if kind.has_deltas else 1))


def _file_part_bytes(num_rows: int, record_bytes: int, block_bytes: int) -> int:
    """Bytes of a file's rows that are in memory while they are read in order, with the lists by which they are found:
    parts that are taken, of which blocks are being written, and that are read ahead."""
    rows = min(rows_per_part(record_bytes), num_rows)
    part = rows * record_bytes
    num_parts = NUM_PREFETCHED_PARTS + 1 + math.ceil(NUM_PENDING_WRITES * block_bytes / max(part, 1))
    lists = (NUM_PREFETCHED_PARTS + 2) * rows * 2 * GLOBAL_ROW_ID_BYTES
    return min(num_parts * part, num_rows * record_bytes) + lists


def plan_memory_bytes(
    plan: Plan, workload: Workload, per_host: int, run: RunBytes | None = None, *, is_cpu: bool = False
) -> MemoryPartBytes:
    """Bytes of every rank [R] by phase, memory and part, of a plan on hosts of `per_host` devices; see `memory`."""
    loads = WorkloadLoads(workload)
    room = CacheOptions() if run is None or run.storage is None else CacheOptions(run.storage)
    placement = Placement.from_plan(plan, loads, per_host, room)
    sharded, replicated = (loads.shard_loads(pieces) for pieces in (placement.sharded, placement.replicated))
    transfers = step_transfers(workload, plan, plan.num_ranks, per_host)
    return memory_bytes_by_part(PlanLoads(placement, sharded, replicated, loads, transfers, is_cpu), run)


@dataclass(frozen=True)
class PlanLoads:
    """A plan, and what a step under it asks of its pieces."""

    placement: Placement
    sharded: ShardLoads
    """Of the pieces with one owner."""
    replicated: ShardLoads
    """Of replicas."""
    workload_loads: WorkloadLoads
    transfers: Sequence[Transfer]
    """Of a step under the plan."""
    is_cpu: bool = False
    """Whether ranks compute in the DRAM of their hosts."""


def memory_bytes(batch: PlanLoads, run: RunBytes | None = None) -> MemoryBytes:
    """Bytes of every rank [R] by phase and memory: 'hbm' of its device, 'host' and 'disk' of its host for this rank.

    Rows, state and gradients of replicas are exact. Buffers are those of one step, at their peak: in the forward pass
    ids, answers on both sides and the bags; in the backward pass gradients on both sides beside the bags' own gradient,
    and what sorting takes. Between steps they are free again, yet devices keep them reserved. Training goes on beside a
    save in the background, whose copies are kept after it.
    """
    parts = memory_bytes_by_part(batch, run)
    zeros = np.zeros(batch.placement.num_ranks)
    return {
        phase: {held_in: sum(of_phase[held_in].values(), zeros) for held_in in MEMORIES}
        for phase, of_phase in parts.items()
    }


def memory_bytes_by_part(batch: PlanLoads, run: RunBytes | None = None) -> MemoryPartBytes:
    """As `memory`, apart by what is held."""
    run, placement, zeros = run or RunBytes(), batch.placement, np.zeros(batch.placement.num_ranks)
    parameters = batch.workload_loads.workload.dense.parameter_bytes
    dense_bytes = DENSE_COPIES * parameters if run.dense_bytes is None else run.dense_bytes
    rows, state = (_stored_bytes_by_memory(batch, what) for what in ("row_bytes", "state_bytes"))
    gradients = replica_gradient_bytes(batch.transfers, batch.replicated).sum()
    step, evaluation = _activation_bytes(batch, run)
    kind = _save_kind(batch, run)
    saving = save_bytes(batch.workload_loads.workload.tables, placement.num_ranks, _max_joined_blocks(batch), kind)
    is_beside = run.saves_from_copies or (run.saves_during_training and kind.has_disk_rows)
    copies = _copied_bytes(batch) + parameters if run.saves_from_copies else zeros

    def of(phase: Phase) -> dict[Memory, dict[MemoryPart, Floats]]:
        is_start, saves = phase == "start", phase == "checkpoint"
        trains = phase in ("first step", "steady") or (saves and is_beside)
        keeps = run.saves_from_copies and phase in ("steady", "evaluation")
        moving = step if trains else evaluation if phase == "evaluation" else zeros
        device: dict[MemoryPart, Floats] = {
            "tables": rows[HBM] + (0.0 if is_start else gradients),
            "optimizer_state": state[HBM],
            "dense_part": zeros + (min(parameters, dense_bytes) if is_start else dense_bytes),
            "activations": moving,
        }
        host: dict[MemoryPart, Floats] = {
            "tables": rows[HOST],
            "optimizer_state": state[HOST],
            "reading": zeros + run.reading_bytes,
            "process": zeros + run.process_bytes,
            "saving": zeros + (saving if saves else ALLOCATOR_RETAINED_SHARE * saving if keeps else 0),
            "copies": zeros if phase in ("start", "first step") else copies,
        }
        return {HBM: device, HOST: host, DISK: {"tables": rows[DISK], "optimizer_state": state[DISK]}}

    return {phase: of(phase) for phase in PHASES}


def received_bytes(
    transfers: Sequence[Transfer], load: ShardLoads, cut: Partitioning, num_ranks: int
) -> tuple[Floats, Floats]:
    """Bytes of each piece [n] that come in as lengths, ids and weights, and that are answered to all ranks; where a
    codec writes answers, with the numbers that they are written from. What a host hands on is counted for each piece by
    itself, so that it does not matter which pieces a host has: an upper estimate."""
    cut = _OneShardPerHost(cut)
    ids = shard_transfer_bytes(transfers, ["ids", "weights"], load, cut, num_ranks)
    answers = shard_transfer_bytes(transfers, ["embeddings"], load, cut, num_ranks)
    relayed = (
        [*FORWARDED_TRANSFERS, "embeddings inter-host"]
        if any(one.name in FORWARDED_TRANSFERS for one in transfers)
        else []
    )
    for part in (part for one in transfers if one.name in ("embeddings", *relayed) for part in one.parts):
        if not part.codec.is_lossless:
            answers = answers + load.element_bytes * count_items(part.unit, load, cut, num_ranks)
    if relayed:
        ids = ids + shard_transfer_bytes(transfers, FORWARDED_TRANSFERS, load, cut, num_ranks)
        answers = answers + shard_transfer_bytes(transfers, ["embeddings inter-host"], load, cut, num_ranks)
    return ids, answers


class _OneShardPerHost:
    """Pieces as if each were alone in its host."""

    def __init__(self, cut: Partitioning) -> None:
        self.host_row_parts, self.column_parts = np.minimum(cut.host_row_parts, 1), cut.column_parts
        self.host_column_parts = np.ones_like(cut.column_parts)


def replica_gradient_bytes(transfers: Sequence[Transfer], load: ShardLoads) -> Floats:
    """Bytes of the gradients of each replica [m], which are added over ranks."""
    counted = {part.unit for one in transfers if one.name == "replicas" for part in one.parts}
    numbers = (count_items(each, load, UNPARTITIONED, 1) for each in sorted(counted))
    return load.element_bytes * sum(numbers, np.zeros(len(load.num_ids)))


def _stored_bytes_by_memory(batch: PlanLoads, what: Literal["row_bytes", "state_bytes"]) -> dict[Memory, Floats]:
    """Rows with what is known of those that lie near, or optimizer state, by memory [R]."""
    found: dict[Memory, Floats] = {}
    for place in MEMORIES:
        sharded, replicated = (
            stored_bytes(load, place, what, is_cpu=batch.is_cpu) for load in (batch.sharded, batch.replicated)
        )
        found[place] = batch.placement.sum_by_rank(sharded) + replicated.sum()
    return found


def _save_kind(batch: PlanLoads, run: RunBytes) -> SaveKind:
    tiers = set() if run.storage is None else {TIERS[tier] for tier in np.unique(batch.sharded.tier_index)}
    return SaveKind(
        has_deltas=run.has_deltas, has_offloaded_rows=bool(tiers & set(OFFLOADED_TIERS)), has_disk_rows=DISK in tiers
    )


def _copied_bytes(batch: PlanLoads) -> Floats:
    """What a save in the background copies [R]: no rows that lie on a disk, of which it takes a frozen view."""
    sharded, replicated = (
        np.where(load.tier_index == TIERS.index(DISK), 0.0, load.stored_bytes)
        for load in (batch.sharded, batch.replicated)
    )
    return batch.placement.sum_by_rank(sharded) + replicated.sum()


def stored_bytes(
    load: ShardLoads, place: Memory, what: Literal["row_bytes", "state_bytes"] | None = None, *, is_cpu: bool
) -> Floats:
    """Bytes of each piece [n] in one memory: its rows, its optimizer state, or both (None). Rows that lie near are
    copies, and take CACHE_SLOT_OVERHEAD_BYTES more each; rows on a disk ROW_INDEX_BYTES, beside the near ones."""
    whole, near = (np.array(factors)[load.tier_index] for factors in memory_shares(is_cpu=is_cpu)[place])
    one = load.row_bytes + load.state_bytes if what is None else getattr(load, what)
    found: Floats = (whole * load.num_rows + near * load.cache_rows) * one
    if what != "state_bytes":
        index = np.where(load.tier_index == TIERS.index(DISK), ROW_INDEX_BYTES * load.num_rows, 0.0)
        found = found + near * (CACHE_SLOT_OVERHEAD_BYTES * load.cache_rows + index)
    return found


def _max_joined_blocks(batch: PlanLoads) -> int:
    """Where rows alone are cut, blocks on the borders of pieces are joined; where columns are, all are."""
    if (batch.placement.column_parts > 1).any():
        return NUM_PENDING_WRITES
    return batch.placement.num_ranks - 1 if (batch.placement.row_parts > 1).any() else 0


def _activation_bytes(batch: PlanLoads, run: RunBytes) -> tuple[Floats, Floats]:
    """Peak bytes of a batch on its way [R]: of a step, and of an evaluation."""
    loads, ranks = batch.workload_loads, batch.placement.num_ranks
    whole = loads.workload.batch_size
    samples, scored = whole / ranks, (run.eval_batch_size or whole) / ranks
    part, bag_bytes = samples / run.num_micro_batches, bag_bytes_per_sample(loads)
    activation_bytes = loads.workload.dense.activation_bytes_per_sample
    forward, backward = _exchange_buffer_bytes(batch)
    step = backward / run.num_micro_batches + (2 * bag_bytes + activation_bytes) * part
    if run.step_bytes is not None:
        step = backward / run.num_micro_batches + run.step_bytes
    if run.num_micro_batches > 1:  # gradients of bags, and ids, which parts of a batch keep until the step
        step = step + samples * (bag_bytes + 8 * loads.ids_per_sample.sum())
    evaluation = forward * (scored / samples) + (bag_bytes + activation_bytes / 2) * scored
    if run.evaluation_bytes is not None:
        evaluation = forward * (scored / samples) + run.evaluation_bytes
    return step, evaluation


def id_bytes_per_sample(loads: WorkloadLoads) -> float:
    """Bytes of the ids of a sample, and of how many each feature has."""
    return float(8 * (loads.ids_per_sample.sum() + loads.num_features.sum()))


def bag_bytes_per_sample(loads: WorkloadLoads) -> float:
    """Bytes of the bags of a sample."""
    return float((loads.dims * loads.num_pooled).sum() * loads.element_bytes)


def _exchange_buffer_bytes(batch: PlanLoads) -> tuple[Floats, Floats]:
    """Peak bytes of a step's exchange without its bags, in the forward and in the backward pass [R]."""
    placement, sharded, replicated = batch.placement, batch.sharded, batch.replicated
    ranks = placement.num_ranks
    wire, answered = received_bytes(batch.transfers, sharded, placement, ranks)
    # Ids of this rank's samples as they came, and for every owner; ids and offsets that it owns, as received, sorted.
    ids = id_bytes_per_sample(batch.workload_loads) * batch.workload_loads.workload.batch_size / ranks + np.zeros(ranks)
    sorting = placement.sum_by_rank(SORT_BYTES_PER_ID * sharded.num_ids)
    if ranks == 1:
        return ids, ids + sorting
    sent = wire.sum() / ranks
    ids = ids + sent + placement.sum_by_rank(2 * wire + 8 * sharded.num_lengths)
    answers = placement.sum_by_rank(answered) + answered.sum() / ranks
    return ids + answers, ids + answers + sorting + SORT_BYTES_PER_ID * replicated.num_ids.sum() / ranks


def fixed_bytes(loads: WorkloadLoads, ranks: int, run: RunBytes) -> tuple[int, int]:
    """What every rank holds beside pieces of tables and what their exchange takes, wherever they lie: bytes of its
    device, and of its host's memory. The closed form of `memory`, for searches."""
    dense = loads.workload.dense
    dense_bytes = DENSE_COPIES * dense.parameter_bytes if run.dense_bytes is None else run.dense_bytes
    samples = loads.workload.batch_size / ranks
    moving = (2 * bag_bytes_per_sample(loads) + dense.activation_bytes_per_sample) * samples / run.num_micro_batches
    if run.step_bytes is not None:
        moving = run.step_bytes
    if run.num_micro_batches > 1:
        moving += samples * (bag_bytes_per_sample(loads) + 8 * loads.ids_per_sample.sum())
    moving += id_bytes_per_sample(loads) * samples / run.num_micro_batches
    joined = NUM_PENDING_WRITES if ranks > 1 else 0
    may_use_disk = run.storage is not None and run.storage.dir is not None
    kind = SaveKind(has_deltas=run.has_deltas, has_offloaded_rows=may_use_disk, has_disk_rows=may_use_disk)
    saving = save_bytes(loads.workload.tables, ranks, joined, kind)
    copied = dense.parameter_bytes if run.saves_from_copies else 0
    return int(moving) + dense_bytes, saving + run.reading_bytes + run.process_bytes + copied
