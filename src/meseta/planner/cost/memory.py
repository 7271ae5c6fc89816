"""Bytes that a rank holds in every phase of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from meseta.planner.cost.exchange import Cut, piece_bytes
from meseta.planner.cost.loads import Loads, WorkloadLoads
from meseta.planner.cost.placement import Placement
from meseta.planner.cost.reuse import Floats
from meseta.planner.cost.sizes import compute_bytes, value_bytes
from meseta.spec import Shard, TableSpec
from meseta.spec.tiers import DISK, HBM, HOST, MEMORIES, Memory, memory_shares
from meseta.spec.transfer import Transfer

Phase = Literal["start", "first step", "steady", "evaluation", "checkpoint"]
PHASES: tuple[Phase, ...] = ("start", "first step", "steady", "evaluation", "checkpoint")
DENSE_COPIES = 4
"""A parameter, its gradient, and the two moments of Adam; other optimizers keep fewer."""
CHECKPOINT_BLOCKS = 4
"""Blocks of a checkpoint that a rank packs, receives, joins and writes at a time."""
BLOCK_BYTES = 32 << 20
"""Of a block of a checkpoint."""
SORT_BYTES = 24
"""Scratch of an id while an update sorts it: row and position, twice, and its bag."""

Bytes = Mapping[Phase, Mapping[Memory, Floats]]


def rows_and_state(table: TableSpec, shard: Shard) -> tuple[int, int]:
    """Bytes of the rows of one shard, and of their optimizer state: exact."""
    per_element, per_row = table.optimizer.num_states
    cells = shard.num_rows * shard.num_columns
    state = (per_element * cells + per_row * shard.num_rows) * compute_bytes(table)
    return cells * value_bytes(table), state


def replica_bytes(table: TableSpec, shard: Shard) -> int:
    """Bytes of the gradient of a replica, which ranks add up: every number, and a mark per row."""
    return shard.num_rows * (shard.num_columns + 1) * compute_bytes(table)


def memory(
    placement: Placement,
    sharded: Loads,
    replicated: Loads,
    workload: WorkloadLoads,
    transfers: Sequence[Transfer],
    cached_share: float,
) -> Bytes:
    """Bytes of every rank [R] by phase and memory: 'hbm' of its device, 'host' and 'disk' of its host for this rank.

    Rows, state and gradients of replicas are exact. Buffers are those of one step without micro-batches, at their peak:
    in the forward pass ids, answers on both sides and the bags; in the backward pass gradients on both sides beside the
    bags' own gradient, and what sorting takes. Between steps they are free again, yet devices keep them reserved.
    """
    ranks, dense = placement.num_ranks, workload.workload.dense
    tables = _stored(placement, sharded, replicated, cached_share)
    gradients = piece_bytes(transfers, ["replicas"], replicated, placement, ranks).sum()
    samples = workload.workload.batch_size / ranks
    activations = dense.activation_bytes_per_sample * samples
    forward, backward = _buffers(placement, sharded, replicated, workload, transfers)
    zeros = np.zeros(ranks)
    on_device: dict[Phase, Floats] = {
        "start": zeros + dense.parameter_bytes,
        "evaluation": forward + activations / 2 + gradients + DENSE_COPIES * dense.parameter_bytes,
        "checkpoint": zeros + gradients + DENSE_COPIES * dense.parameter_bytes,
    }
    on_device["first step"] = np.maximum(forward, backward) + activations + on_device["checkpoint"]
    on_device["steady"] = on_device["first step"]
    on_host = zeros + CHECKPOINT_BLOCKS * BLOCK_BYTES
    return {
        phase: {
            HBM: tables[HBM] + on_device[phase],
            HOST: tables[HOST] + (on_host if phase == "checkpoint" else 0.0),
            DISK: tables[DISK],
        }
        for phase in PHASES
    }


def received_bytes(transfers: Sequence[Transfer], load: Loads, cut: Cut, num_ranks: int) -> tuple[Floats, Floats]:
    """Bytes of each piece [n] that come in as lengths, ids and weights, and that are answered to all ranks."""
    ids = piece_bytes(transfers, ["ids", "weights"], load, cut, num_ranks)
    return ids, piece_bytes(transfers, ["answers"], load, cut, num_ranks)


def _stored(placement: Placement, sharded: Loads, replicated: Loads, cached_share: float) -> dict[Memory, Floats]:
    """Rows and optimizer state by memory; a cache holds copies."""
    stored = sharded.stored_bytes
    found: dict[Memory, Floats] = {}
    for held_in, factor in zip(MEMORIES, np.array(memory_shares(cached_share)), strict=True):
        everywhere = (factor[replicated.tier] * replicated.stored_bytes).sum()
        found[held_in] = placement.by_rank(factor[sharded.tier] * stored) + everywhere
    return found


def _buffers(
    placement: Placement,
    sharded: Loads,
    replicated: Loads,
    workload: WorkloadLoads,
    transfers: Sequence[Transfer],
) -> tuple[Floats, Floats]:
    """Peak bytes of a step's exchange buffers in the forward and in the backward pass [R]."""
    ranks = placement.num_ranks
    samples = workload.workload.batch_size / ranks
    wire, answered = received_bytes(transfers, sharded, placement, ranks)
    # Ids of this rank's samples as they came, and for every owner; ids and offsets that it owns, as received, sorted.
    own_ids = 8 * samples * (workload.ids_per_sample.sum() + workload.num_features.sum())
    bags = samples * (workload.dims * workload.num_pooled).sum() * workload.wide
    if ranks == 1:
        ids = own_ids
        update = placement.by_rank(SORT_BYTES * sharded.ids)
        return ids + bags + np.zeros(1), ids + 2 * bags + update
    sent = (wire.sum() + np.zeros(ranks)) / ranks
    owned = placement.by_rank(2 * wire + 8 * sharded.lengths)
    ids = own_ids + sent + owned
    answers = placement.by_rank(answered)
    arrived = answered.sum() / ranks
    sorting = placement.by_rank(SORT_BYTES * sharded.ids) + SORT_BYTES * replicated.ids.sum() / ranks
    return ids + answers + arrived + bags, ids + answers + arrived + 2 * bags + sorting
