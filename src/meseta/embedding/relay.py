"""What a rank hands on where exchanges have two levels: to ranks of its host for its twins, and to twins for its host.

Twins are the ranks of one place in all hosts. On two hosts of two ranks, ids of rank 3 that rank 0 looks up, and what
comes back:

    ids        3 -> 1 (across: to the twin in the owner's host)    1 -> 0 (inside: to the owner)
    answers    1 <- 0 (inside: partial bags, rows)                 3 <- 1 (across: whole bags, rows)

(the two steps of arXiv 2403.00877, section 3.1.) What stays inside a host takes the second way alone. Gradients return
as ids go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.comm import Pending, Scope, World
from meseta.embedding.exchange import Exchanged
from meseta.embedding.routes import Routing, Slot
from meseta.embedding.wire import Wire
from meseta.ops.jagged import permute_pieces
from meseta.spec.transfer import HEADER

Rows = dict[tuple[int, int], Tensor]
"""By owner and number of its route: [rows, columns] of a route that is not pooled."""


class Relay:
    """The ranks that one rank meets in both levels, and what it hands on between them."""

    def __init__(self, routing: Routing, world: World, tables: Sequence[str]) -> None:
        """`tables` are those whose rows travel."""
        self._routing, self._world, self._tables = routing, world, tables
        self.twins = tuple(routing.peers_across_hosts(world.rank))
        """This rank and those of its place in the other hosts."""
        self.mates = tuple(routing.ranks_of_host(world.rank))
        """All ranks of this host."""
        self.host = world.rank // routing.per_host
        self.arrival = tuple(twin for mate in self.mates for twin in routing.peers_across_hosts(mate))
        """All ranks, in the order in which their counts and ids come: by the mate that hands them on."""
        self.slots = routing.host_slots[self.host]
        """What the host looks up, in the order in which twins send it."""
        self.told_by_twin = self._count_numbers(self.slots)
        """Numbers that a twin tells of its counts."""
        routes = {mate: [route.slot for route in routing.by_rank[mate]] for mate in self.mates}
        self.numbers_of = {mate: self._count_numbers(slots) for mate, slots in routes.items()}
        """Numbers that each rank of this host is told of the counts of one other rank."""
        index = {slot: number for number, slot in enumerate(self.slots)}
        self._asked = {mate: [index[slot] for slot in slots] for mate, slots in routes.items()}
        """Of each rank of this host: places in `slots` of its routes."""
        self._gather = torch.tensor(self._inside_counts(), device=world.device)

    def row_slots(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those of some slots that rows are counted of."""
        return [slot for slot in slots if slot in self._routing.row_slots]

    def _count_numbers(self, slots: Sequence[Slot]) -> int:
        return HEADER + len(slots) + len(self.row_slots(slots))

    def _inside_counts(self) -> list[int]:
        """Where what is handed on to each mate lies in what all twins have told."""
        at = {slot: HEADER + index for index, slot in enumerate(self.slots)}
        rows_at = {slot: HEADER + len(self.slots) + i for i, slot in enumerate(self.row_slots(self.slots))}
        places = []
        for mate in self.mates:
            slots = [route.slot for route in self._routing.by_rank[mate]]
            told = [*range(HEADER), *(at[slot] for slot in slots), *(rows_at[s] for s in self.row_slots(slots))]
            places += [twin * self.told_by_twin + place for twin in range(len(self.twins)) for place in told]
        return places

    def hand_on_counts(self, told: Tensor) -> Pending:
        """Begin to give each rank of the host what twins have told of its routes."""
        send, receive = [0] * self._world.size, [0] * self._world.size
        for mate in self.mates:
            send[mate] = len(self.twins) * self.numbers_of[mate]
            receive[mate] = len(self.twins) * self.numbers_of[self._world.rank]
        scope = Scope(self.mates, self._tables)
        return self._world.all_to_all(told[self._gather], send, receive, "counts inside", scope=scope)

    def hand_on_ids(self, x: Exchanged, weights: bool = False) -> Pending:
        """Wait for the ids of twins (their weights), and begin to give each rank of the host those of its routes."""
        pending = x.weights if weights else x.payload
        assert pending is not None
        num_slots, routes = len(self.slots), self._routing.by_rank
        sizes, parts = list[int](), 1 if weights else 2
        for twin in self.twins:
            sizes += [] if weights else [x.batch_sizes[twin]] * num_slots
            sizes += self.slot_counts(x.ids_on.passed[twin])
        order, send, receive = list[int](), [0] * self._world.size, [0] * self._world.size
        for mate in self.mates:
            order += [
                (parts * at + part) * num_slots + slot
                for at in range(len(self.twins))
                for part in range(parts)
                for slot in self._asked[mate]
            ]
            send[mate] = sum(self._numbers(x, twin, mate, weights) for twin in self.twins)
            twins = self._routing.peers_across_hosts(mate)
            k = 0 if weights else len(routes[self._world.rank])
            receive[mate] = sum(k * x.batch_sizes[twin] + sum(x.ids_on.answered[twin]) for twin in twins)
        name = "weights inside" if weights else "ids inside"
        packed = permute_pieces(pending.wait(), sizes, order)
        return self._world.all_to_all(packed, send, receive, name, scope=Scope(self.mates, self._tables, x.mark))

    def _numbers(self, x: Exchanged, twin: int, mate: int, weights: bool) -> int:
        lengths = 0 if weights else x.batch_sizes[twin] * len(self._routing.by_rank[mate])
        return lengths + sum(x.ids_on.passed[twin][mate])

    def slot_counts(self, by_owner: Mapping[int, Sequence[int]]) -> list[int]:
        """Of each of `slots`: its count, told by owner and route."""
        counts = {
            route.slot: number
            for owner, numbers in by_owner.items()
            for route, number in zip(self._routing.by_rank[owner], numbers, strict=True)
        }
        return [counts[slot] for slot in self.slots]


