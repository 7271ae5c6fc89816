"""Hierarchical exchanges of ids, embeddings and gradients, with one hop between hosts and one inside a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from meseta.comm import BatchTotals, ExchangeScope, PendingCollective, World
from meseta.embedding.input_dist import DistinctRows, InputDist, RouteCounts
from meseta.embedding.routes import BucketKey, MessageFormat, Routing
from meseta.ops.bucketize import Buckets
from meseta.ops.common import copy_to_device
from meseta.ops.jagged import permute_segments
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Int
from meseta.spec.transfer import BATCH_SIZE_RADIX, NUM_BATCH_FIELDS, NUM_HEADER_FIELDS, CountsHeader, float_bits

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
    """Start to send each host the gradients of its bags and rows, in `buffer` as in `cross_host_message`. Returns a
    function that waits for this host's."""
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


@dataclass(frozen=True)
class ExchangedCounts:
    """Id counts of all ranks."""

    headers: Sequence[CountsHeader]
    ids_per_route: RouteCounts
    rows_per_route: RouteCounts
    """Number of requested rows. It differs from `ids_per_route` if each distinct row is requested once."""
    range_counts: list[list[int]]
    """Number of ids of this rank, by feature and row range."""
    sent_counts: Sequence[Sequence[int]]
    """Number of ids in each bucket that is sent to a rank in the first hop, by rank."""
    received_counts: Mapping[int, Sequence[int]]
    """Number of ids in each received bucket or route, by the sending rank of the first hop."""


