"""One exchange of ids for rows: the features of one batch size, over the ranks of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meseta.comm import Pending, World
from meseta.embedding.accumulate import GradientSegment, local_segment
from meseta.embedding.exchange import (
    Exchanged,
    OwnedIds,
    Slots,
    Started,
    matrices,
    numbers_in,
    order_of_unpooled,
    sort_cut_features,
    unpack,
)
from meseta.embedding.feature_group import FeatureGroup
from meseta.embedding.flight import Timer
from meseta.embedding.gradients import receive_gradients, rows_of_range, send_gradients
from meseta.embedding.routes import Route, Side, make_routing
from meseta.jagged import KeyedJaggedTensor
from meseta.ops.columns import place_columns
from meseta.ops.id_policy import CheckedIds
from meseta.ops.memory import empty
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_lookup import row_lookup
from meseta.ops.row_update import FeatureGradient, TableRows
from meseta.spec import MesetaError, Plan, Shard, TableSpec
from meseta.spec.transfer import BATCH_SIZES, HEADER, REFUSED, CountsHeader, id_bytes, longest_range

ID_TYPES = {4: torch.int32, 8: torch.int64}
"""By bytes of an id on the way: it is a row of its range, so half the bits are enough for most."""


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
    ) -> None:
        """What a lookup returns is of `dtype`; it reads what `lend` was given."""
        self.group = group
        self.world = world
        self.dtype = dtype
        self.routing = make_routing(tables, group.features, plan)
        self.routes = self.routing.by_rank[world.rank]
        self.tables = tuple(dict.fromkeys(feature.table for feature in group.features))
        """Whose rows travel."""
        self._rows: Mapping[Shard, TableRows] = {}
        # What this rank knows lies in one tensor, and what goes to each owner is one gather of it:
        #
        #   known   [mark and   | ids of each | feature, sample, id of | ids of each row range of the
        #            batch size   feature       the first refused id     features that are cut
        #            0            1 ... F       F + 1 ... F + 3          F + 4 ...]
        #
        #   to r    [CountsHeader: start, feature, sample, id | ids of each route of r ...]
        num_features = len(group.features)
        at = {(f, 0): 1 + f for f in range(num_features)}
        ranges = [(f, n) for f in self.routing.cut_features for n in range(len(self.routing.cuts[f]) - 1)]
        at |= {slot: HEADER + num_features + index for index, slot in enumerate(ranges)}
        self._range_counts_at = [[at[f, n] for n in range(len(cuts) - 1)] for f, cuts in enumerate(self.routing.cuts)]
        header = (0, *range(1 + num_features, HEADER + num_features))
        self._sent_counts_at = [n for routes in self.routing.by_rank for n in (*header, *(at[r.slot] for r in routes))]
        self._gather_counts = torch.tensor(self._sent_counts_at, device=world.device)
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

    def start(self, checked: CheckedIds | MesetaError, mark: int) -> Started:
        """Sort the ids by owner, begin the exchange of counts and of the batch's mark. No host sync.

        An error is told to all ranks on the way; `exchange` raises it.
        """
        failed = checked if isinstance(checked, MesetaError) else None
        own = self._refused() if isinstance(checked, MesetaError) else checked
        ids = own.kjt
        cut = sort_cut_features(ids, self.routing)
        counts = [mark * BATCH_SIZES + ids.batch_size, *(b - a for a, b in pairwise(ids.key_offsets))]
        parts = [torch.tensor(counts, device=self.world.device), own.first_error]
        known = torch.cat(parts if cut is None else [*parts, cut.totals])
        mine = HEADER + len(self.routes)
        splits = [HEADER + len(routes) for routes in self.routing.by_rank]
        received = self.world.all_to_all(
            known[self._gather_counts], splits, [mine] * self.world.size, "counts", tables=self.tables
        )
        return Started(mark=mark, ids=ids, cut=cut, counts=known, received=received, failed=failed)

    def _refused(self) -> CheckedIds:
        """No samples, and the mark that tells the other ranks."""
        keys, nothing = tuple(f.name for f in self.group.features), self._gather_counts.new_empty(0)
        ids = KeyedJaggedTensor(keys=keys, values=nothing, lengths=nothing)
        mark = self._gather_counts.new_tensor([REFUSED, 0, 0])
        return CheckedIds(kjt=ids, num_outside=mark.new_zeros(len(keys)), first_error=mark)

    def exchange(self, x: Started) -> Exchanged:
        """Read the counts, agree on errors, begin the exchange of lengths and ids."""
        received = x.received.wait()
        numbers = torch.cat([x.counts, received]).tolist()  # The one host sync.
        own, numbers = numbers[: x.counts.numel()], numbers[x.counts.numel() :]
        known = [own[i] for i in self._sent_counts_at]
        sent, at = [], 0
        for routes in self.routing.by_rank:
            sent.append(tuple(known[at + HEADER : at + HEADER + len(routes)]))
            at += HEADER + len(routes)
        size = HEADER + len(self.routes)
        told = [numbers[r * size : (r + 1) * size] for r in range(self.world.size)]
        headers = [CountsHeader(*own[:HEADER]) for own in told]
        batch_sizes = tuple(header.batch_size for header in headers)
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
                raise self.group.refuse(header.feature, sum(batch_sizes[:rank]) + header.sample, header.id)
        counts = tuple(tuple(own[HEADER:]) for own in told)
        batch = batch_sizes[self.world.rank]
        range_counts = [[own[i] for i in ranges] for ranges in self._range_counts_at]
        slots = Slots.of(x, self.routing, range_counts, self._id_dtype)
        payload = self.world.all_to_all(
            slots.pack_ids(self.routing, self._id_dtype, self.world.device),
            [batch * len(routes) + sum(n) for routes, n in zip(self.routing.by_rank, sent, strict=True)],
            [b * len(self.routes) + sum(n) for b, n in zip(batch_sizes, counts, strict=True)],
            "ids",
            tables=self.tables,
            batch=x.mark,
        )
        weights = None
        if self.group.is_weighted:
            packed = slots.pack_weights(self.routing, self.dtype, self.world.device)
            sizes = [sum(n) for n in sent], [sum(n) for n in counts]
            weights = self.world.all_to_all(packed, *sizes, "weights", tables=self.tables, batch=x.mark)
        return Exchanged(
            mark=x.mark,
            ids=x.ids,
            replicated=slots.replicated_ids(self.routing, x.ids),
            order=order_of_unpooled(x, self.routing),
            batch_sizes=batch_sizes,
            sent=tuple(sent),
            received=counts,
            range_counts=range_counts,
            payload=payload,
            weights=weights,
        )

    def unpack(self, x: Exchanged) -> OwnedIds:
        """Wait for the ids that this rank looks up."""
        return unpack(x, len(self.routes))

    def look_up(self, x: Exchanged, owned: OwnedIds, stage_timer: Timer) -> list[Tensor]:
        """[pooled [B_local, sum of D], rows of each unpooled feature ...] for the local slice."""
        pending = self._answer(x, owned)
        local_bags = self._look_up_replicated(x.replicated)  # while the answers travel
        with stage_timer("output_dist"):
            answers = matrices(pending.wait(), self._answer_shapes(x))
            whole = self._add_in_host(x, answers) if self.routing.sums_in_hosts else self._nothing_of_hosts(x)
            pooled = empty((x.batch_sizes[self.world.rank], self.routing.out_width), self.dtype, self.world.device)
            sources = [*(own[0] for own in answers), *whole, *([] if local_bags is None else [local_bags])]
            place_columns(pooled, sources, self.routing.answer_moves)
            self.group.divide_means(pooled, x.ids.lengths.view(len(self.group.features), -1))
            return [pooled, *(self._assemble_rows(x, f, answers) for f in self.group.unpooled)]

    def _answer(self, x: Exchanged, owned: OwnedIds) -> Pending:
        """Look up what this rank owns, and begin to send each rank the answers for its samples."""
        rank = self.world.rank
        direct, host_reduced = self.routing.direct[rank], self.routing.host_reduced[rank]
        bags = self._look_up_bags(x, owned, direct)
        shapes = [self.routing.answer_shapes(rank, r, x.batch_sizes, n) for r, n in enumerate(x.received)]
        send = bags.view(-1)
        if len(self.routes) > direct.stop:
            partial = dict(enumerate(self._look_up_bags(x, owned, host_reduced).split(x.batch_sizes)))
            tables = [self._rows[r.shard].weight for r in self.routes[host_reduced.stop :]]
            single, sizes = owned.bags.ids[sum(owned.sizes[: host_reduced.stop]) :], owned.sizes[host_reduced.stop :]
            rows = row_lookup(tables, single, list(accumulate(sizes, initial=0))) if tables else []
            rows_by_rank = [own.split([n[host_reduced.stop + k] for n in x.received]) for k, own in enumerate(rows)]
            parts = []
            for r, own in enumerate(bags.split(x.batch_sizes)):
                peers = self.routing.peers_across_hosts(r) if r in self.routing.ranks_of_host(rank) else ()
                parts += [own, *(partial[peer] for peer in peers), *(of_route[r] for of_route in rows_by_rank)]
            send = torch.cat([part.reshape(-1) for part in parts])
        expected = numbers_in(self._answer_shapes(x))
        return self.world.all_to_all(send, numbers_in(shapes), expected, "answers", tables=self.tables, batch=x.mark)

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

    def _answer_shapes(self, x: Exchanged) -> list[list[tuple[int, int]]]:
        """Of what each owner answers to this rank."""
        return [self.routing.answer_shapes(r, self.world.rank, x.batch_sizes, n) for r, n in enumerate(x.sent)]

    def _add_in_host(self, x: Exchanged, answers: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """Add up the partial bags of this host for the samples of this rank and its peers across hosts, give the peers
        across hosts theirs, and return [B_local, columns] of every host's whole bags."""
        rank, routing = self.world.rank, self.routing
        peers, own = routing.peers_across_hosts(rank), x.batch_sizes[rank]
        host = rank // routing.per_host
        whole = empty((sum(x.batch_sizes[t] for t in peers), routing.host_widths[host]), self.dtype, self.world.device)
        place_columns(
            whole, [answers[neighbour][1] for neighbour in routing.ranks_of_host(rank)], routing.host_moves[host]
        )
        send, receive = [0] * self.world.size, [0] * self.world.size
        for peer, width in zip(peers, routing.host_widths, strict=True):
            send[peer], receive[peer] = x.batch_sizes[peer] * routing.host_widths[host], own * width
        received = self.world.all_to_all(
            whole.view(-1), send, receive, "whole bags", tables=self.tables, batch=x.mark
        ).wait()
        return [matrix for [matrix] in matrices(received, [[(own, width)] for width in routing.host_widths])]

    def _nothing_of_hosts(self, x: Exchanged) -> Sequence[Tensor]:
        nothing = torch.empty(x.batch_sizes[self.world.rank], 0, dtype=self.dtype, device=self.world.device)
        return [nothing] * len(self.routing.host_widths)

    def _assemble_rows(self, x: Exchanged, feature: int, answers: Sequence[Sequence[Tensor]]) -> Tensor:
        """[nnz_f, D]: rows back in the order of the batch."""
        ranges = []
        for pieces in self.routing.pieces[feature]:
            if not pieces:
                assert x.replicated is not None
                ranges.append(self._replicated_rows(x.replicated, feature))
                continue
            columns = [answers[r.rank][2 + index - self.routing.host_reduced[r.rank].stop] for index, r in pieces]
            ranges.append(torch.cat(columns, dim=1) if len(columns) > 1 else columns[0])
        grouped, order = torch.cat(ranges), x.order.get(feature)
        return grouped if order is None else torch.empty_like(grouped).index_copy_(0, order, grouped)

    def send(self, x: Exchanged, gradients: Sequence[Tensor], share: float) -> Pending:
        """Begin to send gradients of what a lookup returned, times `share`, to the owners of the rows."""
        return send_gradients(self.routing, self.world, self.group.unpooled, x, gradients, share)

    def received(self, x: Exchanged, owned: OwnedIds, sent: Pending) -> GradientSegment:
        """What came to the rows of this rank."""
        direct, host_reduced, rows = receive_gradients(self.routing, self.world, x, sent)
        unpooled = tuple(range(self.routing.host_reduced[self.world.rank].stop, len(self.routes)))
        return GradientSegment(owned, x.batch_sizes, x.received, (direct, host_reduced, *rows), unpooled)

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
