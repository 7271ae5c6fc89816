"""Bytes that every rank sends and receives in the collectives of a step, by level of the network, and their seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from meseta.planner.loads import Loads, WorkloadLoads
from meseta.planner.placement import Placement
from meseta.planner.reuse import Floats
from meseta.planner.sizes import ROW_STATISTICS
from meseta.spec import COLUMN_BLOCK, CostModel, Link, Topology

HEADER = 4
"""Numbers of 8 bytes that travel to each rank before the counts of its routes."""
LARGEST_SHORT = 2**31 - 1
"""Ids that are rows of a longer range take 8 bytes on the way, others 4."""

Stage = Literal["input_dist", "output_dist", "backward", "dense"]


@dataclass(frozen=True)
class Collective:
    """One collective: what each rank sends to the others and gets from them, in bytes [R]."""

    name: str
    stage: Stage
    sent_inside: Floats
    sent_across: Floats
    received_inside: Floats
    received_across: Floats
    reduces: bool = False
    """Whether it is an all-reduce."""
    times: int = 1
    """How many of them share these bytes."""

    def seconds(self, cost_model: CostModel, topology: Topology) -> Floats:
        """[R]: the latency, and the slower of the levels, on which a rank sends and receives at once."""
        ranks, per_host = topology.num_ranks, topology.devices_per_host
        if ranks == 1:
            return np.zeros(1)
        inside, across = links(cost_model, topology, self.reduces)
        spent = np.maximum(self.sent_inside, self.received_inside) / inside.bytes_per_s
        latency_s = inside.latency_s if ranks == per_host else across.latency_s
        if ranks > per_host:
            if not (self.sent_across.any() or self.received_across.any()):
                latency_s = inside.latency_s
            spent = np.maximum(spent, np.maximum(self.sent_across, self.received_across) / across.bytes_per_s)
        return spent + self.times * latency_s


def links(cost_model: CostModel, topology: Topology, reduces: bool) -> tuple[Link, Link]:
    """(inside, across) of a collective: as the topology says, else as the cost model does."""
    own = cost_model.exchange
    inside = own.inside_all_reduce if reduces else own.inside_all_to_all
    across = own.across_all_reduce if reduces else own.across_all_to_all
    return topology.inside or inside, topology.across or across


def collectives(
    placement: Placement, sharded: Loads, replicated: Loads, workload: WorkloadLoads
) -> tuple[Collective, ...]:
    """All collectives of a training step on more than one rank, in their order.

    Bytes are those of `embedding/`: counts, ids with lengths, weights, answers, gradients, statistics of cut rows,
    gradients of replicas, gradients of the dense part. Every rank has an equal slice of the batch.
    """
    found = [
        _to_owners("counts", placement, 8.0 * (HEADER + placement.by_rank(sharded.shards)) * placement.num_ranks),
        _to_owners("ids", placement, placement.by_rank(_id_bytes(placement, sharded))),
    ]
    if workload.any_weighted:
        found.append(_to_owners("weights", placement, placement.by_rank(sharded.ids * sharded.weight_bytes)))
    answers = _answers(placement, sharded)
    found += answers
    found += [_mirrored(own) for own in reversed(answers)]
    found += _statistics(placement, sharded)
    learning = ~replicated.is_frozen
    numbers = (replicated.num_rows * (replicated.columns + 1) * replicated.number_bytes)[learning].sum()
    if numbers:
        found.append(_all_reduce("replicas", "backward", placement, float(numbers)))
    if workload.workload.dense.parameter_bytes:
        found.append(_all_reduce("dense", "dense", placement, float(workload.workload.dense.parameter_bytes)))
    return tuple(found)


def id_bytes(placement: Placement) -> int:
    """Of an id on the wire: it is a row of its range."""
    return 4 if placement.sharded.num_rows.max(initial=0) <= LARGEST_SHORT else 8


def _id_bytes(placement: Placement, sharded: Loads) -> Floats:
    return (sharded.lengths + sharded.ids) * id_bytes(placement)


def _to_owners(name: str, placement: Placement, owned: Floats) -> Collective:
    """All ranks send an equal share of `owned` [R] to each owner."""
    ranks, per_host, host = placement.num_ranks, placement.per_host, placement.host
    in_host = np.bincount(host, owned)[host]
    return Collective(
        name=name,
        stage="input_dist",
        sent_inside=(in_host - owned) / ranks,
        sent_across=(owned.sum() - in_host) / ranks,
        received_inside=owned * (per_host - 1) / ranks,
        received_across=owned * (ranks - per_host) / ranks,
    )


def _answers(placement: Placement, sharded: Loads) -> list[Collective]:
    """Bags and rows on their way back. Partial bags that a host sums go to the device of their host that has the place
    of the rank that asked, and whole ones from there to its twins in the other hosts."""
    ranks, per_host, host = placement.num_ranks, placement.per_host, placement.host
    partial = np.where(placement.host_parts > 0, sharded.bags * sharded.columns * sharded.number_bytes, 0.0)
    asked = _mirrored(_to_owners("", placement, placement.by_rank(sharded.answer_bytes - partial)))
    by_rank = placement.by_rank(partial)
    in_host = np.bincount(host, by_rank)[host]
    answers = Collective(
        name="answers",
        stage="output_dist",
        sent_inside=asked.sent_inside + by_rank * (per_host - 1) / per_host,
        sent_across=asked.sent_across,
        received_inside=asked.received_inside + (in_host - by_rank) / per_host,
        received_across=asked.received_across,
    )
    if not partial.any():
        return [answers]
    hosts, nothing = ranks // per_host, np.zeros(ranks)
    of_host = np.bincount(host, placement.by_rank(partial / np.maximum(placement.host_parts, 1)))
    whole = Collective(
        name="whole bags",
        stage="output_dist",
        sent_inside=nothing,
        sent_across=of_host[host] / per_host * (hosts - 1) / hosts,
        received_inside=nothing,
        received_across=(of_host.sum() - of_host[host]) / ranks,
    )
    return [answers, whole]


def _statistics(placement: Placement, sharded: Loads) -> list[Collective]:
    """Sums over parts of rows, from every owner of a row's columns to the others."""
    known = np.array([ROW_STATISTICS.get(name, (0, 0)) for name in sharded.optimizers], np.int64).reshape(-1, 2)
    stages, numbers = known[sharded.optimizer].astype(np.float64).T
    cut = (placement.column_parts > 1) & (stages > 0)
    if not cut.any():
        return []
    blocks = np.ceil(sharded.columns / COLUMN_BLOCK)
    own = np.where(cut, numbers * sharded.distinct * blocks * sharded.number_bytes, 0.0)
    others = own * (placement.column_parts - 1.0)
    sent = placement.by_rank(others)
    nothing = np.zeros_like(sent)
    is_inside = placement.num_ranks == placement.per_host
    levels = (sent, nothing, sent, nothing) if is_inside else (nothing, sent, nothing, sent)
    return [Collective("row statistics", "backward", *levels, times=int(stages[cut].max()))]


def _all_reduce(name: str, stage: Stage, placement: Placement, num_bytes: float) -> Collective:
    """Ring all-reduce of `num_bytes`: 2 (n - 1) / n of them from each of n devices, inside hosts of what lies there and
    across hosts of a device's share (reduce-scatter, all-reduce, all-gather)."""
    ranks, per_host = placement.num_ranks, placement.per_host
    hosts, one = ranks // per_host, np.ones(ranks)
    inside = one * 2 * num_bytes * (per_host - 1) / per_host
    across = one * 2 * num_bytes / per_host * (hosts - 1) / hosts
    return Collective(name, stage, inside, across, inside, across, reduces=True)


def _mirrored(own: Collective) -> Collective:
    """The way back."""
    return Collective(
        name="gradients" if own.name == "answers" else f"gradients of {own.name}",
        stage="backward",
        sent_inside=own.received_inside,
        sent_across=own.received_across,
        received_inside=own.sent_inside,
        received_across=own.sent_across,
    )