class CountsExchange:
    """Exchange of id counts of one feature group.

    With a hierarchical exchange, the first hop is between cross-host peers. They forward counts inside their hosts, see
    `HierarchicalExchange`.
    """

    # All local counts are in one tensor. One gather selects the data for all ranks of the first hop:
    #
    #     index     0 ... 3               4 ... F + 3   F + 4 ... F + 6       F + 7 ...            ...
    #     value     batch tag and size,   ids of each   feature, sample, id   ids of each row      rows of each
    #               totals of this rank   feature       of the first error    range of row-sharded entry in
    #                                                                         features             `row_buckets`
    #
    #     to r      [CountsHeader: 0 ... 3, F + 4 ... F + 6 | ids of each bucket for r | rows of these buckets]

    def __init__(self, routing: Routing, world: World, tables: Sequence[str], num_features: int) -> None:
        """Create the exchange. `tables` are the names of the tables in error messages."""
        self._routing, self._world, self._tables = routing, world, tables
        self._bucket_positions = {(f, 0): NUM_BATCH_FIELDS + f for f in range(num_features)}
        ranges = [(f, n) for f in routing.row_sharded_features for n in range(len(routing.range_bounds[f]) - 1)]
        self._bucket_positions |= {slot: NUM_HEADER_FIELDS + num_features + index for index, slot in enumerate(ranges)}
        first = NUM_HEADER_FIELDS + num_features + len(ranges)
        self._row_bucket_positions = self._bucket_positions | {
            slot: first + index for index, slot in enumerate(routing.row_buckets)
        }
        header = (*range(NUM_BATCH_FIELDS), *range(NUM_BATCH_FIELDS + num_features, NUM_HEADER_FIELDS + num_features))
        self.hierarchical = HierarchicalExchange(routing, world, tables) if routing.is_hierarchical else None
        """Forwarding inside the host, or `None` if the exchange is flat."""
        self.first_hop_ranks = range(world.size) if self.hierarchical is None else self.hierarchical.cross_host_peers
        self.send_layout = routing.send_layout(world.rank)
        """Buckets that are sent to each rank in the first hop."""
        counts_at = [
            [
                *header,
                *(self._bucket_positions[s] for s in slots),
                *(self._row_bucket_positions[s] for s in slots if s in routing.row_buckets),
            ]
            for slots in (self.send_layout[rank] for rank in self.first_hop_ranks)
        ]
        self._num_sent = [len(places) for places in counts_at]
        self._gather_index = torch.tensor([n for places in counts_at for n in places], device=world.device)

    def pack_local_counts(
        self,
        batch_tag: int,
        totals: BatchTotals,
        ids: KeyedJaggedTensor,
        first_error: Int[Tensor, " 3"],
        buckets: Buckets | None,
        distinct: DistinctRows | None,
    ) -> Int[Tensor, " n"]:
        """Return the local counts of a batch on the device, without a host sync. `totals` are those of this rank."""
        leading = (
            batch_tag * BATCH_SIZE_RADIX + ids.batch_size,
            totals.num_samples,
            totals.num_padding,
            float_bits(totals.weight),
        )
        counts = [*leading, *(b - a for a, b in pairwise(ids.key_offsets))]
        parts = [copy_to_device(counts, torch.int64, self._world.device), first_error]
        parts += [] if buckets is None else [buckets.totals]
        return torch.cat(parts if distinct is None else [*parts, distinct.counts])

    def start(self, local_counts: Int[Tensor, " n"]) -> PendingCollective:
        send, receive = [0] * self._world.size, [0] * self._world.size
        for rank, size in zip(self.first_hop_ranks, self._num_sent, strict=True):
            send[rank], receive[rank] = size, self._num_received
        scope = ExchangeScope(self.first_hop_ranks, self._tables)
        return self._world.all_to_all(local_counts[self._gather_index], send, receive, "counts", scope=scope)

    @property
    def _num_received(self) -> int:
        if self.hierarchical is not None:
            return self.hierarchical.num_peer_counts
        return NUM_HEADER_FIELDS + len(self._routing.routes_by_owner[self._world.rank])

    def wait(self, local_counts: Int[Tensor, " n"], pending: PendingCollective) -> ExchangedCounts:
        """Wait for the counts of all ranks. This is the only host sync of a step."""
        received, hierarchical = pending.wait(), self.hierarchical
        parts = [local_counts, received] + (
            [] if hierarchical is None else [hierarchical.forward_counts_within_host(received).wait()]
        )
        # The host sync. The loss of the previous step is read after it.
        numbers = torch.cat(parts).tolist()
        stop = local_counts.numel() + received.numel()
        local_values, first, last = (
            numbers[: local_counts.numel()],
            numbers[local_counts.numel() : stop],
            numbers[stop:],
        )
        requested = self._counts_by_owner(lambda slot: local_values[self._bucket_positions[slot]])
        sent = [[local_values[self._bucket_positions[slot]] for slot in slots] for slots in self.send_layout]
        range_counts = [
            [local_values[self._bucket_positions[f, n]] for n in range(len(cuts) - 1)]
            for f, cuts in enumerate(self._routing.range_bounds)
        ]
        if hierarchical is None:
            values_by_rank = dict(enumerate(_split_evenly(first, self._num_received)))
            served = {rank: tuple(rank_values[NUM_HEADER_FIELDS:]) for rank, rank_values in values_by_rank.items()}
            counts = RouteCounts(requested, served, {self._world.rank: requested})
            return ExchangedCounts(_parse_headers(values_by_rank), counts, counts, range_counts, sent, served)
        values_by_rank = dict(
            zip(
                hierarchical.arrival_order,
                _split_evenly(last, hierarchical.num_rank_counts[self._world.rank]),
                strict=True,
            )
        )
        values_by_peer = dict(
            zip(hierarchical.cross_host_peers, _split_evenly(first, hierarchical.num_peer_counts), strict=True)
        )
        ids_on, rows_on = self._hierarchical_counts(hierarchical, local_values, values_by_rank, values_by_peer)
        received_counts = {peer: hierarchical.bucket_counts(by_owner) for peer, by_owner in ids_on.forwarded.items()}
        return ExchangedCounts(_parse_headers(values_by_rank), ids_on, rows_on, range_counts, sent, received_counts)

    def _hierarchical_counts(
        self,
        hierarchical: HierarchicalExchange,
        local_values: Sequence[int],
        values_by_rank: Mapping[int, Sequence[int]],
        values_by_peer: Mapping[int, Sequence[int]],
    ) -> tuple[RouteCounts, RouteCounts]:
        ids, rows = dict[int, dict[int, tuple[int, ...]]](), dict[int, dict[int, tuple[int, ...]]]()
        stop = NUM_HEADER_FIELDS + len(hierarchical.host_buckets)
        for peer, peer_values in values_by_peer.items():
            ids_of = dict(zip(hierarchical.host_buckets, peer_values[NUM_HEADER_FIELDS:stop], strict=True))
            rows_of = ids_of | dict(
                zip(hierarchical.select_row_buckets(hierarchical.host_buckets), peer_values[stop:], strict=True)
            )
            ids[peer] = self._counts_by_owner(ids_of.__getitem__, hierarchical.host_ranks)
            rows[peer] = self._counts_by_owner(rows_of.__getitem__, hierarchical.host_ranks)
        rank = self._world.rank
        pooled, stop = (
            self._routing.host_reduced[rank].stop,
            NUM_HEADER_FIELDS + len(self._routing.routes_by_owner[rank]),
        )
        served = {asker: tuple(rank_values[NUM_HEADER_FIELDS:stop]) for asker, rank_values in values_by_rank.items()}
        rows_answered = {
            asker: (*served[asker][:pooled], *rank_values[stop:]) for asker, rank_values in values_by_rank.items()
        }
        requested = self._counts_by_owner(lambda slot: local_values[self._bucket_positions[slot]])
        rows_asked = self._counts_by_owner(lambda slot: local_values[self._row_bucket_positions[slot]])
        return RouteCounts(requested, served, ids), RouteCounts(rows_asked, rows_answered, rows)

    def _counts_by_owner(
        self, count: Callable[[BucketKey], int], owners: Sequence[int] | None = None
    ) -> dict[int, tuple[int, ...]]:
        ranks = range(self._world.size) if owners is None else owners
        return {owner: tuple(count(route.bucket) for route in self._routing.routes_by_owner[owner]) for owner in ranks}


def _parse_headers(values_by_rank: Mapping[int, Sequence[int]]) -> list[CountsHeader]:
    return [CountsHeader(*values_by_rank[rank][:NUM_HEADER_FIELDS]) for rank in range(len(values_by_rank))]


def _split_evenly(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]
