"""Predicted bytes and seconds of the collectives of a step. Arrays of shape [R] have one entry per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from meseta.planner.cost.loads import Indices, ShardLoads
from meseta.planner.cost.placement import Placement
from meseta.planner.cost.reuse import Floats
from meseta.spec import COLUMN_BLOCK, CostModel, Link, Topology
from meseta.spec.codecs import NUM_CHAIN_CHUNKS, AllReduceAlgorithm, CollectiveKind, traffic_factors
from meseta.spec.cost_model import ExchangeCost
from meseta.spec.stages import StepComponent
from meseta.spec.transfer import ROW_STATISTICS, TrafficUnit, Transfer, TransferPart


@dataclass(frozen=True)
class Collective:
    """Collective of a step, with the bytes that each rank sends and receives [R]."""

    name: str
    component: StepComponent
    sent_intra_host: Floats
    sent_inter_host: Floats
    received_intra_host: Floats
    received_inter_host: Floats
    reduces: bool = False
    """Whether the collective is an all-reduce or a reduce-scatter."""
    num_calls: int = 1
    """Number of calls per step. The bytes are the total of all calls."""
    algorithm: AllReduceAlgorithm | None = None
    """Algorithm of a reduction, or `None` for other collectives."""
    num_peers: tuple[int, int] = (0, 0)
    """Number of ranks that each rank communicates with, as (same host, other hosts)."""
    codec_s: Floats | float = 0.0
    """Seconds that each rank encodes and decodes [R]."""

    def seconds(self, cost_model: CostModel, topology: Topology) -> Floats:
        """Return the seconds of each rank [R]: latency, time per peer, and transfer time.

        Intra-host and inter-host transfers take place at the same time, except in hierarchical reductions.
        """
        ranks = topology.num_ranks
        if ranks == 1:
            return np.zeros(1)
        inside, across = select_links(cost_model, topology, self.reduces)
        near = np.maximum(self.sent_intra_host, self.received_intra_host) / inside.bytes_per_s
        far = np.maximum(self.sent_inter_host, self.received_inter_host) / across.bytes_per_s
        latency_s = call_seconds(self, (inside, across), topology, bool(far.any()))
        if self.algorithm == "chain":
            far = np.full(ranks, far.max() * chain_factor(topology.num_hosts))
        # A hierarchical reduction first reduces inside each host, then between hosts.
        spent = near + far if self.algorithm in ("cross_host", "chain") else np.maximum(near, far)
        return spent + self.num_calls * latency_s


@runtime_checkable  # Tests check arguments with beartype, which requires it.
class CollectiveCall(Protocol):
    """Properties of a `Collective` that determine its latency."""

    @property
    def algorithm(self) -> AllReduceAlgorithm | None: ...

    @property
    def num_peers(self) -> tuple[int, int]: ...


def call_seconds(call: CollectiveCall, both: tuple[Link, Link], topology: Topology, is_far: bool) -> float:
    """Return the seconds of one call over the links (intra-host, inter-host) without transfer time. `is_far` means that
    data is sent to other hosts."""
    (inside, across), (mates, far_peers) = both, call.num_peers
    spent = mates * inside.peer_s + far_peers * across.peer_s
    if call.algorithm in ("cross_host", "chain"):
        steps = topology.num_hosts - 2 + NUM_CHAIN_CHUNKS if call.algorithm == "chain" else 1
        return spent + (inside.latency_s if mates else 0.0) + steps * across.latency_s
    return spent + (across.latency_s if is_far else inside.latency_s)


def chain_factor(num_hosts: int) -> float:
    """Return the duration of a chain relative to the sending time of its busiest host."""
    # Chunks are pipelined to the last host and back.
    return (num_hosts - 2 + NUM_CHAIN_CHUNKS) / NUM_CHAIN_CHUNKS * (2.0 if num_hosts == 2 else 1.0)


def count_peers(transfer: Transfer, num_ranks: int, per_host: int) -> tuple[int, int]:
    """Return the number of ranks that each rank communicates with in a transfer, as (same host, other hosts)."""
    hosts = num_ranks // per_host
    mates, cross_host_peers = (per_host - 1, 0), (0, hosts - 1)
    of_way: dict[CollectiveKind, tuple[int, int]] = {
        "host": mates, "host gather": mates, "host scatter": mates, "host sum": mates,
        "hosts": cross_host_peers, "hosts sum": cross_host_peers, "hosts chain": (0, min(2, hosts - 1)),
    }  # fmt: skip
    num_peers = [of_way.get(part.collective, (per_host - 1, num_ranks - per_host)) for part in transfer.parts]
    return max(inside for inside, _ in num_peers), max(across for _, across in num_peers)


def select_links(cost_model: CostModel, topology: Topology, reduces: bool) -> tuple[Link, Link]:
    """Return the links (intra-host, inter-host) of a collective. Links of the topology take precedence over the cost
    model."""
    cost = cost_model.exchange
    inside = cost.inside_all_reduce if reduces else cost.inside_all_to_all
    across = cost.across_all_reduce if reduces else cost.across_all_to_all
    return topology.inside or inside, topology.across or across


@runtime_checkable  # Tests check arguments with beartype, which requires it.
class Partitioning(Protocol):
    """Partitioning of the table of each shard, with arrays of shape [n]."""

    @property
    def host_row_parts(self) -> Indices:
        """Number of row ranges on the shard's host, if the host sums partial bags. Otherwise 0."""

    @property
    def column_parts(self) -> Indices:
        """Number of column ranges of the table."""

    @property
    def host_column_parts(self) -> Indices | Floats:
        """Number of shards on the same host that have columns of the same rows."""


