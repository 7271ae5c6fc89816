"""Bytes that every rank sends and receives in the collectives of a step, by level of the network, and their seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from meseta.planner.cost.loads import Indices, Loads
from meseta.planner.cost.placement import Placement
from meseta.planner.cost.reuse import Floats
from meseta.spec import COLUMN_BLOCK, CostModel, Link, Topology
from meseta.spec.stages import Component
from meseta.spec.transfer import ROW_STATISTICS, Each, Part, Transfer, Way, alike_shares


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
    if each in _OF_HOSTS:
        return counts_of(_OF_HOSTS[each], load, cut, num_ranks) / np.maximum(cut.host_columns, 1)
    if each in ("route", "row route"):
        return num_ranks * (load.shards if each == "route" else load.row_shards)
    if each in ("row number", "distinct row number"):
        return (load.rows_asked if each == "distinct row number" else load.rows_out - load.bags) * load.columns
    if each in ("replica number", "replica row"):
        return np.where(load.is_frozen, 0.0, load.num_rows * (load.columns if each == "replica number" else 1.0))
    if each == "row statistic":
        numbers = np.array([ROW_STATISTICS.get(name, (0, 0))[1] for name in load.optimizers], np.float64)
        return numbers[load.optimizer] * load.distinct * np.ceil(load.columns / COLUMN_BLOCK) * (cut.column_parts - 1.0)
    is_summed = cut.host_parts > 0
    numbers = load.bags * load.columns
    if each == "bag number":
        return np.where(is_summed, 0.0, numbers)
    return np.where(is_summed, numbers / (np.maximum(cut.host_parts, 1) if each == "whole bag number" else 1.0), 0.0)


_OF_PIECES: dict[Each, str] = {"bag": "lengths", "id": "ids", "weight": "weights"}
_OF_HOSTS: dict[Each, Each] = {
    "host bag": "bag", "host id": "id", "host weight": "weight", "host route": "route", "host row route": "row route",
}  # fmt: skip
"""What all pieces of a host that hold columns of the same rows have once."""


def pair_bytes(part: Part, num_ranks: int, per_host: int) -> float:
    """Bytes of a part that travels between ranks whatever their pieces are, to one rank from all."""
    return part.num_bytes * (num_ranks // per_host if part.each == "twin pair" else num_ranks)


PAIRS: tuple[Each, ...] = ("pair", "twin pair")
"""Of parts that travel whatever pieces there are."""


def piece_bytes(transfers: Iterable[Transfer], names: Sequence[str], load: Loads, cut: Cut, num_ranks: int) -> Floats:
    """Bytes of each piece [n] in the transfers of tables of these names, over all ranks that ask for its rows."""
    parts = [part for transfer in transfers if transfer.name in names for part in transfer.parts]
    return sum((bytes_of(part, load, cut, num_ranks) for part in parts), np.zeros(len(load.ids)))


def bytes_of(part: Part, load: Loads, cut: Cut, num_ranks: int) -> Floats:
    """Bytes of each piece [n] in one part of a transfer."""
    return part.num_bytes * counts_of(part.each, load, cut, num_ranks)


def collectives(
    transfers: Sequence[Transfer], placement: Placement, sharded: Loads, replicated: Loads
) -> tuple[Collective, ...]:
    """What each rank sends and receives in the transfers of a step. Every rank has an equal slice of the batch."""
    return tuple(_collective(transfer, placement, sharded, replicated) for transfer in transfers)


def _collective(transfer: Transfer, placement: Placement, sharded: Loads, replicated: Loads) -> Collective:
    ranks = placement.num_ranks
    total = (np.zeros(ranks),) * 4
    for part in transfer.parts:
        if part.each == "step":
            amounts = np.full(ranks, float(part.num_bytes))
        elif part.each in PAIRS:
            amounts = np.full(ranks, pair_bytes(part, ranks, placement.per_host))
        elif part.way == "sum":
            amounts = np.full(ranks, bytes_of(part, replicated, _Whole(), ranks).sum())
        else:
            amounts = placement.by_rank(bytes_of(part, sharded, placement, ranks))
        levels = _levels(part.way, amounts, placement)
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
    )


class _Whole:
    """Replicas are not cut."""

    host_parts = column_parts = host_columns = np.zeros(1, np.int64)


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
    near, far = alike_shares(way, ranks, per_host)
    inside, across = near * amounts, far * amounts
    return inside, across, inside, across
