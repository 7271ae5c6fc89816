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

from meseta.comm import ExchangeScope, PendingCollective, World
from meseta.embedding.input_dist import InputDist
from meseta.embedding.message_format import MessageFormat
from meseta.embedding.routes import BucketKey, Routing
from meseta.ops.jagged import permute_segments
from meseta.spec.transfer import NUM_HEADER_FIELDS

RouteRows = dict[tuple[int, int], Tensor]
"""By owner and number of its route: [rows, columns] of a route that is not pooled."""


class HierarchicalExchange:
    """The ranks that one rank meets in both levels, and what it hands on between them."""

    def __init__(self, routing: Routing, world: World, tables: Sequence[str]) -> None:
        """`tables` are those whose rows travel."""
        self._routing, self._world, self._tables = routing, world, tables
        self.cross_host_peers = tuple(routing.cross_host_peers(world.rank))
        """This rank and those of its place in the other hosts."""
        self.host_ranks = tuple(routing.host_ranks(world.rank))
        """All ranks of this host."""
        self.host_index = world.rank // routing.ranks_per_host
        self.arrival_order = tuple(twin for mate in self.host_ranks for twin in routing.cross_host_peers(mate))
        """All ranks, in the order in which their counts and ids come: by the mate that hands them on."""
        self.host_buckets = routing.host_buckets[self.host_index]
        """What the host looks up, in the order in which twins send it."""
        self.num_peer_counts = self._message_length(self.host_buckets)
        """Numbers that a twin tells of its counts."""
        routes = {mate: [route.bucket for route in routing.routes_by_owner[mate]] for mate in self.host_ranks}
        self.num_rank_counts = {mate: self._message_length(slots) for mate, slots in routes.items()}
        """Numbers that each rank of this host is told of the counts of one other rank."""
        index = {slot: number for number, slot in enumerate(self.host_buckets)}
        self._bucket_indices = {mate: [index[slot] for slot in slots] for mate, slots in routes.items()}
        """Of each rank of this host: places in `slots` of its routes."""
        self._gather_index = torch.tensor(self._second_hop_positions(), device=world.device)

    def select_row_buckets(self, slots: Sequence[BucketKey]) -> list[BucketKey]:
        """Those of some slots that rows are counted of."""
        return [slot for slot in slots if slot in self._routing.row_buckets]

    def _message_length(self, slots: Sequence[BucketKey]) -> int:
        return NUM_HEADER_FIELDS + len(slots) + len(self.select_row_buckets(slots))

    def _second_hop_positions(self) -> list[int]:
        """Where what is handed on to each mate lies in what all twins have told."""
        at = {slot: NUM_HEADER_FIELDS + index for index, slot in enumerate(self.host_buckets)}
        rows_at = {
            slot: NUM_HEADER_FIELDS + len(self.host_buckets) + i
            for i, slot in enumerate(self.select_row_buckets(self.host_buckets))
        }
        places = []
        for mate in self.host_ranks:
            slots = [route.bucket for route in self._routing.routes_by_owner[mate]]
            told = [
                *range(NUM_HEADER_FIELDS),
                *(at[slot] for slot in slots),
                *(rows_at[s] for s in self.select_row_buckets(slots)),
            ]
            places += [
                twin * self.num_peer_counts + place for twin in range(len(self.cross_host_peers)) for place in told
            ]
        return places

    def forward_counts_within_host(self, told: Tensor) -> PendingCollective:
        """Begin to give each rank of the host what twins have told of its routes."""
        send, receive = [0] * self._world.size, [0] * self._world.size
        for mate in self.host_ranks:
            send[mate] = len(self.cross_host_peers) * self.num_rank_counts[mate]
            receive[mate] = len(self.cross_host_peers) * self.num_rank_counts[self._world.rank]
        scope = ExchangeScope(self.host_ranks, self._tables)
        return self._world.all_to_all(told[self._gather_index], send, receive, "counts intra-host", scope=scope)

    def forward_ids_within_host(self, x: InputDist, weights: bool = False) -> PendingCollective:
        """Wait for the ids of twins (their weights), and begin to give each rank of the host those of its routes."""
        pending = x.pending_weights if weights else x.pending_ids
        assert pending is not None
        num_slots, routes = len(self.host_buckets), self._routing.routes_by_owner
        sizes, parts = list[int](), 1 if weights else 2
        for twin in self.cross_host_peers:
            sizes += [] if weights else [x.batch_size_per_rank[twin]] * num_slots
            sizes += self.bucket_counts(x.ids_per_route.forwarded[twin])
        order, send, receive = list[int](), [0] * self._world.size, [0] * self._world.size
        for mate in self.host_ranks:
            order += [
                (parts * at + part) * num_slots + slot
                for at in range(len(self.cross_host_peers))
                for part in range(parts)
                for slot in self._bucket_indices[mate]
            ]
            send[mate] = sum(self._num_forwarded(x, twin, mate, weights) for twin in self.cross_host_peers)
            twins = self._routing.cross_host_peers(mate)
            k = 0 if weights else len(routes[self._world.rank])
            receive[mate] = sum(k * x.batch_size_per_rank[twin] + sum(x.ids_per_route.served[twin]) for twin in twins)
        name = "weights intra-host" if weights else "ids intra-host"
        packed = permute_segments(pending.wait(), sizes, order)
        return self._world.all_to_all(
            packed, send, receive, name, scope=ExchangeScope(self.host_ranks, self._tables, x.batch_tag)
        )

    def _num_forwarded(self, x: InputDist, twin: int, mate: int, weights: bool) -> int:
        lengths = 0 if weights else x.batch_size_per_rank[twin] * len(self._routing.routes_by_owner[mate])
        return lengths + sum(x.ids_per_route.forwarded[twin][mate])

    def bucket_counts(self, by_owner: Mapping[int, Sequence[int]]) -> list[int]:
        """Of each of `slots`: its count, told by owner and route."""
        counts = {
            route.bucket: number
            for owner, numbers in by_owner.items()
            for route, number in zip(self._routing.routes_by_owner[owner], numbers, strict=True)
        }
        return [counts[slot] for slot in self.host_buckets]


