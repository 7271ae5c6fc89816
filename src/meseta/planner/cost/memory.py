"""Bytes that a rank holds in every phase of a run: the one place that turns a plan, a workload and what a run adds to
them into bytes. Searches, the check before a run, saves in the background and reports ask it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meseta.planner.cost.exchange import NOT_CUT, Cut, counts_of, piece_bytes
from meseta.planner.cost.loads import Loads, WorkloadLoads
from meseta.planner.cost.placement import Placement, Room
from meseta.planner.cost.reuse import Floats
from meseta.planner.cost.sizes import compute_bytes, state_bytes_per_row, value_bytes
from meseta.spec import Plan, Shard, TableSpec, Workload
from meseta.spec.blocks import BLOCK_BYTES, CHAIN_READERS, ID_BYTES, READERS, WRITES_IN_FLIGHT, block_rows
from meseta.spec.tiers import (
    DISK,
    FAR_TIERS,
    HBM,
    HOST,
    INDEX_BYTES,
    MEMORIES,
    PARTS_AHEAD,
    SLOT_BYTES,
    TIERS,
    Memory,
    StorageOptions,
    held_in,
    part_rows,
)
from meseta.spec.transfer import HANDED_ON, Transfer, step_transfers

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
SORT_BYTES = 24
"""Scratch of an id while an update sorts it: row and position, twice, and its bag."""
FRAME_BYTES = 16384
"""What the file of a block has beside its rows, at most."""
PROCESS_BYTES = 64 << 20
"""Of a rank, beside what is counted: stacks of threads, what allocators keep, results of an evaluation; 0 to 52 MB by
/proc of runs with 1 GB of tables on one rank and on two (tests/train/test_phases.py)."""
KEPT_SHARE = 0.5
"""Of what a save in the background held, what allocators keep after it: 8 to 85 of 239 MB on two ranks, likewise."""

Bytes = Mapping[Phase, Mapping[Memory, Floats]]
PartBytes = Mapping[Phase, Mapping[Memory, Mapping[MemoryPart, Floats]]]


ROW_SETS = 3
"""Sets of rows, one bit a row, that a delta holds: changed rows, those of the save, and what they are counted by."""


@dataclass(frozen=True, kw_only=True)
class SaveKind:
    """Properties of a run's saves that decide what they hold in memory."""

    deltas: bool = False
    """Whether some checkpoints hold changed rows alone, or rows in codes."""
    is_far: bool = False
    """Whether rows of some pieces are copied block by block, as those of 'cached' are."""
    on_disk: bool = False
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
    num_parts: int = 1
    """Micro-batches that each rank takes its slice in."""
    reading_bytes: int = 0
    """Decoded windows and batches made ahead, in the host's memory of a rank."""
    process_bytes: int = 0
    """What the process takes beside, see PROCESS_BYTES."""
    deltas: bool = False
    """Whether checkpoints hold changed rows alone, or rows in codes."""
    saves_beside: bool = False
    """Whether checkpoints are written while training goes on, where that takes no copy of a table."""
    copies: bool = False
    """Whether checkpoints are written in the background, from copies that are kept: see `copy_bytes`."""
    storage: StorageOptions | None = None
    """Room for rows that lie near, where the plan does not say how many do; None: a share of them, and no run whose
    saves read rows of a disk."""


def rows_and_state(table: TableSpec, shard: Shard) -> tuple[int, int]:
    """Bytes of the rows of one shard, and of their optimizer state: exact."""
    per_element, per_row = table.optimizer.num_states
    cells = shard.num_rows * shard.num_columns
    state = (per_element * cells + per_row * shard.num_rows) * compute_bytes(table)
    return cells * value_bytes(table), state


