"""Bytes that every rank sends and receives in the collectives of a step, by level of the network, and their seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from meseta.planner.cost.loads import Indices, Loads
from meseta.planner.cost.placement import Placement
from meseta.planner.cost.reuse import Floats
from meseta.spec import COLUMN_BLOCK, CostModel, Link, Topology
from meseta.spec.codecs import CHAIN_PIECES, SumPath, Way, alike_shares
from meseta.spec.cost_model import ExchangeCost
from meseta.spec.stages import Component
from meseta.spec.transfer import ROW_STATISTICS, Each, Part, Transfer


@dataclass(frozen=True)
class Collective:
    """One collective: what each rank sends to the others and gets from them, in bytes [R]."""

    name: str
    stage: Component
    sent_inside: Floats
    sent_across: Floats
    received_inside: Floats
    received_across: Floats
    reduces: bool = False
    """Whether it is an all-reduce."""
    times: int = 1
    """How many of them share these bytes."""
    path: SumPath | None = None
    """Which way a sum takes."""
    peers: tuple[int, int] = (0, 0)
    """Of each rank: other ranks that it meets inside its host, and across hosts."""
    codec_s: Floats | float = 0.0
    """[R]: seconds in which each rank writes and reads encoded numbers."""

    def seconds(self, cost_model: CostModel, topology: Topology) -> Floats:
        """[R]: the latency, what peers take, and the slower of the levels, on which a rank sends and receives at once;
        where a sum goes by host, one level after the other."""
        ranks = topology.num_ranks
        if ranks == 1:
            return np.zeros(1)
        inside, across = links(cost_model, topology, self.reduces)
        near = np.maximum(self.sent_inside, self.received_inside) / inside.bytes_per_s
        far = np.maximum(self.sent_across, self.received_across) / across.bytes_per_s
        latency_s = call_seconds(self, (inside, across), topology, bool(far.any()))
        if self.path == "chain":
            far = np.full(ranks, far.max() * chain_share(topology.num_hosts))
        spent = near + far if self.path in ("twins", "chain") else np.maximum(near, far)
        return spent + self.times * latency_s


@runtime_checkable  # beartype asks for it where the tests check every call
class Called(Protocol):
    """What the latency of a collective follows from."""

    @property
    def path(self) -> SumPath | None:
        """Which way a sum takes."""

    @property
    def peers(self) -> tuple[int, int]:
        """Of each rank, inside its host and across hosts."""


def call_seconds(call: Called, both: tuple[Link, Link], topology: Topology, is_far: bool) -> float:
    """Of one collective without its bytes, over the links (inside, across): its latency, that of both levels where a
    sum goes by host, and what its peers take. `is_far`: whether it sends anything to other hosts."""
    (inside, across), (mates, far_peers) = both, call.peers
    spent = mates * inside.peer_s + far_peers * across.peer_s
    if call.path in ("twins", "chain"):
        steps = topology.num_hosts - 2 + CHAIN_PIECES if call.path == "chain" else 1
        return spent + (inside.latency_s if mates else 0.0) + steps * across.latency_s
    return spent + (across.latency_s if is_far else inside.latency_s)


def chain_share(num_hosts: int) -> float:
    """How long a chain takes, over what the host that sends most takes to send: pieces follow each other to the last
    host, and then back."""
    return (num_hosts - 2 + CHAIN_PIECES) / CHAIN_PIECES * (2.0 if num_hosts == 2 else 1.0)


def peers_of(transfer: Transfer, num_ranks: int, per_host: int) -> tuple[int, int]:
    """(inside its host, across hosts): the ranks that each meets in a transfer."""
    hosts = num_ranks // per_host
    mates, twins = (per_host - 1, 0), (0, hosts - 1)
    of_way: dict[Way, tuple[int, int]] = {
        "host": mates, "host gather": mates, "host scatter": mates, "host sum": mates,
        "hosts": twins, "hosts sum": twins, "hosts chain": (0, min(2, hosts - 1)),
    }  # fmt: skip
    met = [of_way.get(part.way, (per_host - 1, num_ranks - per_host)) for part in transfer.parts]
    return max(inside for inside, _ in met), max(across for _, across in met)


def links(cost_model: CostModel, topology: Topology, reduces: bool) -> tuple[Link, Link]:
    """(inside, across) of a collective: as the topology says, else as the cost model does."""
    own = cost_model.exchange
    inside = own.inside_all_reduce if reduces else own.inside_all_to_all
    across = own.across_all_reduce if reduces else own.across_all_to_all
    return topology.inside or inside, topology.across or across


@runtime_checkable  # beartype asks for it where the tests check every call
class Cut(Protocol):
    """How the table of each piece is cut, [n] each."""

    @property
    def host_parts(self) -> Indices:
        """Row ranges in the piece's host, of schemes that sum bags there; else 0."""

    @property
    def column_parts(self) -> Indices:
        """Ranges of columns."""

    @property
    def host_columns(self) -> Indices | Floats:
        """Pieces of the host that hold columns of the same rows."""


