"""Exchange of the number of ids per route. It precedes the exchange of ids, because receivers allocate buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from meseta.comm import BatchTotals, ExchangeScope, PendingCollective, World
from meseta.embedding.hierarchical import HierarchicalExchange
from meseta.embedding.input_dist import DistinctRows, RouteCounts
from meseta.embedding.routes import BucketKey, Routing
from meseta.ops.bucketize import Buckets
from meseta.ops.device_constants import copy_to_device
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Int
from meseta.spec.transfer import BATCH_SIZE_RADIX, NUM_BATCH_FIELDS, NUM_HEADER_FIELDS, CountsHeader, float_bits


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