@dataclass(frozen=True)
class FromHosts:
    """What came across hosts, as it was written; rows are decoded."""

    bags: list[Tensor]
    """Of each host: whole bags that it has added up."""
    direct: dict[int, Tensor]
    """By owner: bags that its host has handed on."""
    rows: Rows


def give_to_twins(
    routing: Routing, world: World, x: Exchanged, answers: Sequence[Sequence[Tensor]], wire: Wire, tables: Sequence[str]
) -> Callable[[], FromHosts]:
    """Add up the partial bags of this host for the samples of this rank and its twins, and begin to give the twins
    theirs, with the bags and rows that owners of this host have for them; what is returned waits for what they give."""
    twins, host = routing.peers_across_hosts(world.rank), world.rank // routing.per_host
    packed = _for_twins(routing, world.rank, x, answers, wire)
    send, receive = [0] * world.size, [0] * world.size
    hosts, mine = range(len(routing.host_widths)), x.batch_sizes[world.rank]
    messages = [routing.twin_message(h, mine, x.rows_on.asked) for h in hosts]
    for message, twin in zip(messages, twins, strict=True):
        [send[twin]] = wire.sizes([routing.twin_message(host, x.batch_sizes[twin], x.rows_on.passed.get(twin, {}))])
        [receive[twin]] = wire.sizes([message])
    pending = world.all_to_all(packed, send, receive, "whole bags", scope=Scope(twins, tables, x.mark))

    def take() -> FromHosts:
        bags, direct, rows = list[Tensor](), dict[int, Tensor](), Rows()
        for h, (of_host, *others) in zip(hosts, wire.views(pending.wait(), messages), strict=True):
            owners = routing.handing_on(h)
            bags.append(of_host)
            direct.update(zip(owners, others, strict=False))
            of_routes = zip(routing.host_rows[h], others[len(owners) :], messages[h][1 + len(owners) :], strict=True)
            rows.update({place: wire.read(view, matrix) for place, view, matrix in of_routes})
        return FromHosts(bags, direct, rows)

    return take


