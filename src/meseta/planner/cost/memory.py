"""Predicted memory of each rank in each phase of a run. Arrays of shape [R] have one entry per rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meseta.planner.cost.exchange import UNPARTITIONED, Partitioning, count_items, shard_transfer_bytes
from meseta.planner.cost.loads import ShardLoads, WorkloadLoads, compute_bytes, state_bytes_per_row, value_bytes
from meseta.planner.cost.placement import CacheOptions, Placement
from meseta.planner.cost.reuse import Floats
from meseta.spec import Plan, Shard, TableSpec, Workload
from meseta.spec.average import MAX_GATHERED_ROWS
from meseta.spec.shards import (
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
# tables            rows, and gradients of replicas
# optimizer_state   optimizer states of rows
# dense_part        dense parameters, their gradients and moments
# activations       batches in flight, with exchange buffers
# reading           decoded windows and batches that are read ahead, and rows of a baseline
# saving            checkpoint blocks on their way to files
# copies            copies from which background saves write
# process           all other memory of the process
MEMORY_PARTS: tuple[MemoryPart, ...] = (
    "tables", "optimizer_state", "dense_part", "activations", "reading", "saving", "copies", "process",
)  # fmt: skip
DENSE_COPIES = 4
"""Number of copies of each dense parameter: parameter, gradient and the two moments of Adam. Other optimizers need
fewer."""
# While an update sorts ids: row and position, twice, and the bag.
SORT_BYTES_PER_ID = 24
MAX_FRAME_BYTES = 16384
"""Maximum number of bytes in a block's file in addition to its rows."""
# Runs with 1 GB of tables on one and two ranks used 0 to 52 MB according to /proc (tests/train/test_phases.py).
PROCESS_OVERHEAD_BYTES = 64 << 20
"""Memory of thread stacks, evaluation results, and free blocks that allocators retain."""
# Measured in the same runs: 8 to 85 of 239 MB on two ranks.
ALLOCATOR_RETAINED_SHARE = 0.5
"""Share of a background save's memory that allocators retain after the save."""

MemoryBytes = Mapping[Phase, Mapping[Memory, Floats]]
MemoryPartBytes = Mapping[Phase, Mapping[Memory, Mapping[MemoryPart, Floats]]]


# Changed rows, rows of the save, and a set for counting them.
NUM_ROW_SETS = 3
"""Number of row sets, with one bit per row, in memory during a delta checkpoint."""


@dataclass(frozen=True, kw_only=True)
class SaveKind:
    """Properties of saves that determine their memory."""

    has_deltas: bool = False
    """Whether some checkpoints are delta checkpoints, or store encoded rows."""
    has_offloaded_rows: bool = False
    """Whether the rows of some shards are copied block by block, as in tier `cached`."""
    has_disk_rows: bool = False
    """Whether the rows of some shards are read from a disk."""


@dataclass(frozen=True, kw_only=True)
class RunBytes:
    """Memory of a run in addition to its plan and workload. The defaults apply to a workload without a run."""

    dense_bytes: int | None = None
    """Bytes of the dense part on each rank, including gradients and moments. `None` assumes `DENSE_COPIES` copies of
    each parameter."""
    step_bytes: int | None = None
    """Peak bytes of a rank's micro-batch: bags, activations, their gradients, and prefetched embeddings. `None` derives
    them from the workload."""
    evaluation_bytes: int | None = None
    """Peak bytes of a rank's batch during evaluation, which has no backward pass. `None` derives them from the
    workload."""
    eval_batch_size: int | None = None
    """Number of samples in an evaluation batch, over all ranks. `None` means the batch size of training."""
    num_micro_batches: int = 1
    reading_bytes: int = 0
    """Host memory of each rank for decoded windows and batches that are read ahead."""
    baseline_bytes: int = 0
    """Host memory of rank 0 while a baseline is fitted after training."""
    process_bytes: int = 0
    """Other memory of each rank, see `PROCESS_OVERHEAD_BYTES`."""
    has_deltas: bool = False
    """Whether checkpoints are delta checkpoints, or store encoded rows."""
    saves_during_training: bool = False
    """Whether checkpoints are written in the background if that needs no copy of a table."""
    saves_from_copies: bool = False
    """Whether background saves copy the tables, see `copy_bytes`. The copies are kept."""
    storage: StorageOptions | None = None
    """Sizes of row caches for which the plan has no `cache_rows`. `None` assumes a default share of the rows, and saves
    without disk reads."""


def row_and_state_bytes(table: TableSpec, shard: Shard) -> tuple[int, int]:
    """Return the exact bytes of the rows of a shard, and of their optimizer states."""
    per_element, per_row = table.num_states
    cells = shard.num_rows * shard.num_columns
    state = (per_element * cells + per_row * shard.num_rows) * compute_bytes(table)
    return cells * value_bytes(table), state


