"""Bytes that every rank sends and receives in the collectives of a step, by level of the network, and their seconds."""

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
    """One collective: what each rank sends to the others and gets from them, in bytes [R]."""

    name: str
    component: StepComponent
    sent_intra_host: Floats
    sent_inter_host: Floats
    received_intra_host: Floats
    received_inter_host: Floats
    reduces: bool = False
    """Whether it is an all-reduce."""
    num_calls: int = 1
    """How many of them share these bytes."""
    algorithm: AllReduceAlgorithm | None = None
    """Which way a sum takes."""
    num_peers: tuple[int, int] = (0, 0)
    """Of each rank: other ranks that it meets inside its host, and across hosts."""
    codec_s: Floats | float = 0.0
    """[R]: seconds in which each rank writes and reads encoded numbers."""

    def seconds(self, cost_model: CostModel, topology: Topology) -> Floats:
        """[R]: the latency, what peers take, and the slower of the levels, on which a rank sends and receives at once;
        where a sum goes by host, one level after the other."""
        ranks = topology.num_ranks
        if ranks == 1:
            return np.zeros(1)
        inside, across = select_links(cost_model, topology, self.reduces)
        near = np.maximum(self.sent_intra_host, self.received_intra_host) / inside.bytes_per_s
        far = np.maximum(self.sent_inter_host, self.received_inter_host) / across.bytes_per_s
        latency_s = call_seconds(self, (inside, across), topology, bool(far.any()))
        if self.algorithm == "chain":
            far = np.full(ranks, far.max() * chain_factor(topology.num_hosts))
        spent = near + far if self.algorithm in ("cross_host", "chain") else np.maximum(near, far)
        return spent + self.num_calls * latency_s


@runtime_checkable  # beartype asks for it where the tests check every call
class CollectiveCall(Protocol):
    """What the latency of a collective follows from."""

    @property
    def algorithm(self) -> AllReduceAlgorithm | None:
        """Which way a sum takes."""

    @property
    def num_peers(self) -> tuple[int, int]:
        """Of each rank, inside its host and across hosts."""


def call_seconds(call: CollectiveCall, both: tuple[Link, Link], topology: Topology, is_far: bool) -> float:
    """Of one collective without its bytes, over the links (inside, across): its latency, that of both levels where a
    sum goes by host, and what its peers take. `is_far`: whether it sends anything to other hosts."""
    (inside, across), (mates, far_peers) = both, call.num_peers
    spent = mates * inside.peer_s + far_peers * across.peer_s
    if call.algorithm in ("cross_host", "chain"):
        steps = topology.num_hosts - 2 + NUM_CHAIN_CHUNKS if call.algorithm == "chain" else 1
        return spent + (inside.latency_s if mates else 0.0) + steps * across.latency_s
    return spent + (across.latency_s if is_far else inside.latency_s)


def chain_factor(num_hosts: int) -> float:
    """How long a chain takes, over what the host that sends most takes to send: pieces follow each other to the last
    host, and then back."""
    return (num_hosts - 2 + NUM_CHAIN_CHUNKS) / NUM_CHAIN_CHUNKS * (2.0 if num_hosts == 2 else 1.0)


def count_peers(transfer: Transfer, num_ranks: int, per_host: int) -> tuple[int, int]:
    """(inside its host, across hosts): the ranks that each meets in a transfer."""
    hosts = num_ranks // per_host
    mates, twins = (per_host - 1, 0), (0, hosts - 1)
    of_way: dict[CollectiveKind, tuple[int, int]] = {
        "host": mates, "host gather": mates, "host scatter": mates, "host sum": mates,
        "hosts": twins, "hosts sum": twins, "hosts chain": (0, min(2, hosts - 1)),
    }  # fmt: skip
    met = [of_way.get(part.collective, (per_host - 1, num_ranks - per_host)) for part in transfer.parts]
    return max(inside for inside, _ in met), max(across for _, across in met)


def select_links(cost_model: CostModel, topology: Topology, reduces: bool) -> tuple[Link, Link]:
    """(inside, across) of a collective: as the topology says, else as the cost model does."""
    own = cost_model.exchange
    inside = own.inside_all_reduce if reduces else own.inside_all_to_all
    across = own.across_all_reduce if reduces else own.across_all_to_all
    return topology.inside or inside, topology.across or across