@dataclass(frozen=True)
class InterHostEmbeddings:
    """What came across hosts, as it was written; rows are decoded."""

    bags: list[Tensor]
    """Of each host: whole bags that it has added up."""
    direct: dict[int, Tensor]
    """By owner: bags that its host has handed on."""
    rows: RouteRows


def send_to_cross_host_peers(
    routing: Routing,
    world: World,
    x: InputDist,
    answers: Sequence[Sequence[Tensor]],
    wire: MessageFormat,
    tables: Sequence[str],
) -> Callable[[], InterHostEmbeddings]:
    """Add up the partial bags of this host for the samples of this rank and its twins, and begin to give the twins
    theirs, with the bags and rows that owners of this host have for them; what is returned waits for what they give."""
    twins, host = routing.cross_host_peers(world.rank), world.rank // routing.ranks_per_host
    packed = _pack_for_cross_host_peers(routing, world.rank, x, answers, wire)
    send, receive = [0] * world.size, [0] * world.size
    hosts, mine = range(len(routing.host_widths)), x.batch_size_per_rank[world.rank]
    messages = [routing.cross_host_message(h, mine, x.rows_per_route.requested) for h in hosts]
    for message, twin in zip(messages, twins, strict=True):
        [send[twin]] = wire.message_sizes(
            [routing.cross_host_message(host, x.batch_size_per_rank[twin], x.rows_per_route.forwarded.get(twin, {}))]
        )
        [receive[twin]] = wire.message_sizes([message])
    pending = world.all_to_all(
        packed, send, receive, "embeddings inter-host", scope=ExchangeScope(twins, tables, x.batch_tag)
    )

    def take() -> InterHostEmbeddings:
        bags, direct, rows = list[Tensor](), dict[int, Tensor](), RouteRows()
        for h, (of_host, *others) in zip(hosts, wire.views(pending.wait(), messages), strict=True):
            owners = routing.forwarding_ranks(h)
            bags.append(of_host)
            direct.update(zip(owners, others, strict=False))
            of_routes = zip(
                routing.host_unpooled_routes[h], others[len(owners) :], messages[h][1 + len(owners) :], strict=True
            )
            rows.update({place: wire.decode(view, matrix) for place, view, matrix in of_routes})
        return InterHostEmbeddings(bags, direct, rows)

    return take