def counts_of(each: Each, load: Loads, cut: Cut, num_ranks: int) -> Floats:
    """How many of something each piece has [n], over all ranks that ask for its rows; of replicas, on each rank."""
    if each in _OF_PIECES:
        found: Floats = getattr(load, _OF_PIECES[each])
        return found
    if each in OF_HOSTS:
        return counts_of(OF_HOSTS[each], load, cut, num_ranks) / np.maximum(cut.host_columns, 1)
    if each in ("route", "row route"):
        return num_ranks * (load.shards if each == "route" else load.row_shards)
    if each == "padded replica number":
        padded = COLUMN_BLOCK * np.ceil(load.columns / COLUMN_BLOCK)
        return np.where(load.is_frozen, 0.0, load.num_rows * padded)
    if each in ("row number", "distinct row number"):
        return (load.rows_asked if each == "distinct row number" else load.rows_out - load.bags) * load.columns
    if each in ("replica number", "replica row"):
        return np.where(load.is_frozen, 0.0, load.num_rows * (load.columns if each == "replica number" else 1.0))
    if each == "row statistic":
        numbers = np.array([ROW_STATISTICS.get(name, (0, 0))[1] for name in load.optimizers], np.float64)
        return numbers[load.optimizer] * load.distinct * np.ceil(load.columns / COLUMN_BLOCK) * (cut.column_parts - 1.0)
    if each in ("summed bag number", "handed bag number"):
        is_one = cut.host_parts == 1 if each == "handed bag number" else cut.host_parts > 1
        return np.where(is_one, load.bags * load.columns, 0.0)
    is_summed = cut.host_parts > 0
    numbers = load.bags * load.columns
    if each == "bag number":
        return np.where(is_summed, 0.0, numbers)
    return np.where(is_summed, numbers / (np.maximum(cut.host_parts, 1) if each == "whole bag number" else 1.0), 0.0)


_OF_PIECES: dict[Each, str] = {"bag": "lengths", "id": "ids", "weight": "weights"}
OF_HOSTS: dict[Each, Each] = {
    "host bag": "bag", "host id": "id", "host weight": "weight", "host route": "route", "host row route": "row route",
}  # fmt: skip
"""What all pieces of a host that hold columns of the same rows have once."""