def count_items(each: TrafficUnit, load: ShardLoads, cut: Partitioning, num_ranks: int) -> Floats:
    """Return the number of units of each shard [n], over all requesting ranks. For replicas, the number per rank."""
    if each in _LOAD_FIELDS:
        counts: Floats = getattr(load, _LOAD_FIELDS[each])
        return counts
    if each in OF_HOSTS:
        return count_items(OF_HOSTS[each], load, cut, num_ranks) / np.maximum(cut.host_column_parts, 1)
    if each in ("route", "row route"):
        return num_ranks * (load.num_features if each == "route" else load.num_unpooled_features)
    if each == "padded replica number":
        padded = COLUMN_BLOCK * np.ceil(load.num_columns / COLUMN_BLOCK)
        return np.where(load.is_frozen, 0.0, load.num_rows * padded)
    if each in ("row number", "distinct row number"):
        return (
            load.num_requested_rows if each == "distinct row number" else load.num_output_rows - load.num_bags
        ) * load.num_columns
    if each in ("replica number", "replica row"):
        return np.where(load.is_frozen, 0.0, load.num_rows * (load.num_columns if each == "replica number" else 1.0))
    if each == "row statistic":
        numbers = np.array([ROW_STATISTICS.get(name, (0, 0))[1] for name in load.optimizers], np.float64)
        return (
            numbers[load.optimizer_index]
            * load.num_distinct_rows
            * np.ceil(load.num_columns / COLUMN_BLOCK)
            * (cut.column_parts - 1.0)
        )
    if each in ("summed bag number", "handed bag number"):
        is_one = cut.host_row_parts == 1 if each == "handed bag number" else cut.host_row_parts > 1
        return np.where(is_one, load.num_bags * load.num_columns, 0.0)
    is_summed = cut.host_row_parts > 0
    numbers = load.num_bags * load.num_columns
    if each == "bag number":
        return np.where(is_summed, 0.0, numbers)
    return np.where(
        is_summed, numbers / (np.maximum(cut.host_row_parts, 1) if each == "whole bag number" else 1.0), 0.0
    )


_LOAD_FIELDS: dict[TrafficUnit, str] = {"bag": "num_lengths", "id": "num_ids", "weight": "num_weights"}
OF_HOSTS: dict[TrafficUnit, TrafficUnit] = {
    "host bag": "bag", "host id": "id", "host weight": "weight", "host route": "route", "host row route": "row route",
}  # fmt: skip
"""Unit per shard of each unit that is counted once for all shards of a host with columns of the same rows."""


