"""The exchange of counts: how many ids each rank asks for on each route, before the ids themselves travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from meseta.comm import Pending, Scope, Totals, World
from meseta.embedding.exchange import DistinctRows, RouteCounts
from meseta.embedding.relay import Relay
from meseta.embedding.routes import Routing, Slot
from meseta.jagged import KeyedJaggedTensor
from meseta.jagged.shapes import Int
from meseta.ops.bucketize import Buckets
from meseta.ops.device_words import on_device
from meseta.spec.transfer import BATCH_SIZES, HEADER, NUM_LEADING, CountsHeader, float_bits


@dataclass(frozen=True)
class Told:
    """What all ranks have told of their ids."""

    headers: Sequence[CountsHeader]
    """By rank."""
    ids_on: RouteCounts
    rows_on: RouteCounts
    """The same as `ids_on`, but where each row is asked for once."""
    range_counts: list[list[int]]
    """Ids of this rank by feature and row range."""
    sent: Sequence[Sequence[int]]
    """By rank: ids of each of the slots that go there at first."""
    came: Mapping[int, Sequence[int]]
    """By rank that this one meets first: ids of what comes from it."""


class CountsExchange:
    """What a rank knows lies in one tensor, and what goes to each rank that it meets first is one gather of it:

        known   [mark and batch size, | ids of each | feature, sample, id of | ids of each row range of | rows of
                 the rank's totals      feature       the first refused id     the features that are cut  `row_slots`
                 0 ... 3                4 ... F + 3   F + 4 ... F + 6          F + 7 ...                  ...]

        to r    [CountsHeader: 0 ... 3, F + 4 ... F + 6 | ids of each slot that is sent to r | their rows]

    With two levels these are twins, who hand on to each rank of their host what concerns it, see `Relay`.
    """

    def __init__(self, routing: Routing, world: World, tables: Sequence[str], num_features: int) -> None:
        """`tables` are those whose rows travel."""
        self._routing, self._world, self._tables = routing, world, tables
        self._at = {(f, 0): NUM_LEADING + f for f in range(num_features)}
        ranges = [(f, n) for f in routing.cut_features for n in range(len(routing.cuts[f]) - 1)]
        self._at |= {slot: HEADER + num_features + index for index, slot in enumerate(ranges)}
        first = HEADER + num_features + len(ranges)
        self._rows_at = self._at | {slot: first + index for index, slot in enumerate(routing.row_slots)}
        header = (*range(NUM_LEADING), *range(NUM_LEADING + num_features, HEADER + num_features))
        self.relay = Relay(routing, world, tables) if routing.two_level else None
        """None: all goes straight to the owners."""
        self.met = range(world.size) if self.relay is None else self.relay.twins
        """The ranks that ids go to first."""
        self.sent_slots = routing.sent_slots(world.rank)
        """By rank: which ids go there."""
        counts_at = [
            [*header, *(self._at[s] for s in slots), *(self._rows_at[s] for s in slots if s in routing.row_slots)]
            for slots in (self.sent_slots[rank] for rank in self.met)
        ]
        self._num_sent = [len(places) for places in counts_at]
        self._gather = torch.tensor([n for places in counts_at for n in places], device=world.device)

    def known(
        self,
        mark: int,
        totals: Totals,
        ids: KeyedJaggedTensor,
        first_error: Int[Tensor, " 3"],
        cut: Buckets | None,
        distinct: DistinctRows | None,
    ) -> Int[Tensor, " n"]:
        """What this rank knows of a batch, on its device; `totals` are of all its samples in the global batch. No host
        sync."""
        leading = (
            mark * BATCH_SIZES + ids.batch_size,
            totals.num_samples,
            totals.num_padding,
            float_bits(totals.weight),
        )
        counts = [*leading, *(b - a for a, b in pairwise(ids.key_offsets))]
        parts = [on_device(counts, torch.int64, self._world.device), first_error]
        parts += [] if cut is None else [cut.totals]
        return torch.cat(parts if distinct is None else [*parts, distinct.counts])

    def start(self, known: Int[Tensor, " n"]) -> Pending:
        """Begin to tell it."""
        send, receive = [0] * self._world.size, [0] * self._world.size
        for rank, size in zip(self.met, self._num_sent, strict=True):
            send[rank], receive[rank] = size, self._num_told
        scope = Scope(self.met, self._tables)
        return self._world.all_to_all(known[self._gather], send, receive, "counts", scope=scope)

    @property
    def _num_told(self) -> int:
        """Numbers that each rank that this one meets first tells."""
        if self.relay is not None:
            return self.relay.told_by_twin
        return HEADER + len(self._routing.by_rank[self._world.rank])

    def read(self, known: Int[Tensor, " n"], pending: Pending) -> Told:
        """Wait for what all ranks tell; the one host sync of a step, behind which the loss of the one
        before is read."""
        received, relay = pending.wait(), self.relay
        parts = [known, received] + ([] if relay is None else [relay.hand_on_counts(received).wait()])
        numbers = torch.cat(parts).tolist()  # The host sync.
        stop = known.numel() + received.numel()
        mine, first, last = numbers[: known.numel()], numbers[known.numel() : stop], numbers[stop:]
        asked = self._by_route(lambda slot: mine[self._at[slot]])
        sent = [[mine[self._at[slot]] for slot in slots] for slots in self.sent_slots]
        range_counts = [
            [mine[self._at[f, n]] for n in range(len(cuts) - 1)] for f, cuts in enumerate(self._routing.cuts)
        ]
        if relay is None:
            told = dict(enumerate(_chunks(first, self._num_told)))
            answered = {rank: tuple(of_rank[HEADER:]) for rank, of_rank in told.items()}
            counts = RouteCounts(asked, answered, {self._world.rank: asked})
            return Told(_headers(told), counts, counts, range_counts, sent, answered)
        told = dict(zip(relay.arrival, _chunks(last, relay.numbers_of[self._world.rank]), strict=True))
        of_twins = dict(zip(relay.twins, _chunks(first, relay.told_by_twin), strict=True))
        ids_on, rows_on = self._of_two_levels(relay, mine, told, of_twins)
        came = {twin: relay.slot_counts(by_owner) for twin, by_owner in ids_on.passed.items()}
        return Told(_headers(told), ids_on, rows_on, range_counts, sent, came)

    def _of_two_levels(
        self,
        relay: Relay,
        mine: Sequence[int],
        told: Mapping[int, Sequence[int]],
        of_twins: Mapping[int, Sequence[int]],
    ) -> tuple[RouteCounts, RouteCounts]:
        """Ids and rows, of what this rank knows, what all tell of its routes, and twins of those of its host."""
        ids, rows = dict[int, dict[int, tuple[int, ...]]](), dict[int, dict[int, tuple[int, ...]]]()
        stop = HEADER + len(relay.slots)
        for twin, of_twin in of_twins.items():
            ids_of = dict(zip(relay.slots, of_twin[HEADER:stop], strict=True))
            rows_of = ids_of | dict(zip(relay.row_slots(relay.slots), of_twin[stop:], strict=True))
            ids[twin] = self._by_route(ids_of.__getitem__, relay.mates)
            rows[twin] = self._by_route(rows_of.__getitem__, relay.mates)
        rank = self._world.rank
        pooled, stop = self._routing.host_reduced[rank].stop, HEADER + len(self._routing.by_rank[rank])
        answered = {asker: tuple(of_rank[HEADER:stop]) for asker, of_rank in told.items()}
        rows_answered = {asker: (*answered[asker][:pooled], *of_rank[stop:]) for asker, of_rank in told.items()}
        asked = self._by_route(lambda slot: mine[self._at[slot]])
        rows_asked = self._by_route(lambda slot: mine[self._rows_at[slot]])
        return RouteCounts(asked, answered, ids), RouteCounts(rows_asked, rows_answered, rows)

    def _by_route(
        self, count: Callable[[Slot], int], owners: Sequence[int] | None = None
    ) -> dict[int, tuple[int, ...]]:
        """By owner: the count of each of its routes."""
        ranks = range(self._world.size) if owners is None else owners
        return {owner: tuple(count(route.slot) for route in self._routing.by_rank[owner]) for owner in ranks}


def _headers(told: Mapping[int, Sequence[int]]) -> list[CountsHeader]:
    return [CountsHeader(*told[rank][:HEADER]) for rank in range(len(told))]


def _chunks(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]