def _pack_for_cross_host_peers(
    routing: Routing, rank: int, x: InputDist, answers: Sequence[Sequence[Tensor]], wire: MessageFormat
) -> Tensor:
    """Whole bags of this host, direct bags and rows of its owners, for one twin after the other; what is handed on is
    left as it was written."""
    twins, host = routing.cross_host_peers(rank), rank // routing.ranks_per_host
    sizes = [x.batch_size_per_rank[twin] for twin in twins]
    partial = [answers[mate][1] for mate in routing.host_ranks(rank)]
    whole = wire.pack(routing.host_bag_layout(host, sum(sizes)), partial, routing.host_reduce_moves[host])
    if not routing.is_hierarchical:
        return whole.view(-1)
    handed_on = [answers[owner][0].split(sizes) for owner in routing.forwarding_ranks(host)]
    for owner, k in routing.host_unpooled_routes[host]:
        rows = answers[owner][2 + k - routing.host_reduced[owner].stop]
        handed_on.append(rows.split([x.rows_per_route.forwarded[twin][owner][k] for twin in twins]))
    by_twin = zip(whole.split(sizes), *handed_on, strict=True)
    return torch.cat([part.reshape(-1) for parts in by_twin for part in parts])


@dataclass(frozen=True)
class InterHostGradients:
    """Gradients that came to this host for the samples of this rank's twins."""

    bags: Tensor
    """[samples of this rank and its twins, columns]: of the whole bags that the host has added up."""
    direct: dict[int, Tensor]
    """By owner, as they were written: [the same samples, any] of its direct bags."""
    rows: RouteRows
    """The same of rows, [ids, any]."""


def send_gradients_to_cross_host_peers(
    routing: Routing, world: World, x: InputDist, buffer: Tensor, wire: MessageFormat
) -> Callable[[], InterHostGradients]:
    """The way back: begin to give each host the gradients of its bags and rows, which lie in `buffer` as
    `cross_host_message` says; what is returned waits for those of this host."""
    twins, host = routing.cross_host_peers(world.rank), world.rank // routing.ranks_per_host
    send, receive = [0] * world.size, [0] * world.size
    messages = [
        routing.cross_host_message(host, x.batch_size_per_rank[twin], x.ids_per_route.forwarded.get(twin, {}))
        for twin in twins
    ]
    for h, twin in enumerate(twins):
        [send[twin]] = wire.message_sizes(
            [routing.cross_host_message(h, x.batch_size_per_rank[world.rank], x.ids_per_route.requested)]
        )
        [receive[twin]] = wire.message_sizes([messages[h]])
    scope = ExchangeScope(twins, batch_tag=x.batch_tag)
    pending = world.all_to_all(buffer, send, receive, "gradients inter-host", scope=scope)

    def take() -> InterHostGradients:
        received, bags = (
            pending.wait(),
            routing.host_bag_layout(host, sum(x.batch_size_per_rank[twin] for twin in twins)),
        )
        if not routing.is_hierarchical:
            [[view]] = wire.views(received, [[bags]])
            return InterHostGradients(wire.decode(view, bags), {}, {})
        whole, *handed_on = (torch.cat(parts) for parts in zip(*wire.views(received, messages), strict=True))
        owners = routing.forwarding_ranks(host)
        rows = zip(routing.host_unpooled_routes[host], handed_on[len(owners) :], strict=True)
        return InterHostGradients(wire.decode(whole, bags), dict(zip(owners, handed_on, strict=False)), dict(rows))

    return take


def order_by_rank(routing: Routing, rank: int, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """What each rank has given to this one, where `parts` are by the rank that has handed it on, counts[r] rows of rank
    r: its own, or those of its twins, see `Routing.requesting_ranks`."""
    return order_by_cross_host_peer(routing, rank, parts, counts) if routing.is_hierarchical else list(parts)


def order_by_cross_host_peer(
    routing: Routing, rank: int, parts: Sequence[Tensor], counts: Sequence[int]
) -> list[Tensor]:
    """The same of what ranks of this host have handed on for their twins, whatever way all else takes."""
    pieces: dict[int, Tensor] = {}
    for mate in routing.host_ranks(rank):
        twins = routing.cross_host_peers(mate)
        pieces |= zip(twins, parts[mate].split([counts[r] for r in twins]), strict=True)
    return [pieces[r] for r in range(len(parts))]