def pair_bytes(part: TransferPart, num_ranks: int, per_host: int) -> float:
    """Return the bytes of a part that one rank receives from all ranks, regardless of its shards."""
    return float(part.num_bytes * (num_ranks // per_host if part.unit == "twin pair" else num_ranks))


PAIR_ITEMS: tuple[TrafficUnit, ...] = ("pair", "twin pair")
"""Units that do not depend on shards."""


def shard_transfer_bytes(
    transfers: Iterable[Transfer], names: Sequence[str], load: ShardLoads, cut: Partitioning, num_ranks: int
) -> Floats:
    """Return the bytes of each shard [n] in the named table transfers, over all requesting ranks."""
    parts = [part for transfer in transfers if transfer.name in names for part in transfer.parts]
    return sum((transfer_part_bytes(part, load, cut, num_ranks) for part in parts), np.zeros(len(load.num_ids)))


def transfer_part_bytes(part: TransferPart, load: ShardLoads, cut: Partitioning, num_ranks: int) -> Floats:
    """Return the bytes of each shard [n] in one part of a transfer."""
    num_bytes = part.num_bytes * count_items(part.unit, load, cut, num_ranks)
    if part.scale_bytes:
        blocks = replace(load, num_columns=np.ceil(load.num_columns / COLUMN_BLOCK))
        num_bytes = num_bytes + part.scale_bytes * count_items(part.unit, blocks, cut, num_ranks)
    return num_bytes


REPLICA_ITEMS: tuple[TrafficUnit, ...] = ("replica number", "padded replica number", "replica row")
"""Units that count replicas."""


def codec_seconds(part: TransferPart, to_owners: bool, cost: ExchangeCost, hosts: int) -> tuple[float, float]:
    """Return the seconds per byte to encode and decode a part, as (owner, requesters).

    `owner` also applies to each rank of a reduction. `requesters` is the total of all requesting ranks.
    """
    if part.codec.is_lossless:
        return 0.0, 0.0
    write_s, read_s = (
        part.elements_per_byte * each for each in cost.codec_seconds(part.codec.name, stochastic=to_owners)
    )
    if part.collective == "hosts sum":  # Encodes the sum of a host, then the total of a chunk, and decodes both.
        return write_s * (1 + 1 / hosts) + 2 * read_s, 0.0
    return (read_s, write_s) if to_owners else (write_s, read_s)


def collectives(
    transfers: Sequence[Transfer], placement: Placement, sharded: ShardLoads, replicated: ShardLoads, cost: ExchangeCost
) -> tuple[Collective, ...]:
    """Return the collectives of a step. Each rank has an equal slice of the batch."""
    return tuple(_collective(transfer, placement, (sharded, replicated), cost) for transfer in transfers)


def _collective(
    transfer: Transfer, placement: Placement, loads: tuple[ShardLoads, ShardLoads], cost: ExchangeCost
) -> Collective:
    ranks, (sharded, replicated), codec_s = placement.num_ranks, loads, np.zeros(placement.num_ranks)
    total = (np.zeros(ranks),) * 4
    for part in transfer.parts:
        if part.unit == "step":
            amounts = np.full(ranks, float(part.num_bytes))
        elif part.unit in PAIR_ITEMS:
            amounts = np.full(ranks, pair_bytes(part, ranks, placement.ranks_per_host))
        elif part.unit in REPLICA_ITEMS:
            amounts = np.full(ranks, transfer_part_bytes(part, replicated, UNPARTITIONED, ranks).sum())
        else:
            amounts = placement.sum_by_rank(transfer_part_bytes(part, sharded, placement, ranks))
        levels = _bytes_by_level(part.collective, amounts, placement)
        if not part.codec.is_lossless:
            owner_s, askers_s = codec_seconds(part, transfer.sends_to_owners, cost, ranks // placement.ranks_per_host)
            codec_s = (
                codec_s
                + owner_s * _coded_amounts(part.collective, amounts, placement)
                + askers_s * amounts.sum() / ranks
            )
        if not transfer.sends_to_owners:  # Routes are reversed: swap sent and received bytes.
            levels = levels[2], levels[3], levels[0], levels[1]
        total = total[0] + levels[0], total[1] + levels[1], total[2] + levels[2], total[3] + levels[3]
    return Collective(
        name=transfer.name,
        component=transfer.component,
        sent_intra_host=total[0],
        sent_inter_host=total[1],
        received_intra_host=total[2],
        received_inter_host=total[3],
        reduces=transfer.is_reduction,
        num_calls=transfer.num_calls,
        algorithm=transfer.algorithm,
        num_peers=count_peers(transfer, ranks, placement.ranks_per_host),
        codec_s=codec_s,
    )


def _coded_amounts(way: CollectiveKind, amounts: Floats, placement: Placement) -> Floats:
    """Return the bytes that each rank encodes or decodes [R]. Ranks of a host share the bytes of its sums."""
    if way != "hosts":
        return amounts
    return np.bincount(placement.rank_hosts, amounts)[placement.rank_hosts] / placement.ranks_per_host


class _Unpartitioned:  # Replicas are not split.
    host_row_parts = column_parts = host_column_parts = np.zeros(1, np.int64)


UNPARTITIONED = _Unpartitioned()


def _bytes_by_level(
    way: CollectiveKind, amounts: Floats, placement: Placement
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the bytes of each rank [R] as (sent intra-host, sent inter-host, received intra-host, received
    inter-host).

    `amounts` [R] are the bytes of the rows that each rank owns, or the bytes of each rank's replicated data.
    """
    ranks, per_host, host = placement.num_ranks, placement.ranks_per_host, placement.rank_hosts
    hosts, nothing = ranks // per_host, np.zeros(ranks)
    if way == "owners":
        in_host = np.bincount(host, amounts)[host]
        received = amounts * (per_host - 1) / ranks, amounts * (ranks - per_host) / ranks
        return (in_host - amounts) / ranks, (amounts.sum() - in_host) / ranks, *received
    if way == "host":
        in_host = np.bincount(host, amounts)[host]
        return (in_host - amounts) / per_host, nothing, amounts * (per_host - 1) / per_host, nothing
    if way == "hosts":
        of_host = np.bincount(host, amounts)
        sent = (of_host.sum() - of_host[host]) / ranks
        return nothing, sent, nothing, of_host[host] / per_host * (hosts - 1) / hosts
    if way == "columns":
        return (amounts, nothing, amounts, nothing) if hosts == 1 else (nothing, amounts, nothing, amounts)
    near, _ = traffic_factors(way, ranks, per_host)
    far = np.array([traffic_factors(way, ranks, per_host, number)[1] for number in range(hosts)])
    inside, across = near * amounts, far[host] * amounts
    return inside, across, inside, across
