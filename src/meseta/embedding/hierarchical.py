"""Hierarchical exchanges of ids, embeddings and gradients, with one hop between hosts and one inside a host."""

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

# Cross-host peers are the ranks with the same local index on all hosts. Example on two hosts of two ranks, with ids of
# rank 3 that rank 0 owns:
#
#     ids           3 -> 1 (between hosts, to the peer in the owner's host)     1 -> 0 (inside the host, to the owner)
#     embeddings    1 <- 0 (inside the host, partial bags and rows)             3 <- 1 (between hosts, bags and rows)
#
# These are the two steps of section 3.1 of arXiv 2403.00877. Data for ranks of the same host takes only the second hop.
# Gradients take the route of ids.
RouteRows = dict[tuple[int, int], Tensor]
"""Rows [rows, columns] of unpooled routes, by (owner, index of the owner's route)."""


class HierarchicalExchange:
    """Ranks of both hops of a rank, and the ids and counts that it forwards."""

    def __init__(self, routing: Routing, world: World, tables: Sequence[str]) -> None:
        """Create the exchange. `tables` are the names of the tables in error messages."""
        self._routing, self._world, self._tables = routing, world, tables
        self.cross_host_peers = tuple(routing.cross_host_peers(world.rank))
        self.host_ranks = tuple(routing.host_ranks(world.rank))
        self.host_index = world.rank // routing.ranks_per_host
        self.arrival_order = tuple(
            peer for host_rank in self.host_ranks for peer in routing.cross_host_peers(host_rank)
        )
        """All ranks in the order in which their counts and ids arrive, as the forwarding rank determines it."""
        self.host_buckets = routing.host_buckets[self.host_index]
        """Buckets that ranks of this host look up, in the order in which peers send them."""
        self.num_peer_counts = self._message_length(self.host_buckets)
        """Number of values that each peer sends in the exchange of counts."""
        routes = {
            host_rank: [route.bucket for route in routing.routes_by_owner[host_rank]] for host_rank in self.host_ranks
        }
        self.num_rank_counts = {host_rank: self._message_length(slots) for host_rank, slots in routes.items()}
        """Number of values that each rank of this host receives about one other rank."""
        index = {slot: number for number, slot in enumerate(self.host_buckets)}
        self._bucket_indices = {host_rank: [index[slot] for slot in slots] for host_rank, slots in routes.items()}
        """Indices in `host_buckets` of the routes of each rank of this host."""
        self._gather_index = torch.tensor(self._second_hop_positions(), device=world.device)

    def select_row_buckets(self, slots: Sequence[BucketKey]) -> list[BucketKey]:
        """Return the buckets whose distinct rows are counted."""
        return [slot for slot in slots if slot in self._routing.row_buckets]

    def _message_length(self, slots: Sequence[BucketKey]) -> int:
        return NUM_HEADER_FIELDS + len(slots) + len(self.select_row_buckets(slots))

    def _second_hop_positions(self) -> list[int]:
        positions = {slot: NUM_HEADER_FIELDS + index for index, slot in enumerate(self.host_buckets)}
        row_positions = {
            slot: NUM_HEADER_FIELDS + len(self.host_buckets) + i
            for i, slot in enumerate(self.select_row_buckets(self.host_buckets))
        }
        places = []
        for host_rank in self.host_ranks:
            slots = [route.bucket for route in self._routing.routes_by_owner[host_rank]]
            message = [
                *range(NUM_HEADER_FIELDS),
                *(positions[slot] for slot in slots),
                *(row_positions[s] for s in self.select_row_buckets(slots)),
            ]
            places += [
                peer * self.num_peer_counts + place for peer in range(len(self.cross_host_peers)) for place in message
            ]
        return places

    def forward_counts_within_host(self, received: Tensor) -> PendingCollective:
        """Start to forward the counts of peers to the ranks of this host."""
        send, receive = [0] * self._world.size, [0] * self._world.size
        for host_rank in self.host_ranks:
            send[host_rank] = len(self.cross_host_peers) * self.num_rank_counts[host_rank]
            receive[host_rank] = len(self.cross_host_peers) * self.num_rank_counts[self._world.rank]
        scope = ExchangeScope(self.host_ranks, self._tables)
        return self._world.all_to_all(received[self._gather_index], send, receive, "counts intra-host", scope=scope)

    def forward_ids_within_host(self, x: InputDist, weights: bool = False) -> PendingCollective:
        """Wait for ids or weights of peers, and start to forward them to the ranks of this host."""
        pending = x.pending_weights if weights else x.pending_ids
        assert pending is not None
        num_slots, routes = len(self.host_buckets), self._routing.routes_by_owner
        sizes, parts = list[int](), 1 if weights else 2
        for peer in self.cross_host_peers:
            sizes += [] if weights else [x.batch_size_per_rank[peer]] * num_slots
            sizes += self.bucket_counts(x.ids_per_route.forwarded[peer])
        order, send, receive = list[int](), [0] * self._world.size, [0] * self._world.size
        for host_rank in self.host_ranks:
            order += [
                (parts * at + part) * num_slots + slot
                for at in range(len(self.cross_host_peers))
                for part in range(parts)
                for slot in self._bucket_indices[host_rank]
            ]
            send[host_rank] = sum(self._num_forwarded(x, peer, host_rank, weights) for peer in self.cross_host_peers)
            peers = self._routing.cross_host_peers(host_rank)
            k = 0 if weights else len(routes[self._world.rank])
            receive[host_rank] = sum(
                k * x.batch_size_per_rank[peer] + sum(x.ids_per_route.served[peer]) for peer in peers
            )
        name = "weights intra-host" if weights else "ids intra-host"
        packed = permute_segments(pending.wait(), sizes, order)
        return self._world.all_to_all(
            packed, send, receive, name, scope=ExchangeScope(self.host_ranks, self._tables, x.batch_tag)
        )

    def _num_forwarded(self, x: InputDist, peer: int, host_rank: int, weights: bool) -> int:
        lengths = 0 if weights else x.batch_size_per_rank[peer] * len(self._routing.routes_by_owner[host_rank])
        return lengths + sum(x.ids_per_route.forwarded[peer][host_rank])

    def bucket_counts(self, by_owner: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the counts of `host_buckets`, given those of each owner and route."""
        counts = {
            route.bucket: number
            for owner, numbers in by_owner.items()
            for route, number in zip(self._routing.routes_by_owner[owner], numbers, strict=True)
        }
        return [counts[slot] for slot in self.host_buckets]


@dataclass(frozen=True)
class InterHostEmbeddings:
    """Embeddings received from all hosts. Bags are still encoded."""

    bags: list[Tensor]
    """Whole bags of each host, which are sums of partial bags."""
    direct: dict[int, Tensor]
    """Bags that owners send without a sum inside their host, by owner."""
    rows: RouteRows


def send_to_cross_host_peers(
    routing: Routing,
    world: World,
    x: InputDist,
    views: Sequence[Sequence[Tensor]],
    message_format: MessageFormat,
    tables: Sequence[str],
) -> Callable[[], InterHostEmbeddings]:
    """Add the partial bags of this host, and start to send embeddings to the peers whose samples they belong to.

    Peers also receive the direct bags and rows of owners in this host. Returns a function that waits for the embeddings
    of this rank's samples.
    """
    peers, host = routing.cross_host_peers(world.rank), world.rank // routing.ranks_per_host
    packed = _pack_for_cross_host_peers(routing, world.rank, x, views, message_format)
    send, receive = [0] * world.size, [0] * world.size
    hosts, batch_size = range(len(routing.host_widths)), x.batch_size_per_rank[world.rank]
    messages = [routing.cross_host_message(h, batch_size, x.rows_per_route.requested) for h in hosts]
    for message, peer in zip(messages, peers, strict=True):
        [send[peer]] = message_format.message_sizes(
            [routing.cross_host_message(host, x.batch_size_per_rank[peer], x.rows_per_route.forwarded.get(peer, {}))]
        )
        [receive[peer]] = message_format.message_sizes([message])
    pending = world.all_to_all(
        packed, send, receive, "embeddings inter-host", scope=ExchangeScope(peers, tables, x.batch_tag)
    )

    def wait_for_embeddings() -> InterHostEmbeddings:
        bags, direct, rows = list[Tensor](), dict[int, Tensor](), RouteRows()
        for h, (host_bags, *other_views) in zip(hosts, message_format.views(pending.wait(), messages), strict=True):
            owners = routing.forwarding_ranks(h)
            bags.append(host_bags)
            direct.update(zip(owners, other_views, strict=False))
            route_views = zip(
                routing.host_unpooled_routes[h], other_views[len(owners) :], messages[h][1 + len(owners) :], strict=True
            )
            rows.update({place: message_format.decode(view, matrix) for place, view, matrix in route_views})
        return InterHostEmbeddings(bags, direct, rows)

    return wait_for_embeddings


def _pack_for_cross_host_peers(
    routing: Routing, rank: int, x: InputDist, views: Sequence[Sequence[Tensor]], message_format: MessageFormat
) -> Tensor:
    """Pack whole bags of this host, then direct bags and rows of its owners, peer by peer."""
    # Direct bags and rows are forwarded as their owners encoded them.
    peers, host = routing.cross_host_peers(rank), rank // routing.ranks_per_host
    sizes = [x.batch_size_per_rank[peer] for peer in peers]
    partial = [views[host_rank][1] for host_rank in routing.host_ranks(rank)]
    whole = message_format.pack(routing.host_bag_layout(host, sum(sizes)), partial, routing.host_reduce_moves[host])
    if not routing.is_hierarchical:
        return whole.view(-1)
    forwarded = [views[owner][0].split(sizes) for owner in routing.forwarding_ranks(host)]
    for owner, k in routing.host_unpooled_routes[host]:
        rows = views[owner][2 + k - routing.host_reduced[owner].stop]
        forwarded.append(rows.split([x.rows_per_route.forwarded[peer][owner][k] for peer in peers]))
    parts_by_peer = zip(whole.split(sizes), *forwarded, strict=True)
    return torch.cat([part.reshape(-1) for parts in parts_by_peer for part in parts])


@dataclass(frozen=True)
class InterHostGradients:
    """Gradients for this host, of the samples of this rank and its cross-host peers."""

    bags: Tensor
    """Gradients of the whole bags of this host [samples, columns]."""
    direct: dict[int, Tensor]
    """Encoded gradients of direct bags [samples, ...], by owner."""
    rows: RouteRows
    """Encoded gradients of rows [ids, ...]."""


def send_gradients_to_cross_host_peers(
    routing: Routing, world: World, x: InputDist, buffer: Tensor, message_format: MessageFormat
) -> Callable[[], InterHostGradients]:
    """Start to send each host the gradients of its bags and rows. `buffer` has the layout of `cross_host_message`.

    Returns a function that waits for the gradients of this host.
    """
    peers, host = routing.cross_host_peers(world.rank), world.rank // routing.ranks_per_host
    send, receive = [0] * world.size, [0] * world.size
    messages = [
        routing.cross_host_message(host, x.batch_size_per_rank[peer], x.ids_per_route.forwarded.get(peer, {}))
        for peer in peers
    ]
    for h, peer in enumerate(peers):
        [send[peer]] = message_format.message_sizes(
            [routing.cross_host_message(h, x.batch_size_per_rank[world.rank], x.ids_per_route.requested)]
        )
        [receive[peer]] = message_format.message_sizes([messages[h]])
    scope = ExchangeScope(peers, batch_tag=x.batch_tag)
    pending = world.all_to_all(buffer, send, receive, "gradients inter-host", scope=scope)

    def take() -> InterHostGradients:
        received, bags = (
            pending.wait(),
            routing.host_bag_layout(host, sum(x.batch_size_per_rank[peer] for peer in peers)),
        )
        if not routing.is_hierarchical:
            [[view]] = message_format.views(received, [[bags]])
            return InterHostGradients(message_format.decode(view, bags), {}, {})
        whole, *forwarded = (torch.cat(parts) for parts in zip(*message_format.views(received, messages), strict=True))
        owners = routing.forwarding_ranks(host)
        rows = zip(routing.host_unpooled_routes[host], forwarded[len(owners) :], strict=True)
        return InterHostGradients(
            message_format.decode(whole, bags), dict(zip(owners, forwarded, strict=False)), dict(rows)
        )

    return take


def order_by_rank(routing: Routing, rank: int, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Order received parts by requesting rank.

    `parts` are ordered by sending rank. With a hierarchical exchange, a part has the rows of all ranks in
    `Routing.requesting_ranks`. `counts` is the number of rows of each requesting rank.
    """
    return order_by_cross_host_peer(routing, rank, parts, counts) if routing.is_hierarchical else list(parts)


def order_by_cross_host_peer(
    routing: Routing, rank: int, parts: Sequence[Tensor], counts: Sequence[int]
) -> list[Tensor]:
    """Order parts that ranks of this host forwarded for their cross-host peers by requesting rank."""
    pieces: dict[int, Tensor] = {}
    for host_rank in routing.host_ranks(rank):
        peers = routing.cross_host_peers(host_rank)
        pieces |= zip(peers, parts[host_rank].split([counts[r] for r in peers]), strict=True)
    return [pieces[r] for r in range(len(parts))]