def _for_twins(routing: Routing, rank: int, x: Exchanged, answers: Sequence[Sequence[Tensor]], wire: Wire) -> Tensor:
    """Whole bags of this host, direct bags and rows of its owners, for one twin after the other; what is handed on is
    left as it was written."""
    twins, host = routing.peers_across_hosts(rank), rank // routing.per_host
    sizes = [x.batch_sizes[twin] for twin in twins]
    partial = [answers[mate][1] for mate in routing.ranks_of_host(rank)]
    whole = wire.packed(routing.host_bags(host, sum(sizes)), partial, routing.host_moves[host])
    if not routing.two_level:
        return whole.view(-1)
    handed_on = [answers[owner][0].split(sizes) for owner in routing.handing_on(host)]
    for owner, k in routing.host_rows[host]:
        rows = answers[owner][2 + k - routing.host_reduced[owner].stop]
        handed_on.append(rows.split([x.rows_on.passed[twin][owner][k] for twin in twins]))
    by_twin = zip(whole.split(sizes), *handed_on, strict=True)
    return torch.cat([part.reshape(-1) for parts in by_twin for part in parts])


@dataclass(frozen=True)
class GradientsOfHost:
    """Gradients that came to this host for the samples of this rank's twins."""

    bags: Tensor
    """[samples of this rank and its twins, columns]: of the whole bags that the host has added up."""
    direct: dict[int, Tensor]
    """By owner, as they were written: [the same samples, any] of its direct bags."""
    rows: Rows
    """The same of rows, [ids, any]."""


def take_from_twins(
    routing: Routing, world: World, x: Exchanged, buffer: Tensor, wire: Wire
) -> Callable[[], GradientsOfHost]:
    """The way back: begin to give each host the gradients of its bags and rows, which lie in `buffer` as
    `twin_message` says; what is returned waits for those of this host."""
    twins, host = routing.peers_across_hosts(world.rank), world.rank // routing.per_host
    send, receive = [0] * world.size, [0] * world.size
    messages = [routing.twin_message(host, x.batch_sizes[twin], x.ids_on.passed.get(twin, {})) for twin in twins]
    for h, twin in enumerate(twins):
        [send[twin]] = wire.sizes([routing.twin_message(h, x.batch_sizes[world.rank], x.ids_on.asked)])
        [receive[twin]] = wire.sizes([messages[h]])
    scope = Scope(twins, batch=x.mark)
    pending = world.all_to_all(buffer, send, receive, "gradients of whole bags", scope=scope)

    def take() -> GradientsOfHost:
        received, bags = pending.wait(), routing.host_bags(host, sum(x.batch_sizes[twin] for twin in twins))
        if not routing.two_level:
            [[view]] = wire.views(received, [[bags]])
            return GradientsOfHost(wire.read(view, bags), {}, {})
        whole, *handed_on = (torch.cat(parts) for parts in zip(*wire.views(received, messages), strict=True))
        owners = routing.handing_on(host)
        rows = zip(routing.host_rows[host], handed_on[len(owners) :], strict=True)
        return GradientsOfHost(wire.read(whole, bags), dict(zip(owners, handed_on, strict=False)), dict(rows))

    return take


def by_rank(routing: Routing, rank: int, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """What each rank has given to this one, where `parts` are by the rank that has handed it on, counts[r] rows of rank
    r: its own, or those of its twins, see `Routing.askers`."""
    return by_twins(routing, rank, parts, counts) if routing.two_level else list(parts)


def by_twins(routing: Routing, rank: int, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The same of what ranks of this host have handed on for their twins, whatever way all else takes."""
    pieces: dict[int, Tensor] = {}
    for mate in routing.ranks_of_host(rank):
        twins = routing.peers_across_hosts(mate)
        pieces |= zip(twins, parts[mate].split([counts[r] for r in twins]), strict=True)
    return [pieces[r] for r in range(len(parts))]