def copy_bytes(pieces: Iterable[tuple[TableSpec, Shard]]) -> int:
    """Return the bytes of a rank's shards that a background save copies to host memory. Not those on a disk."""
    # A save reads a frozen view of row files.
    return sum(sum(row_and_state_bytes(table, shard)) for table, shard in pieces if shard.tier != DISK)


def save_bytes(tables: Sequence[TableSpec], num_ranks: int, num_joined: int, kind: SaveKind | None = None) -> int:
    """Return the maximum host memory of a rank for blocks of checkpoints during a save or load.

    Args:
        tables: All tables.
        num_ranks: Number of ranks. Each writes every `num_ranks`-th block.
        num_joined: Maximum number of blocks that are assembled from several shards.
        kind: Properties of the saves. `None` means full checkpoints of rows in memory.
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
    # On a GPU, exchanged data is first in device memory that steps keep reserved.
    written = writes * (block + MAX_FRAME_BYTES + ids) + min(writes, num_joined) * block
    if kind.has_deltas:
        written += writes * ids + row_sets
    if kind.has_disk_rows:
        written += parts
    elif kind.has_deltas or kind.has_offloaded_rows:
        written += (writes + 1) * block  # Rows are copied before they are written.
    if num_ranks > 1:
        # An exchange round has one full block per writing rank, and smaller last blocks of tables.
        more = max(BLOCK_BYTES - block, 0)
        written += writes * block + min(writes * more, rest) + block + min(more, rest)
    return max(written, reads * block * (3 if kind.has_deltas else 1))


def _file_part_bytes(num_rows: int, record_bytes: int, block_bytes: int) -> int:
    """Return the memory to read a row file sequentially: parts being written and read ahead, and lists of row
    positions."""
    rows = min(rows_per_part(record_bytes), num_rows)
    part = rows * record_bytes
    num_parts = NUM_PREFETCHED_PARTS + 1 + math.ceil(NUM_PENDING_WRITES * block_bytes / max(part, 1))
    lists = (NUM_PREFETCHED_PARTS + 2) * rows * 2 * GLOBAL_ROW_ID_BYTES
    return min(num_parts * part, num_rows * record_bytes) + lists


def plan_memory_bytes(
    plan: Plan, workload: Workload, per_host: int, run: RunBytes | None = None, *, is_cpu: bool = False
) -> MemoryPartBytes:
    """Return the bytes of each rank [R] by phase, memory and use, on hosts of `per_host` ranks. See `memory_bytes`."""
    loads = WorkloadLoads(workload)
    room = CacheOptions() if run is None or run.storage is None else CacheOptions(run.storage)
    placement = Placement.from_plan(plan, loads, per_host, room)
    sharded, replicated = (loads.shard_loads(pieces) for pieces in (placement.sharded, placement.replicated))
    transfers = step_transfers(workload, plan, plan.num_ranks, per_host)
    return memory_bytes_by_part(PlanLoads(placement, sharded, replicated, loads, transfers, is_cpu), run)


@dataclass(frozen=True)
class PlanLoads:
    """Plan with the loads of its shards in one step."""

    placement: Placement
    sharded: ShardLoads
    replicated: ShardLoads
    workload_loads: WorkloadLoads
    transfers: Sequence[Transfer]
    is_cpu: bool = False
    """Whether ranks compute in host DRAM."""


def memory_bytes(batch: PlanLoads, run: RunBytes | None = None) -> MemoryBytes:
    """Return the bytes of each rank [R] by phase and memory.

    Rows, states and gradients of replicas are exact. Buffers are the peak of one step, and remain reserved between
    steps. Training continues during a background save.
    """
    parts = memory_bytes_by_part(batch, run)
    zeros = np.zeros(batch.placement.num_ranks)
    return {
        phase: {held_in: sum(of_phase[held_in].values(), zeros) for held_in in MEMORIES}
        for phase, of_phase in parts.items()
    }


def memory_bytes_by_part(batch: PlanLoads, run: RunBytes | None = None) -> MemoryPartBytes:
    """Return the bytes of each rank [R] by phase, memory and use. See `memory_bytes`."""
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

    baseline = run.baseline_bytes * (np.arange(placement.num_ranks) == 0)

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
            "reading": zeros + run.reading_bytes + (phase == "evaluation") * baseline,
            "process": zeros + run.process_bytes,
            "saving": zeros + (saving if saves else ALLOCATOR_RETAINED_SHARE * saving if keeps else 0),
            "copies": zeros if phase in ("start", "first step") else copies,
        }
        return {HBM: device, HOST: host, DISK: {"tables": rows[DISK], "optimizer_state": state[DISK]}}

    return {phase: of(phase) for phase in PHASES}


def received_bytes(
    transfers: Sequence[Transfer], load: ShardLoads, cut: Partitioning, num_ranks: int
) -> tuple[Floats, Floats]:
    """Return (input, output) bytes of each shard [n]: received lengths, ids and weights, and embeddings sent to all
    ranks.

    With a codec, the output includes the unencoded elements. With a hierarchical exchange, the result is an upper bound
    that does not depend on other shards of the host.
    """
    # Forwarded data is counted for each shard separately.
    cut = _OneShardPerHost(cut)
    ids = shard_transfer_bytes(transfers, ["ids", "weights"], load, cut, num_ranks)
    outputs = shard_transfer_bytes(transfers, ["embeddings"], load, cut, num_ranks)
    relayed = (
        [*FORWARDED_TRANSFERS, "embeddings inter-host"]
        if any(one.name in FORWARDED_TRANSFERS for one in transfers)
        else []
    )
    for part in (part for one in transfers if one.name in ("embeddings", *relayed) for part in one.parts):
        if not part.codec.is_lossless:
            outputs = outputs + load.element_bytes * count_items(part.unit, load, cut, num_ranks)
    if relayed:
        ids = ids + shard_transfer_bytes(transfers, FORWARDED_TRANSFERS, load, cut, num_ranks)
        outputs = outputs + shard_transfer_bytes(transfers, ["embeddings inter-host"], load, cut, num_ranks)
    return ids, outputs


class _OneShardPerHost:
    """Partitioning in which each shard is the only one of its table on its host."""

    def __init__(self, cut: Partitioning) -> None:
        self.host_row_parts, self.column_parts = np.minimum(cut.host_row_parts, 1), cut.column_parts
        self.host_column_parts = np.ones_like(cut.column_parts)


def replica_gradient_bytes(transfers: Sequence[Transfer], load: ShardLoads) -> Floats:
    """Return the bytes of the gradients of each replicated shard [m]."""
    counted = {part.unit for one in transfers if one.name == "replicas" for part in one.parts}
    numbers = (count_items(each, load, UNPARTITIONED, 1) for each in sorted(counted))
    return load.element_bytes * sum(numbers, np.zeros(len(load.num_ids)))


def row_gradient_bytes(workload: Workload, load: ShardLoads) -> Floats:
    """Return the bytes of the row gradients of each shard [n], which are kept for one norm of all gradients.

    They are 0 without such a norm, because updates then sum the gradients of one row at a time.
    """
    # The sums of rows have buffers with a row for each id.
    rows = np.where(load.is_frozen, 0.0, np.maximum(load.num_ids, load.num_distinct_rows))
    num_bytes: Floats = rows * (load.num_columns * load.element_bytes + GLOBAL_ROW_ID_BYTES)
    return num_bytes * workload.dense_exchange.clips_rows


def _stored_bytes_by_memory(batch: PlanLoads, what: Literal["row_bytes", "state_bytes"]) -> dict[Memory, Floats]:
    """Return the bytes of each rank [R] in each memory, for rows with their cache metadata, or for optimizer states."""
    bytes_by_memory: dict[Memory, Floats] = {}
    for place in MEMORIES:
        sharded, replicated = (
            stored_bytes(load, place, what, is_cpu=batch.is_cpu) for load in (batch.sharded, batch.replicated)
        )
        bytes_by_memory[place] = batch.placement.sum_by_rank(sharded) + replicated.sum()
    return bytes_by_memory


def _save_kind(batch: PlanLoads, run: RunBytes) -> SaveKind:
    tiers = set() if run.storage is None else {TIERS[tier] for tier in np.unique(batch.sharded.tier_index)}
    return SaveKind(
        has_deltas=run.has_deltas, has_offloaded_rows=bool(tiers & set(OFFLOADED_TIERS)), has_disk_rows=DISK in tiers
    )


def _copied_bytes(batch: PlanLoads) -> Floats:
    sharded, replicated = (
        np.where(load.tier_index == TIERS.index(DISK), 0.0, load.stored_bytes)
        for load in (batch.sharded, batch.replicated)
    )
    return batch.placement.sum_by_rank(sharded) + replicated.sum()


def stored_bytes(
    load: ShardLoads, place: Memory, what: Literal["row_bytes", "state_bytes"] | None = None, *, is_cpu: bool
) -> Floats:
    """Return the bytes of each shard [n] in one memory. `what` selects its rows or optimizer states, and `None` means
    both. Rows include the metadata of their cache and row file."""
    whole, near = (np.array(factors)[load.tier_index] for factors in memory_shares(is_cpu=is_cpu)[place])
    one = load.row_bytes + load.state_bytes if what is None else getattr(load, what)
    num_bytes: Floats = (whole * load.num_rows + near * load.cache_rows) * one
    if what != "state_bytes":
        index = np.where(load.tier_index == TIERS.index(DISK), ROW_INDEX_BYTES * load.num_rows, 0.0)
        num_bytes = num_bytes + near * (CACHE_SLOT_OVERHEAD_BYTES * load.cache_rows + index)
    return num_bytes


def _max_joined_blocks(batch: PlanLoads) -> int:
    # Row sharding splits only the blocks at the borders of shards. Column sharding splits all blocks.
    if (batch.placement.column_parts > 1).any():
        return NUM_PENDING_WRITES
    return batch.placement.num_ranks - 1 if (batch.placement.row_parts > 1).any() else 0


def _activation_bytes(batch: PlanLoads, run: RunBytes) -> tuple[Floats, Floats]:
    """Return the peak bytes of a batch on each rank [R], as (training step, evaluation)."""
    loads, ranks = batch.workload_loads, batch.placement.num_ranks
    whole = loads.workload.batch_size
    samples, scored = whole / ranks, (run.eval_batch_size or whole) / ranks
    part, bag_bytes = samples / run.num_micro_batches, bag_bytes_per_sample(loads)
    activation_bytes = loads.workload.dense.activation_bytes_per_sample
    forward, backward = _exchange_buffer_bytes(batch)
    step = backward / run.num_micro_batches + (2 * bag_bytes + activation_bytes) * part
    if run.step_bytes is not None:
        step = backward / run.num_micro_batches + run.step_bytes
    if run.num_micro_batches > 1:  # Micro-batches keep gradients of bags, and ids, until the update.
        step = step + samples * (bag_bytes + 8 * loads.ids_per_sample.sum())
    step = step + batch.placement.sum_by_rank(row_gradient_bytes(loads.workload, batch.sharded))
    evaluation = forward * (scored / samples) + (bag_bytes + activation_bytes / 2) * scored
    if run.evaluation_bytes is not None:
        evaluation = forward * (scored / samples) + run.evaluation_bytes
    if any(table.average is not None for table in loads.workload.tables):
        evaluation = evaluation + _averaged_row_bytes(batch) * (scored / samples)
        # Rows, lags and products of one part.
        evaluation = evaluation + 3 * MAX_GATHERED_ROWS * loads.dims.max() * loads.element_bytes
    return step, evaluation


def _averaged_row_bytes(batch: PlanLoads) -> Floats:
    """Return the bytes of the averages and ids that each rank [R] looks up for a training batch."""
    sharded, replicated = (
        load.num_ids * (load.num_columns * load.element_bytes + 8) for load in (batch.sharded, batch.replicated)
    )
    return batch.placement.sum_by_rank(sharded) + replicated.sum() / batch.placement.num_ranks


def id_bytes_per_sample(loads: WorkloadLoads) -> float:
    """Return the bytes of the ids and lengths of a sample."""
    return float(8 * (loads.ids_per_sample.sum() + loads.num_features.sum()))


def bag_bytes_per_sample(loads: WorkloadLoads) -> float:
    """Return the bytes of the pooled embeddings of a sample."""
    return float((loads.dims * loads.num_pooled).sum() * loads.element_bytes)


def _exchange_buffer_bytes(batch: PlanLoads) -> tuple[Floats, Floats]:
    """Return the peak bytes of exchange buffers on each rank [R] without bags, as (forward pass, backward pass)."""
    placement, sharded, replicated = batch.placement, batch.sharded, batch.replicated
    ranks = placement.num_ranks
    received, output_bytes = received_bytes(batch.transfers, sharded, placement, ranks)
    # Ids of this rank's samples, as read and sorted by owner. Ids and offsets of owned rows, as received and sorted.
    ids = id_bytes_per_sample(batch.workload_loads) * batch.workload_loads.workload.batch_size / ranks + np.zeros(ranks)
    sorting = placement.sum_by_rank(SORT_BYTES_PER_ID * sharded.num_ids)
    if ranks == 1:
        return ids, ids + sorting
    sent = received.sum() / ranks
    ids = ids + sent + placement.sum_by_rank(2 * received + 8 * sharded.num_lengths)
    outputs = placement.sum_by_rank(output_bytes) + output_bytes.sum() / ranks
    return ids + outputs, ids + outputs + sorting + SORT_BYTES_PER_ID * replicated.num_ids.sum() / ranks


def fixed_bytes(loads: WorkloadLoads, ranks: int, run: RunBytes) -> tuple[int, int]:
    """Return the bytes of each rank that do not depend on the placement of tables, as (device, host). Searches use them
    instead of `memory_bytes`."""
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
