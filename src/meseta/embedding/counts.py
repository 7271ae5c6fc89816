"""The exchange of counts: how many ids each rank asks for on each route, before the ids themselves travel."""

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
from meseta.jagged import KeyedJaggedTensor
from meseta.jagged.shapes import Int
from meseta.ops.bucketize import Buckets
from meseta.ops.device_constants import copy_to_device
from meseta.spec.transfer import BATCH_SIZE_RADIX, NUM_BATCH_FIELDS, NUM_HEADER_FIELDS, CountsHeader, float_bits


@dataclass(frozen=True)
class ExchangedCounts:
    """What all ranks have told of their ids."""

    headers: Sequence[CountsHeader]
    """By rank."""
    ids_per_route: RouteCounts
    rows_per_route: RouteCounts
    """The same as `ids_on`, but where each row is asked for once."""
    range_counts: list[list[int]]
    """Ids of this rank by feature and row range."""
    sent_counts: Sequence[Sequence[int]]
    """By rank: ids of each of the slots that go there at first."""
    received_counts: Mapping[int, Sequence[int]]
    """By rank that this one meets first: ids of what comes from it."""


class CountsExchange:
    """What a rank knows lies in one tensor, and what goes to each rank that it meets first is one gather of it:

        known   [mark and batch size, | ids of each | feature, sample, id of | ids of each row range of | rows of
                 the rank's totals      feature       the first refused id     the features that are cut  `row_buckets`
                 0 ... 3                4 ... F + 3   F + 4 ... F + 6          F + 7 ...                  ...]

        to r    [CountsHeader: 0 ... 3, F + 4 ... F + 6 | ids of each slot that is sent to r | their rows]

    With two levels these are twins, who hand on to each rank of their host what concerns it, see
    `HierarchicalExchange`.
    """

    def __init__(self, routing: Routing, world: World, tables: Sequence[str], num_features: int) -> None:
        """`tables` are those whose rows travel."""
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
        """None: all goes straight to the owners."""
        self.first_hop_ranks = range(world.size) if self.hierarchical is None else self.hierarchical.cross_host_peers
        """The ranks that ids go to first."""
        self.send_layout = routing.send_layout(world.rank)
        """By rank: which ids go there."""
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
        mark: int,
        totals: BatchTotals,
        ids: KeyedJaggedTensor,
        first_error: Int[Tensor, " 3"],
        cut: Buckets | None,
        distinct: DistinctRows | None,
    ) -> Int[Tensor, " n"]:
        """What this rank knows of a batch, on its device; `totals` are of all its samples in the global batch. No host
        sync."""
        leading = (
            mark * BATCH_SIZE_RADIX + ids.batch_size,
            totals.num_samples,
            totals.num_padding,
            float_bits(totals.weight),
        )
        counts = [*leading, *(b - a for a, b in pairwise(ids.key_offsets))]
        parts = [copy_to_device(counts, torch.int64, self._world.device), first_error]
        parts += [] if cut is None else [cut.totals]
        return torch.cat(parts if distinct is None else [*parts, distinct.counts])

    def start(self, known: Int[Tensor, " n"]) -> PendingCollective:
        """Begin to tell it."""
        send, receive = [0] * self._world.size, [0] * self._world.size
        for rank, size in zip(self.first_hop_ranks, self._num_sent, strict=True):
            send[rank], receive[rank] = size, self._num_received
        scope = ExchangeScope(self.first_hop_ranks, self._tables)
        return self._world.all_to_all(known[self._gather_index], send, receive, "counts", scope=scope)

    @property
    def _num_received(self) -> int:
        """Numbers that each rank that this one meets first tells."""
        if self.hierarchical is not None:
            return self.hierarchical.num_peer_counts
        return NUM_HEADER_FIELDS + len(self._routing.routes_by_owner[self._world.rank])

    def wait(self, known: Int[Tensor, " n"], pending: PendingCollective) -> ExchangedCounts:
        """Wait for what all ranks tell; the one host sync of a step, behind which the loss of the one
        before is read."""
        received, relay = pending.wait(), self.hierarchical
        parts = [known, received] + ([] if relay is None else [relay.forward_counts_within_host(received).wait()])
        numbers = torch.cat(parts).tolist()  # The host sync.
        stop = known.numel() + received.numel()
        mine, first, last = numbers[: known.numel()], numbers[known.numel() : stop], numbers[stop:]
        asked = self._counts_by_owner(lambda slot: mine[self._bucket_positions[slot]])
        sent = [[mine[self._bucket_positions[slot]] for slot in slots] for slots in self.send_layout]
        range_counts = [
            [mine[self._bucket_positions[f, n]] for n in range(len(cuts) - 1)]
            for f, cuts in enumerate(self._routing.range_bounds)
        ]
        if relay is None:
            told = dict(enumerate(_split_evenly(first, self._num_received)))
            answered = {rank: tuple(of_rank[NUM_HEADER_FIELDS:]) for rank, of_rank in told.items()}
            counts = RouteCounts(asked, answered, {self._world.rank: asked})
            return ExchangedCounts(_parse_headers(told), counts, counts, range_counts, sent, answered)
        told = dict(zip(relay.arrival_order, _split_evenly(last, relay.num_rank_counts[self._world.rank]), strict=True))
        of_twins = dict(zip(relay.cross_host_peers, _split_evenly(first, relay.num_peer_counts), strict=True))
        ids_on, rows_on = self._hierarchical_counts(relay, mine, told, of_twins)
        came = {twin: relay.bucket_counts(by_owner) for twin, by_owner in ids_on.forwarded.items()}
        return ExchangedCounts(_parse_headers(told), ids_on, rows_on, range_counts, sent, came)

    def _hierarchical_counts(
        self,
        relay: HierarchicalExchange,
        mine: Sequence[int],
        told: Mapping[int, Sequence[int]],
        of_twins: Mapping[int, Sequence[int]],
    ) -> tuple[RouteCounts, RouteCounts]:
        """Ids and rows, of what this rank knows, what all tell of its routes, and twins of those of its host."""
        ids, rows = dict[int, dict[int, tuple[int, ...]]](), dict[int, dict[int, tuple[int, ...]]]()
        stop = NUM_HEADER_FIELDS + len(relay.host_buckets)
        for twin, of_twin in of_twins.items():
            ids_of = dict(zip(relay.host_buckets, of_twin[NUM_HEADER_FIELDS:stop], strict=True))
            rows_of = ids_of | dict(zip(relay.select_row_buckets(relay.host_buckets), of_twin[stop:], strict=True))
            ids[twin] = self._counts_by_owner(ids_of.__getitem__, relay.host_ranks)
            rows[twin] = self._counts_by_owner(rows_of.__getitem__, relay.host_ranks)
        rank = self._world.rank
        pooled, stop = (
            self._routing.host_reduced[rank].stop,
            NUM_HEADER_FIELDS + len(self._routing.routes_by_owner[rank]),
        )
        answered = {asker: tuple(of_rank[NUM_HEADER_FIELDS:stop]) for asker, of_rank in told.items()}
        rows_answered = {asker: (*answered[asker][:pooled], *of_rank[stop:]) for asker, of_rank in told.items()}
        asked = self._counts_by_owner(lambda slot: mine[self._bucket_positions[slot]])
        rows_asked = self._counts_by_owner(lambda slot: mine[self._row_bucket_positions[slot]])
        return RouteCounts(asked, answered, ids), RouteCounts(rows_asked, rows_answered, rows)

    def _counts_by_owner(
        self, count: Callable[[BucketKey], int], owners: Sequence[int] | None = None
    ) -> dict[int, tuple[int, ...]]:
        """By owner: the count of each of its routes."""
        ranks = range(self._world.size) if owners is None else owners
        return {owner: tuple(count(route.bucket) for route in self._routing.routes_by_owner[owner]) for owner in ranks}


def _parse_headers(told: Mapping[int, Sequence[int]]) -> list[CountsHeader]:
    return [CountsHeader(*told[rank][:NUM_HEADER_FIELDS]) for rank in range(len(told))]


def _split_evenly(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]