def copy_bytes(pieces: Iterable[tuple[TableSpec, Shard]]) -> int:
    """Bytes of the copy that a save in the background makes of a rank's pieces, in the memory of its host: rows and
    state of those that lie on no disk, of which it takes a frozen view."""
    return sum(sum(rows_and_state(table, shard)) for table, shard in pieces if shard.tier != DISK)


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
        row_bytes = ID_BYTES + record_bytes
        rows = block_rows(row_bytes)
        held = min(rows, table.num_embeddings)
        block, ids = max(block, held * row_bytes), max(ids, held * ID_BYTES)
        num_blocks += math.ceil(table.num_embeddings / rows)
        rest += table.num_embeddings % rows * row_bytes
        parts = max(parts, _parts_bytes(table.num_embeddings, record_bytes, held * record_bytes))
        row_sets += ROW_SETS * math.ceil(table.num_embeddings / 8)
    writes = min(WRITES_IN_FLIGHT, math.ceil(num_blocks / num_ranks))
    reads = min(CHAIN_READERS if kind.deltas else READERS, num_blocks)
    written = writes * (block + FRAME_BYTES + ids) + min(writes, num_joined) * block
    if kind.deltas:
        written += writes * ids + row_sets
    if kind.on_disk:
        written += parts
    elif kind.deltas or kind.is_far:
        written += (writes + 1) * block  # copies of rows
    if num_ranks > 1:
        # A round has one whole block for each rank that writes, and last blocks of tables beside it.
        more = max(BLOCK_BYTES - block, 0)
        written += writes * block + min(writes * more, rest) + block + min(more, rest)
    return max(written, reads * block * (3 if kind.deltas else 1))


def _parts_bytes(num_rows: int, record_bytes: int, block_bytes: int) -> int:
    """Bytes of a file's rows that are in memory while they are read in order, with the lists by which they are found:
    parts that are taken, of which blocks are being written, and that are read ahead."""
    rows = min(part_rows(record_bytes), num_rows)
    part = rows * record_bytes
    num_parts = PARTS_AHEAD + 1 + math.ceil(WRITES_IN_FLIGHT * block_bytes / max(part, 1))
    lists = (PARTS_AHEAD + 2) * rows * 2 * ID_BYTES
    return min(num_parts * part, num_rows * record_bytes) + lists


def plan_memory(
    plan: Plan, workload: Workload, per_host: int, run: RunBytes | None = None, *, is_cpu: bool = False
) -> PartBytes:
    """Bytes of every rank [R] by phase, memory and part, of a plan on hosts of `per_host` devices; see `memory`."""
    loads = WorkloadLoads(workload)
    room = Room() if run is None or run.storage is None else Room(run.storage)
    placement = Placement.of(plan, loads, per_host, room)
    sharded, replicated = (loads.loads(pieces) for pieces in (placement.sharded, placement.replicated))
    transfers = step_transfers(workload, plan, plan.num_ranks, per_host)
    return memory_parts(BatchLoads(placement, sharded, replicated, loads, transfers, is_cpu), run)


@dataclass(frozen=True)
class BatchLoads:
    """A plan, and what a step under it asks of its pieces."""

    placement: Placement
    sharded: Loads
    """Of the pieces with one owner."""
    replicated: Loads
    """Of replicas."""
    workload: WorkloadLoads
    transfers: Sequence[Transfer]
    """Of a step under the plan."""
    is_cpu: bool = False
    """Whether ranks compute in the DRAM of their hosts."""


def memory(batch: BatchLoads, run: RunBytes | None = None) -> Bytes:
    """Bytes of every rank [R] by phase and memory: 'hbm' of its device, 'host' and 'disk' of its host for this rank.

    Rows, state and gradients of replicas are exact. Buffers are those of one step, at their peak: in the forward pass
    ids, answers on both sides and the bags; in the backward pass gradients on both sides beside the bags' own gradient,
    and what sorting takes. Between steps they are free again, yet devices keep them reserved. Training goes on beside a
    save in the background, whose copies are kept after it.
    """
    parts = memory_parts(batch, run)
    zeros = np.zeros(batch.placement.num_ranks)
    return {
        phase: {held_in: sum(of_phase[held_in].values(), zeros) for held_in in MEMORIES}
        for phase, of_phase in parts.items()
    }


def memory_parts(batch: BatchLoads, run: RunBytes | None = None) -> PartBytes:
    """As `memory`, apart by what is held."""
    run, placement, zeros = run or RunBytes(), batch.placement, np.zeros(batch.placement.num_ranks)
    parameters = batch.workload.workload.dense.parameter_bytes
    dense_bytes = DENSE_COPIES * parameters if run.dense_bytes is None else run.dense_bytes
    rows, state = (_stored(batch, what) for what in ("row_bytes", "state_bytes"))
    gradients = gradient_bytes(batch.transfers, batch.replicated).sum()
    step, evaluation = _activations(batch, run)
    kind = _save_kind(batch, run)
    saving = save_bytes(batch.workload.workload.tables, placement.num_ranks, _num_joined(batch), kind)
    is_beside = run.copies or (run.saves_beside and kind.on_disk)
    copies = _copied(batch) + parameters if run.copies else zeros

    def of(phase: Phase) -> dict[Memory, dict[MemoryPart, Floats]]:
        is_start, saves = phase == "start", phase == "checkpoint"
        trains = phase in ("first step", "steady") or (saves and is_beside)
        keeps = run.copies and phase in ("steady", "evaluation")
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
            "saving": zeros + (saving if saves else KEPT_SHARE * saving if keeps else 0),
            "copies": zeros if phase in ("start", "first step") else copies,
        }
        return {HBM: device, HOST: host, DISK: {"tables": rows[DISK], "optimizer_state": state[DISK]}}

    return {phase: of(phase) for phase in PHASES}