def pair_bytes(part: Part, num_ranks: int, per_host: int) -> float:
    """Bytes of a part that travels between ranks whatever their pieces are, to one rank from all."""
    return float(part.num_bytes * (num_ranks // per_host if part.each == "twin pair" else num_ranks))


PAIRS: tuple[Each, ...] = ("pair", "twin pair")
"""Of parts that travel whatever pieces there are."""


def piece_bytes(transfers: Iterable[Transfer], names: Sequence[str], load: Loads, cut: Cut, num_ranks: int) -> Floats:
    """Bytes of each piece [n] in the transfers of tables of these names, over all ranks that ask for its rows."""
    parts = [part for transfer in transfers if transfer.name in names for part in transfer.parts]
    return sum((bytes_of(part, load, cut, num_ranks) for part in parts), np.zeros(len(load.ids)))


def bytes_of(part: Part, load: Loads, cut: Cut, num_ranks: int) -> Floats:
    """Bytes of each piece [n] in one part of a transfer."""
    found = part.num_bytes * counts_of(part.each, load, cut, num_ranks)
    if part.block_bytes:
        blocks = replace(load, columns=np.ceil(load.columns / COLUMN_BLOCK))
        found = found + part.block_bytes * counts_of(part.each, blocks, cut, num_ranks)
    return found


OF_REPLICAS: tuple[Each, ...] = ("replica number", "padded replica number", "replica row")
"""What is counted of replicas."""


def codec_seconds(part: Part, to_owners: bool, cost: ExchangeCost, hosts: int) -> tuple[float, float]:
    """Seconds of writing and reading a byte of a part: on the rank, or in the host, that has the rows, or of a sum on
    every rank; and together on all ranks that ask."""
    if part.codec.is_whole:
        return 0.0, 0.0
    write_s, read_s = (part.byte_numbers * each for each in cost.codec_seconds(part.codec.name, is_drawn=to_owners))
    if part.way == "hosts sum":  # the sum of a host, and of a piece the total; both are read whole
        return write_s * (1 + 1 / hosts) + 2 * read_s, 0.0
    return (read_s, write_s) if to_owners else (write_s, read_s)


def collectives(
    transfers: Sequence[Transfer], placement: Placement, sharded: Loads, replicated: Loads, cost: ExchangeCost
) -> tuple[Collective, ...]:
    """What each rank sends and receives in the transfers of a step. Every rank has an equal slice of the batch."""
    return tuple(_collective(transfer, placement, (sharded, replicated), cost) for transfer in transfers)


def _collective(transfer: Transfer, placement: Placement, loads: tuple[Loads, Loads], cost: ExchangeCost) -> Collective:
    ranks, (sharded, replicated), codec_s = placement.num_ranks, loads, np.zeros(placement.num_ranks)
    total = (np.zeros(ranks),) * 4
    for part in transfer.parts:
        if part.each == "step":
            amounts = np.full(ranks, float(part.num_bytes))
        elif part.each in PAIRS:
            amounts = np.full(ranks, pair_bytes(part, ranks, placement.per_host))
        elif part.each in OF_REPLICAS:
            amounts = np.full(ranks, bytes_of(part, replicated, NOT_CUT, ranks).sum())
        else:
            amounts = placement.by_rank(bytes_of(part, sharded, placement, ranks))
        levels = _levels(part.way, amounts, placement)
        if not part.codec.is_whole:
            owner_s, askers_s = codec_seconds(part, transfer.to_owners, cost, ranks // placement.per_host)
            codec_s = codec_s + owner_s * _held(part.way, amounts, placement) + askers_s * amounts.sum() / ranks
        if not transfer.to_owners:  # the way there, backwards
            levels = levels[2], levels[3], levels[0], levels[1]
        total = total[0] + levels[0], total[1] + levels[1], total[2] + levels[2], total[3] + levels[3]
    return Collective(
        name=transfer.name,
        stage=transfer.stage,
        sent_inside=total[0],
        sent_across=total[1],
        received_inside=total[2],
        received_across=total[3],
        reduces=transfer.is_sum,
        times=transfer.times,
        path=transfer.path,
        peers=peers_of(transfer, ranks, placement.per_host),
        codec_s=codec_s,
    )


def _held(way: Way, amounts: Floats, placement: Placement) -> Floats:
    """[R]: what each rank writes or reads of `amounts` [R]; a host's ranks share what it has summed."""
    if way != "hosts":
        return amounts
    return np.bincount(placement.host, amounts)[placement.host] / placement.per_host


class _Whole:
    """Replicas are not cut."""

    host_parts = column_parts = host_columns = np.zeros(1, np.int64)


NOT_CUT = _Whole()


def _levels(way: Way, amounts: Floats, placement: Placement) -> tuple[Floats, Floats, Floats, Floats]:
    """(sent inside, sent across, received inside, received across) by every rank [R], where `amounts` [R] belong to the
    rows of each rank, or are what each rank has."""
    ranks, per_host, host = placement.num_ranks, placement.per_host, placement.host
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
    near, _ = alike_shares(way, ranks, per_host)
    far = np.array([alike_shares(way, ranks, per_host, number)[1] for number in range(hosts)])
    inside, across = near * amounts, far[host] * amounts
    return inside, across, inside, across
