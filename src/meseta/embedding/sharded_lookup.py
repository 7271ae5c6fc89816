"""One exchange of ids for rows: the features of one batch size, over the ranks of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from meseta.comm import BatchSlice, Pending, Scope, Totals, World
from meseta.embedding.accumulate import GradientSegment, local_segment
from meseta.embedding.counts import CountsExchange
from meseta.embedding.exchange import (
    DistinctRows,
    Exchanged,
    OwnedIds,
    Slots,
    Started,
    order_of_unpooled,
    sort_cut_features,
    unpack,
)
from meseta.embedding.feature_group import FeatureGroup
from meseta.embedding.flight import RanOut
from meseta.embedding.gradients import SentGradients, receive_gradients, rows_of_range
from meseta.embedding.relay import FromHosts, Rows, give_to_twins
from meseta.embedding.routes import Route, Side, make_routing
from meseta.embedding.wire import GradientDraw, Matrix, Message, Wire, Wires, gradient_exponent
from meseta.jagged import KeyedJaggedTensor
from meseta.ops.codec import HalfRange
from meseta.ops.columns import place_columns
from meseta.ops.id_policy import CheckedIds
from meseta.ops.memory import empty
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_lookup import row_lookup
from meseta.ops.row_update import FeatureGradient, TableRows
from meseta.ops.unique import unique
from meseta.spec import MesetaError, Plan, Shard, TableSpec
from meseta.spec.codecs import FP32, Codec, Communication
from meseta.spec.transfer import REFUSED, CountsHeader, id_bytes, longest_range

ID_TYPES = {4: torch.int32, 8: torch.int64}
"""By bytes of an id on the way: it is a row of its range, so half the bits are enough for most."""


@dataclass(eq=False)
class Answers:
    """What owners have looked up, on its way to the ranks of the samples."""

    wires: Wires
    messages: Sequence[Message]
    """Of what each owner answers to this rank, or with two levels each rank of its host."""
    pending: Pending
    local_bags: Tensor | None
    """Of rows that every rank holds."""
    take_from_hosts: Callable[[], FromHosts] | None = None
    """Waits for what comes from other hosts, once that is under way."""


class ShardedLookup:
    """The way of one feature group's ids to the ranks that hold their rows, of the rows back, and of gradients there.

    Every rank calls the same methods in the same order.
    """

    def __init__(
        self,
        group: FeatureGroup,
        tables: Sequence[TableSpec],
        plan: Plan,
        dtype: torch.dtype,
        world: World,
        comm: Communication,
        clamped: Tensor | None,
    ) -> None:
        """What a lookup returns is of `dtype`; it reads what `lend` was given. `clamped` counts numbers that are too
        large for fp16."""
        self.group = group
        self.world = world
        self.comm = comm
        self._clamped = clamped
        self.dtype = dtype
        self.routing = make_routing(tables, group.features, plan)
        self.routes = self.routing.by_rank[world.rank]
        self.tables = tuple(dict.fromkeys(feature.table for feature in group.features))
        """Whose rows travel."""
        self._rows: Mapping[Shard, TableRows] = {}
        self._counts = CountsExchange(self.routing, world, self.tables, len(group.features))
        self._relay = self._counts.relay
        self._id_dtype = ID_TYPES[id_bytes(longest_range(tables, plan))]

    def lend(self, rows: Mapping[Shard, TableRows]) -> None:
        """Read the rows of these shards, all of this rank, from now on."""
        self._rows = rows
        owned, replicated = self.routing.by_rank[self.world.rank], self.routing.pooled_replicated
        sides = (self.routing.direct[self.world.rank], self.routing.host_reduced[self.world.rank])
        self._tables_of = {side: self._lookup_group(owned[side.first : side.stop]) for side in sides}
        """Of both kinds of bags that this rank owns."""
        self._replicated_tables = self._lookup_group(replicated)
        """Of the pooled features that stay at home."""

    def _lookup_group(self, routes: Sequence[Route]) -> LookupGroup:
        weighted = tuple(self.group.features[route.feature].weighted for route in routes)
        return LookupGroup(tuple(self._rows[route.shard].weight for route in routes), weighted)

    def start(self, checked: CheckedIds | MesetaError, mark: int, totals: Totals) -> Started:
        """Sort the ids by owner, begin the exchange of counts, of the batch's mark and of the `totals` of this rank. No
        host sync.

        An error is told to all ranks on the way; `exchange` raises it.
        """
        failed = checked if isinstance(checked, MesetaError) else None
        own = self._refused() if isinstance(checked, MesetaError) else checked
        cut, distinct = sort_cut_features(own.kjt, self.routing), DistinctRows.of(own.kjt, self.routing)
        known = self._counts.known(mark, totals, own.kjt, own.first_error, cut, distinct)
        return Started(
            mark=mark,
            ids=own.kjt,
            cut=cut,
            counts=known,
            received=self._counts.start(known),
            distinct=distinct,
            failed=failed,
        )

    def _refused(self) -> CheckedIds:
        """No samples, and the mark that tells the other ranks."""
        keys = tuple(f.name for f in self.group.features)
        mark = torch.tensor([REFUSED, 0, 0], device=self.world.device)
        ids = KeyedJaggedTensor(keys=keys, values=mark[:0], lengths=mark[:0])
        return CheckedIds(kjt=ids, num_outside=mark.new_zeros(len(keys)), first_error=mark)

    def exchange(self, x: Started) -> Exchanged:
        """Read the counts, agree on errors, begin the exchange of lengths and ids."""
        counts, met, sent_slots = self._counts.read(x.counts, x.received), self._counts.met, self._counts.sent_slots
        self._check(x, counts.headers)
        batch_sizes = tuple(header.batch_size for header in counts.headers)
        slots = Slots.of(x, self.routing, counts.range_counts, self._id_dtype)
        send, receive = [0] * self.world.size, [0] * self.world.size
        for rank in met:
            send[rank] = x.ids.batch_size * len(counts.sent[rank]) + sum(counts.sent[rank])
            receive[rank] = batch_sizes[rank] * len(counts.came[rank]) + sum(counts.came[rank])
        packed, scope = slots.pack_ids(sent_slots, self._id_dtype, self.world.device), Scope(met, self.tables, x.mark)
        payload = self.world.all_to_all(packed, send, receive, "ids", scope=scope)
        weights = None
        if self.group.is_weighted:
            packed = slots.pack_weights(sent_slots, self.dtype, self.world.device)
            sizes = [sum(n) for n in counts.sent], [sum(counts.came.get(r, ())) for r in range(self.world.size)]
            weights = self.world.all_to_all(packed, *sizes, "weights", scope=scope)
        return Exchanged(
            mark=x.mark,
            ids=x.ids,
            replicated=slots.replicated_ids(self.routing, x.ids),
            order=order_of_unpooled(x, self.routing),
            distinct=x.distinct,
            batch_sizes=batch_sizes,
            totals=tuple(Totals(h.slice_size, h.num_padding, h.weight) for h in counts.headers),
            ran_out=RanOut.of(counts.headers),
            ids_on=counts.ids_on,
            rows_on=counts.rows_on,
            range_counts=counts.range_counts,
            payload=payload,
            weights=weights,
        )

    def _check(self, x: Started, headers: Sequence[CountsHeader]) -> None:
        """Raise MesetaError, on all ranks alike, where a rank is at another batch, or its ids are refused."""
        astray = [rank for rank, header in enumerate(headers) if header.mark != headers[0].mark]
        if astray:
            raise MesetaError(
                f"rank {astray[0]} is at another batch than rank 0; every rank must start the same batches in the same "
                "order, and take each stage of them in one order"
            )
        if any(header.feature == REFUSED for header in headers):
            self.world.raise_together(x.failed)
        for rank, header in enumerate(headers):
            if header.feature >= 0:
                before = sum(of_rank.batch_size for of_rank in headers[:rank])
                raise self.group.refuse(header.feature, before + header.sample, header.id)

    def hand_on_ids(self, x: Exchanged) -> None:
        """Where ids have two levels, wait for those of twins and begin to give each rank of this host its own."""
        if self._relay is not None and x.inside is None:
            payload = self._relay.hand_on_ids(x)
            x.inside = payload, None if x.weights is None else self._relay.hand_on_ids(x, weights=True)

    def unpack(self, x: Exchanged) -> OwnedIds:
        """Wait for the ids that this rank looks up."""
        self.hand_on_ids(x)
        payload, of_ids = x.last
        arrival = range(self.world.size) if self._relay is None else self._relay.arrival
        weights = None if of_ids is None else of_ids.wait()
        return unpack(x, len(self.routes), arrival, payload.wait(), weights)

    def look_up(self, x: Exchanged, owned: OwnedIds, *, is_evaluation: bool = False) -> Answers:
        """Look up what this rank owns, and begin to send it to the ranks of the samples; in an evaluation it travels as
        it is."""
        wires = self._wires(FP32 if is_evaluation else self.comm.codec("forward"))
        messages = self._answer_messages(x)
        pending = self._answer(x, owned, wires.near, wires.near.sizes(messages))
        return Answers(wires, messages, pending, self._look_up_replicated(x.replicated))  # while the answers travel

    def hand_on(self, x: Exchanged, answers: Answers) -> None:
        """Where answers have two levels, wait for those of this host and begin to give its twins theirs."""
        if self.routing.goes_by_twins and answers.take_from_hosts is None:
            views = answers.wires.near.views(answers.pending.wait(), answers.messages)
            far = answers.wires.far
            answers.take_from_hosts = give_to_twins(self.routing, self.world, x, views, far, self.tables)

    def assemble(self, x: Exchanged, answers: Answers) -> list[Tensor]:
        """[pooled [B_local, sum of D], rows of each unpooled feature ...] for the local slice, of what all ranks have
        answered."""
        self.hand_on(x, answers)
        wires, take = answers.wires, answers.take_from_hosts
        views = wires.near.views(answers.pending.wait(), answers.messages)
        came = FromHosts(self._nothing_of_hosts(x), {}, {}) if take is None else take()
        direct = [of_owner[0] for of_owner in views]
        if self._relay is not None:
            direct = [came.direct[owner] for owner in range(self.world.size)]
        rows = came.rows if self._relay is not None else self._rows_of(wires.near, views, answers.messages)
        pooled = self._put_together(x, wires.far, direct, came.bags, answers.local_bags)
        return [pooled, *(self._assemble_rows(x, f, rows) for f in self.group.unpooled)]

    def _put_together(
        self, x: Exchanged, wire: Wire, direct: Sequence[Tensor], whole: Sequence[Tensor], local_bags: Tensor | None
    ) -> Tensor:
        """[B_local, sum of D]: bags of the owners, of hosts, and at home."""
        batch_size, routing = x.batch_sizes[self.world.rank], self.routing
        pooled = empty((batch_size, routing.out_width), self.dtype, self.world.device)
        local = [] if local_bags is None else [local_bags]
        if wire.is_exact:
            place_columns(pooled, [*direct, *whole, *local], routing.answer_moves)
        else:
            if local:  # rows that every rank holds come first in their table
                place_columns(pooled, local, routing.moves_at_home)
            matrices = [Matrix(batch_size, columns) for columns in routing.direct_columns]
            matrices += [routing.host_bags(host, batch_size) for host in range(len(whole))]
            nothing = torch.empty(batch_size, 0, dtype=torch.uint8, device=self.world.device)
            came = [view if matrix.width else nothing for view, matrix in zip([*direct, *whole], matrices, strict=True)]
            wire.take(pooled, came, matrices, routing.moves_of_others)
        return self.group.divide_means(pooled, x.ids.lengths.view(len(self.group.features), -1))

    def _wires(self, codec: Codec, half: HalfRange | None = None) -> Wires:
        """How bags and rows, or their gradients, are written by a codec."""
        far = Wire(self.dtype, self.world.device, codec, half=half or HalfRange(overflows=self._clamped))
        return Wires(replace(far, is_mixed=self.routing.sums_bags), far)

    def _rows_of(self, wire: Wire, answers: Sequence[Sequence[Tensor]], messages: Sequence[Message]) -> Rows:
        """By owner and route: rows of those that are not pooled, as owners have answered."""
        found = Rows()
        for r, (views, message) in enumerate(zip(answers, messages, strict=True)):
            for i, (view, matrix) in enumerate(zip(views[2:], message[2:], strict=True)):
                found[r, self.routing.host_reduced[r].stop + i] = wire.read(view, matrix)
        return found

    def _answer(self, x: Exchanged, owned: OwnedIds, wire: Wire, expected: Sequence[int]) -> Pending:
        """Look up what this rank owns, and begin to send each rank the answers for its samples; `expected` are the
        sizes of those that come."""
        rank, routing = self.world.rank, self.routing
        direct, host_reduced = routing.direct[rank], routing.host_reduced[rank]
        bags = self._look_up_bags(x, owned, direct)
        bags = wire.packed(Matrix(x.num_samples, routing.direct_columns[rank]), [bags])
        messages = [routing.answer_message(rank, r, x.batch_sizes, x.rows_on.answered) for r in range(self.world.size)]
        if len(self.routes) == direct.stop and not (routing.two_level or wire.is_mixed):
            send = bags.view(-1)
        else:
            partial = dict(enumerate(self._look_up_bags(x, owned, host_reduced).split(x.batch_sizes)))
            rows, of_ranks = self._look_up_rows(x, owned, wire), bags.split(x.batch_sizes)
            send = wire.empty(messages)
            for r, views in enumerate(wire.views(send, messages)):
                askers = routing.askers(rank, r)
                peers = routing.peers_across_hosts(r) if r in routing.ranks_of_host(rank) else ()
                parts = [[of_ranks[asker] for asker in askers], [partial[peer] for peer in peers]]
                parts += [[of_route[asker] for asker in askers] for of_route in rows]
                for view, part in zip(views, parts, strict=True):
                    if view.numel():
                        torch.cat(part, out=view)
        scope = Scope(None if self._relay is None else self._relay.mates, self.tables, x.mark)
        return self.world.all_to_all(send, wire.sizes(messages), expected, "answers", scope=scope)

    def _look_up_rows(self, x: Exchanged, owned: OwnedIds, wire: Wire) -> list[tuple[Tensor, ...]]:
        """Of each route that is not pooled: the rows for each rank, [rows, columns], as they are written."""
        first = self.routing.host_reduced[self.world.rank].stop
        if first == len(self.routes):
            return []
        tables = [self._rows[route.shard].weight for route in self.routes[first:]]
        counts = [[x.rows_on.answered[r][k] for r in range(self.world.size)] for k in range(first, len(self.routes))]
        begin = sum(owned.sizes[:first])
        ids = owned.bags.ids[begin:]
        if x.distinct is not None:
            rows = ids if owned.rows is None else owned.rows[begin:]
            sizes = [x.ids_on.answered[r][k] for k in range(first, len(self.routes)) for r in range(self.world.size)]
            distinct = unique(rows, list(accumulate(sizes, initial=0)))
            self._check_distinct(distinct.bounds.diff().tolist(), counts)
            ids = (
                distinct.rows
                if owned.rows is None
                else torch.empty_like(distinct.rows).index_copy_(0, distinct.inverse, ids.to(torch.int64))
            )
        bounds = list(accumulate((sum(of_route) for of_route in counts), initial=0))
        found = zip(row_lookup(tables, ids, bounds), counts, strict=True)
        return [wire.packed(Matrix(rows.shape[0], (rows.shape[1],)), [rows]).split(sizes) for rows, sizes in found]

    def _check_distinct(self, counted: Sequence[int], told: Sequence[Sequence[int]]) -> None:
        """Raise MesetaError where a rank has told another number of rows than its ids have."""
        for place, (number, expected) in enumerate(zip(counted, (n for own in told for n in own), strict=True)):
            if number != expected:
                rank = place % self.world.size
                raise MesetaError(
                    f"rank {rank} asks rank {self.world.rank} for {expected} rows of tables {', '.join(self.tables)}, "
                    f"but its ids name {number}; every rank must run the same version and plan"
                )

    def _look_up_bags(self, x: Exchanged, owned: OwnedIds, side: Side) -> Tensor:
        """[B_global, columns] of the routes of one matrix."""
        if side.first == side.stop:
            return torch.empty(x.num_samples, 0, dtype=self.dtype, device=self.world.device)
        bags = owned.bags_of(side)
        return lookup_group(self._tables_of[side], bags.ids, bags.offsets, bags.weights)

    def _look_up_replicated(self, replicated: KeyedJaggedTensor | None) -> Tensor | None:
        """[B, columns of the pooled features side by side] of ids whose rows every rank holds; None where there are
        none."""
        num_pooled = len(self.routing.pooled_replicated)
        if replicated is None or not num_pooled:
            return None
        bags = replicated.select(replicated.keys[:num_pooled])
        return lookup_group(self._replicated_tables, bags.values, bags.offsets, bags.weights)

    def _replicated_rows(self, replicated: KeyedJaggedTensor, feature: int) -> Tensor:
        """[nnz_f, D] of the ids at home of a feature that is not pooled."""
        [shard] = (r.shard for r in self.routing.replicated if r.feature == feature)
        values = replicated[self.group.features[feature].name].values
        return row_lookup([self._rows[shard].weight], values, [0, values.numel()])[0]

    def _answer_messages(self, x: Exchanged) -> list[list[Matrix]]:
        """Of what each owner answers to this rank."""
        rank, ranks = self.world.rank, range(self.world.size)
        mates = ranks if self._relay is None else self._relay.mates
        through = {r: x.rows_on.through(r) if r in mates else {} for r in ranks}
        return [self.routing.answer_message(r, rank, x.batch_sizes, through[r]) for r in ranks]

    def _nothing_of_hosts(self, x: Exchanged) -> list[Tensor]:
        nothing = torch.empty(x.batch_sizes[self.world.rank], 0, dtype=self.dtype, device=self.world.device)
        return [nothing] * len(self.routing.host_widths)

    def _assemble_rows(self, x: Exchanged, feature: int, rows: Rows) -> Tensor:
        """[nnz_f, D]: rows back in the order of the batch."""
        ranges, is_distinct = [], x.distinct is not None and feature in x.distinct.rows
        for number, pieces in enumerate(self.routing.pieces[feature]):
            if not pieces:
                ranges.append(self._rows_at_home(x, feature, number, is_distinct))
                continue
            columns = [rows[r.rank, index] for index, r in pieces]
            ranges.append(torch.cat(columns, dim=1) if len(columns) > 1 else columns[0])
        grouped, order = torch.cat(ranges), x.order.get(feature)
        if x.distinct is not None and is_distinct:
            return grouped[x.distinct.inverse[feature]]
        return grouped if order is None else torch.empty_like(grouped).index_copy_(0, order, grouped)

    def _rows_at_home(self, x: Exchanged, feature: int, number: int, is_distinct: bool) -> Tensor:
        """Rows of a range that every rank holds: of each id, or of each distinct row."""
        assert x.replicated is not None
        if x.distinct is None or not is_distinct:
            return self._replicated_rows(x.replicated, feature)
        [shard] = (r.shard for r in self.routing.replicated if r.slot == (feature, number))
        first, stop = self.routing.cuts[feature][number : number + 2]
        asked = x.distinct.rows[feature]
        bounds = torch.searchsorted(asked, asked.new_tensor([first, stop])).tolist()
        ids = asked[bounds[0] : bounds[1]] - first
        return row_lookup([self._rows[shard].weight], ids, [0, ids.numel()])[0]

    def send(self, x: Exchanged, gradients: Sequence[Tensor], batch: BatchSlice, seed: int) -> SentGradients:
        """Begin to send gradients of what a lookup returned, times the share of this rank's samples, to the owners of
        the rows."""
        wires, draw = self._backward_wires(x), None
        if wires.far.codec.block_bytes:
            first = batch.first_sample if self.group.batch == "" else sum(x.batch_sizes[: self.world.rank])
            names = tuple(feature.name for feature in self.group.features)
            draw = GradientDraw(seed, batch.step, names, first, x.ids.lengths)
        share = batch.local_share
        return SentGradients(self.routing, self.world, self.group.unpooled, x, wires, draw, gradients, share)

    def _backward_wires(self, x: Exchanged) -> Wires:
        half = HalfRange(gradient_exponent(x.num_samples), self._clamped)
        return self._wires(self.comm.codec("backward"), half)

    def received(self, x: Exchanged, owned: OwnedIds, sent: SentGradients) -> GradientSegment:
        """What came to the rows of this rank."""
        wire = self._backward_wires(x).near
        direct, host_reduced, rows = receive_gradients(self.routing, self.world, x, sent, wire)
        unpooled = tuple(range(self.routing.host_reduced[self.world.rank].stop, len(self.routes)))
        counts = tuple(x.ids_on.answered[r] for r in range(self.world.size))
        return GradientSegment(owned, x.batch_sizes, counts, (direct, host_reduced, *rows), unpooled)

    def places(self, by_shard: Mapping[Shard, int], position: int, matrix: int) -> dict[int, list[FeatureGradient]]:
        """By index in the collection: where the gradients of a feature's routes come in a `received` segment, of the
        shards that `by_shard` numbers, when its routes and its matrices are counted from `position` and `matrix`."""
        direct, host_reduced = self.routing.direct[self.world.rank], self.routing.host_reduced[self.world.rank]
        found: dict[int, list[FeatureGradient]] = {}
        for k, route in enumerate(self.routes):
            weighted, shard = self.group.features[route.feature].weighted, by_shard[route.shard]
            if k < host_reduced.stop:
                own = matrix if k < direct.stop else matrix + 1
                place = FeatureGradient(position + k, shard, own, route.column, weighted=weighted)
            else:
                place = FeatureGradient(position + k, shard, matrix + 2 + k - host_reduced.stop, per_id=True)
            found.setdefault(self.group.at[route.feature], []).append(place)
        return found

    def replicated_segment(self, x: Exchanged, gradients: Sequence[Tensor]) -> GradientSegment | None:
        """What this rank's samples give to rows that every rank holds; None where there are none."""
        if x.replicated is None:
            return None
        first = len(self.routing.pooled_replicated)
        rows = [rows_of_range(self.group.unpooled, x, gradients, route) for route in self.routing.replicated[first:]]
        return local_segment(x.replicated, [gradients[0], *rows], range(first, len(self.routing.replicated)))

    def places_at_home(self, tables: Mapping[str, int], position: int, matrix: int) -> dict[int, FeatureGradient]:
        """The same as `places` for an `replicated_segment` segment, of the tables that `tables` numbers."""
        found, first = {}, len(self.routing.pooled_replicated)
        for k, route in enumerate(self.routing.replicated):
            if route.shard.table in tables:
                table, weighted = tables[route.shard.table], self.group.features[route.feature].weighted
                if k < first:
                    column = self.routing.out_columns[route.feature]
                    place = FeatureGradient(position + k, table, matrix, column, weighted=weighted)
                else:
                    place = FeatureGradient(position + k, table, matrix + 1 + k - first, per_id=True)
                found[self.group.at[route.feature]] = place
        return found