def received_bytes(transfers: Sequence[Transfer], load: Loads, cut: Cut, num_ranks: int) -> tuple[Floats, Floats]:
    """Bytes of each piece [n] that come in as lengths, ids and weights, and that are answered to all ranks; where a
    codec writes answers, with the numbers that they are written from. What a host hands on is counted for each piece by
    itself, so that it does not matter which pieces a host has: an upper estimate."""
    cut = _Apart(cut)
    ids = piece_bytes(transfers, ["ids", "weights"], load, cut, num_ranks)
    answers = piece_bytes(transfers, ["answers"], load, cut, num_ranks)
    relayed = [*HANDED_ON, "whole bags"] if any(one.name in HANDED_ON for one in transfers) else []
    for part in (part for one in transfers if one.name in ("answers", *relayed) for part in one.parts):
        if not part.codec.is_whole:
            answers = answers + load.number_bytes * counts_of(part.each, load, cut, num_ranks)
    if relayed:
        ids = ids + piece_bytes(transfers, HANDED_ON, load, cut, num_ranks)
        answers = answers + piece_bytes(transfers, ["whole bags"], load, cut, num_ranks)
    return ids, answers


class _Apart:
    """Pieces as if each were alone in its host."""

    def __init__(self, cut: Cut) -> None:
        self.host_parts, self.column_parts = np.minimum(cut.host_parts, 1), cut.column_parts
        self.host_columns = np.ones_like(cut.column_parts)


def gradient_bytes(transfers: Sequence[Transfer], load: Loads) -> Floats:
    """Bytes of the gradients of each replica [m], which are added over ranks."""
    counted = {part.each for one in transfers if one.name == "replicas" for part in one.parts}
    numbers = (counts_of(each, load, NOT_CUT, 1) for each in sorted(counted))
    return load.number_bytes * sum(numbers, np.zeros(len(load.ids)))


def _stored(batch: BatchLoads, what: Literal["row_bytes", "state_bytes"]) -> dict[Memory, Floats]:
    """Rows with what is known of those that lie near, or optimizer state, by memory [R]."""
    found: dict[Memory, Floats] = {}
    for place in MEMORIES:
        sharded, replicated = (
            stored_bytes(load, place, what, is_cpu=batch.is_cpu) for load in (batch.sharded, batch.replicated)
        )
        found[place] = batch.placement.by_rank(sharded) + replicated.sum()
    return found


def _save_kind(batch: BatchLoads, run: RunBytes) -> SaveKind:
    tiers = set() if run.storage is None else {TIERS[tier] for tier in np.unique(batch.sharded.tier)}
    return SaveKind(deltas=run.deltas, is_far=bool(tiers & set(FAR_TIERS)), on_disk=DISK in tiers)


def _copied(batch: BatchLoads) -> Floats:
    """What a save in the background copies [R]: no rows that lie on a disk, of which it takes a frozen view."""
    sharded, replicated = (
        np.where(load.tier == TIERS.index(DISK), 0.0, load.stored_bytes) for load in (batch.sharded, batch.replicated)
    )
    return batch.placement.by_rank(sharded) + replicated.sum()


def stored_bytes(
    load: Loads, place: Memory, what: Literal["row_bytes", "state_bytes"] | None = None, *, is_cpu: bool
) -> Floats:
    """Bytes of each piece [n] in one memory: its rows, its optimizer state, or both (None). Rows that lie near are
    copies, and take SLOT_BYTES more each; rows on a disk INDEX_BYTES, beside the near ones."""
    whole, near = (np.array(factors)[load.tier] for factors in held_in(is_cpu=is_cpu)[place])
    one = load.row_bytes + load.state_bytes if what is None else getattr(load, what)
    found: Floats = (whole * load.num_rows + near * load.near_rows) * one
    if what != "state_bytes":
        index = np.where(load.tier == TIERS.index(DISK), INDEX_BYTES * load.num_rows, 0.0)
        found = found + near * (SLOT_BYTES * load.near_rows + index)
    return found