@runtime_checkable  # beartype asks for it where the tests check every call
class Partitioning(Protocol):
    """How the table of each piece is cut, [n] each."""

    @property
    def host_row_parts(self) -> Indices:
        """Row ranges in the piece's host, of schemes that sum bags there; else 0."""

    @property
    def column_parts(self) -> Indices:
        """Ranges of columns."""

    @property
    def host_column_parts(self) -> Indices | Floats:
        """Pieces of the host that hold columns of the same rows."""


def count_items(each: TrafficUnit, load: ShardLoads, cut: Partitioning, num_ranks: int) -> Floats:
    """How many of something each piece has [n], over all ranks that ask for its rows; of replicas, on each rank."""
    if each in _LOAD_FIELDS:
        found: Floats = getattr(load, _LOAD_FIELDS[each])
        return found
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
"""What all pieces of a host that hold columns of the same rows have once."""


def pair_bytes(part: TransferPart, num_ranks: int, per_host: int) -> float:
    """Bytes of a part that travels between ranks whatever their pieces are, to one rank from all."""
    return float(part.num_bytes * (num_ranks // per_host if part.unit == "twin pair" else num_ranks))


PAIR_ITEMS: tuple[TrafficUnit, ...] = ("pair", "twin pair")
"""Of parts that travel whatever pieces there are."""


def shard_transfer_bytes(
    transfers: Iterable[Transfer], names: Sequence[str], load: ShardLoads, cut: Partitioning, num_ranks: int
) -> Floats:
    """Bytes of each piece [n] in the transfers of tables of these names, over all ranks that ask for its rows."""
    parts = [part for transfer in transfers if transfer.name in names for part in transfer.parts]
    return sum((transfer_part_bytes(part, load, cut, num_ranks) for part in parts), np.zeros(len(load.num_ids)))


def transfer_part_bytes(part: TransferPart, load: ShardLoads, cut: Partitioning, num_ranks: int) -> Floats:
    """Bytes of each piece [n] in one part of a transfer."""
    found = part.num_bytes * count_items(part.unit, load, cut, num_ranks)
    if part.scale_bytes:
        blocks = replace(load, num_columns=np.ceil(load.num_columns / COLUMN_BLOCK))
        found = found + part.scale_bytes * count_items(part.unit, blocks, cut, num_ranks)
    return found


REPLICA_ITEMS: tuple[TrafficUnit, ...] = ("replica number", "padded replica number", "replica row")
"""What is counted of replicas."""


def codec_seconds(part: TransferPart, to_owners: bool, cost: ExchangeCost, hosts: int) -> tuple[float, float]:
    """Seconds of writing and reading a byte of a part: on the rank, or in the host, that has the rows, or of a sum on
    every rank; and together on all ranks that ask."""
    if part.codec.is_lossless:
        return 0.0, 0.0
    write_s, read_s = (
        part.elements_per_byte * each for each in cost.codec_seconds(part.codec.name, stochastic=to_owners)
    )
    if part.collective == "hosts sum":  # the sum of a host, and of a piece the total; both are read whole
        return write_s * (1 + 1 / hosts) + 2 * read_s, 0.0
    return (read_s, write_s) if to_owners else (write_s, read_s)


def collectives(
    transfers: Sequence[Transfer], placement: Placement, sharded: ShardLoads, replicated: ShardLoads, cost: ExchangeCost
) -> tuple[Collective, ...]:
    """What each rank sends and receives in the transfers of a step. Every rank has an equal slice of the batch."""
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
        if not transfer.sends_to_owners:  # the way there, backwards
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
    """[R]: what each rank writes or reads of `amounts` [R]; a host's ranks share what it has summed."""
    if way != "hosts":
        return amounts
    return np.bincount(placement.rank_hosts, amounts)[placement.rank_hosts] / placement.ranks_per_host


class _Unpartitioned:
    """Replicas are not cut."""

    host_row_parts = column_parts = host_column_parts = np.zeros(1, np.int64)


UNPARTITIONED = _Unpartitioned()


def _bytes_by_level(
    way: CollectiveKind, amounts: Floats, placement: Placement
) -> tuple[Floats, Floats, Floats, Floats]:
    """(sent inside, sent across, received inside, received across) by every rank [R], where `amounts` [R] belong to the
    rows of each rank, or are what each rank has."""
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