def _num_joined(batch: BatchLoads) -> int:
    """Where rows alone are cut, blocks on the borders of pieces are joined; where columns are, all are."""
    if (batch.placement.column_parts > 1).any():
        return WRITES_IN_FLIGHT
    return batch.placement.num_ranks - 1 if (batch.placement.row_parts > 1).any() else 0


def _activations(batch: BatchLoads, run: RunBytes) -> tuple[Floats, Floats]:
    """Peak bytes of a batch on its way [R]: of a step, and of an evaluation."""
    loads, ranks = batch.workload, batch.placement.num_ranks
    whole = loads.workload.batch_size
    samples, scored = whole / ranks, (run.eval_batch_size or whole) / ranks
    part, bag_bytes = samples / run.num_parts, bags_bytes(loads)
    activation_bytes = loads.workload.dense.activation_bytes_per_sample
    forward, backward = _buffers(batch)
    step = backward / run.num_parts + (2 * bag_bytes + activation_bytes) * part
    if run.step_bytes is not None:
        step = backward / run.num_parts + run.step_bytes
    if run.num_parts > 1:  # gradients of bags, and ids, which parts of a batch keep until the step
        step = step + samples * (bag_bytes + 8 * loads.ids_per_sample.sum())
    evaluation = forward * (scored / samples) + (bag_bytes + activation_bytes / 2) * scored
    if run.evaluation_bytes is not None:
        evaluation = forward * (scored / samples) + run.evaluation_bytes
    return step, evaluation


def ids_bytes(loads: WorkloadLoads) -> float:
    """Bytes of the ids of a sample, and of how many each feature has."""
    return float(8 * (loads.ids_per_sample.sum() + loads.num_features.sum()))


def bags_bytes(loads: WorkloadLoads) -> float:
    """Bytes of the bags of a sample."""
    return float((loads.dims * loads.num_pooled).sum() * loads.wide)


def _buffers(batch: BatchLoads) -> tuple[Floats, Floats]:
    """Peak bytes of a step's exchange without its bags, in the forward and in the backward pass [R]."""
    placement, sharded, replicated = batch.placement, batch.sharded, batch.replicated
    ranks = placement.num_ranks
    wire, answered = received_bytes(batch.transfers, sharded, placement, ranks)
    # Ids of this rank's samples as they came, and for every owner; ids and offsets that it owns, as received, sorted.
    ids = ids_bytes(batch.workload) * batch.workload.workload.batch_size / ranks + np.zeros(ranks)
    sorting = placement.by_rank(SORT_BYTES * sharded.ids)
    if ranks == 1:
        return ids, ids + sorting
    sent = wire.sum() / ranks
    ids = ids + sent + placement.by_rank(2 * wire + 8 * sharded.lengths)
    answers = placement.by_rank(answered) + answered.sum() / ranks
    return ids + answers, ids + answers + sorting + SORT_BYTES * replicated.ids.sum() / ranks


def fixed_bytes(loads: WorkloadLoads, ranks: int, run: RunBytes) -> tuple[int, int]:
    """What every rank holds beside pieces of tables and what their exchange takes, wherever they lie: bytes of its
    device, and of its host's memory. The closed form of `memory`, for searches."""
    dense = loads.workload.dense
    dense_bytes = DENSE_COPIES * dense.parameter_bytes if run.dense_bytes is None else run.dense_bytes
    samples = loads.workload.batch_size / ranks
    moving = (2 * bags_bytes(loads) + dense.activation_bytes_per_sample) * samples / run.num_parts
    if run.step_bytes is not None:
        moving = run.step_bytes
    if run.num_parts > 1:
        moving += samples * (bags_bytes(loads) + 8 * loads.ids_per_sample.sum())
    moving += ids_bytes(loads) * samples / run.num_parts
    joined = WRITES_IN_FLIGHT if ranks > 1 else 0
    may_use_disk = run.storage is not None and run.storage.dir is not None
    kind = SaveKind(deltas=run.deltas, is_far=may_use_disk, on_disk=may_use_disk)
    saving = save_bytes(loads.workload.tables, ranks, joined, kind)
    copied = dense.parameter_bytes if run.copies else 0
    return int(moving) + dense_bytes, saving + run.reading_bytes + run.process_bytes + copied
