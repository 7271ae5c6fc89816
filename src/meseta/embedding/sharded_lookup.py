"""One exchange of ids for rows: the features of one batch size, over the ranks of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from meseta.comm import BatchSlice, BatchTotals, ExchangeScope, PendingCollective, World
from meseta.embedding.accumulate import GradientSegment, local_segment
from meseta.embedding.batch_context import ExhaustedInput
from meseta.embedding.counts import CountsExchange
from meseta.embedding.feature_group import FeatureGroup
from meseta.embedding.gradient_dist import GradientDist, receive_gradients, select_row_gradients
from meseta.embedding.hierarchical import InterHostEmbeddings, RouteRows, send_to_cross_host_peers
from meseta.embedding.input_dist import (
    BucketizedIds,
    DistinctRows,
    InputDist,
    OwnedIds,
    PendingCounts,
    bucketize_features_by_row,
    bucketize_permutes,
    unpack_ids,
)
from meseta.embedding.message_format import (
    GradientRounding,
    MatrixLayout,
    MessageFormat,
    MessageFormats,
    MessageLayout,
    gradient_exponent,
)
from meseta.embedding.routes import Route, RouteRange, make_routing
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
from meseta.spec.transfer import BATCH_REJECTED, CountsHeader, id_bytes, max_range_rows

ID_DTYPES = {4: torch.int32, 8: torch.int64}
"""By bytes of an id on the way: it is a row of its range, so half the bits are enough for most."""


@dataclass(eq=False)
class OutputDist:
    """What owners have looked up, on its way to the ranks of the samples."""

    formats: MessageFormats
    message_layouts: Sequence[MessageLayout]
    """Of what each owner answers to this rank, or with two levels each rank of its host."""
    pending: PendingCollective
    replicated_bags: Tensor | None
    """Of rows that every rank holds."""
    wait_for_second_hop: Callable[[], InterHostEmbeddings] | None = None
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
        """What a lookup returns is of `dtype`; it reads what `bind_rows` was given. `clamped` counts numbers that are
        too large for fp16."""
        self.group = group
        self.world = world
        self.comm = comm
        self._num_clamped = clamped
        self.dtype = dtype
        self.routing = make_routing(tables, group.features, plan)
        self.routes = self.routing.routes_by_owner[world.rank]
        self.tables = tuple(dict.fromkeys(feature.table for feature in group.features))
        """Whose rows travel."""
        self._rows: Mapping[Shard, TableRows] = {}
        self._counts_exchange = CountsExchange(self.routing, world, self.tables, len(group.features))
        self._hierarchical = self._counts_exchange.hierarchical
        self._id_dtype = ID_DTYPES[id_bytes(max_range_rows(tables, plan))]

    def bind_rows(self, rows: Mapping[Shard, TableRows]) -> None:
        """Read the rows of these shards, all of this rank, from now on."""
        self._rows = rows
        owned, replicated = self.routing.routes_by_owner[self.world.rank], self.routing.pooled_replicated
        sides = (self.routing.direct[self.world.rank], self.routing.host_reduced[self.world.rank])
        self._lookup_groups = {side: self._make_lookup_group(owned[side.first : side.stop]) for side in sides}
        """Of both kinds of bags that this rank owns."""
        self._replicated_lookup_group = self._make_lookup_group(replicated)
        """Of the pooled features that stay at home."""

    def _make_lookup_group(self, routes: Sequence[Route]) -> LookupGroup:
        weighted = tuple(self.group.features[route.feature].weighted for route in routes)
        return LookupGroup(tuple(self._rows[route.shard].weight for route in routes), weighted)

    def start_input_dist(self, checked: CheckedIds | MesetaError, mark: int, totals: BatchTotals) -> PendingCounts:
        """Sort the ids by owner, begin the exchange of counts, of the batch's mark and of the `totals` of this rank. No
        host sync.

        An error is told to all ranks on the way; `exchange` raises it.
        """
        failed = checked if isinstance(checked, MesetaError) else None
        own = self._refused_batch() if isinstance(checked, MesetaError) else checked
        cut, distinct = bucketize_features_by_row(own.kjt, self.routing), DistinctRows.from_batch(own.kjt, self.routing)
        known = self._counts_exchange.pack_local_counts(mark, totals, own.kjt, own.first_error, cut, distinct)
        return PendingCounts(
            batch_tag=mark,
            ids=own.kjt,
            buckets=cut,
            local_counts=known,
            pending=self._counts_exchange.start(known),
            distinct_rows=distinct,
            error=failed,
        )

    def _refused_batch(self) -> CheckedIds:
        """No samples, and the mark that tells the other ranks."""
        keys = tuple(f.name for f in self.group.features)
        mark = torch.tensor([BATCH_REJECTED, 0, 0], device=self.world.device)
        ids = KeyedJaggedTensor(keys=keys, values=mark[:0], lengths=mark[:0])
        return CheckedIds(kjt=ids, num_outside=mark.new_zeros(len(keys)), first_error=mark)

    def input_dist(self, x: PendingCounts) -> InputDist:
        """Read the counts, agree on errors, begin the exchange of lengths and ids."""
        counts, met, sent_slots = (
            self._counts_exchange.wait(x.local_counts, x.pending),
            self._counts_exchange.first_hop_ranks,
            self._counts_exchange.send_layout,
        )
        self._check_headers(x, counts.headers)
        batch_sizes = tuple(header.batch_size for header in counts.headers)
        slots = BucketizedIds.from_counts(x, self.routing, counts.range_counts, self._id_dtype)
        send, receive = [0] * self.world.size, [0] * self.world.size
        for rank in met:
            send[rank] = x.ids.batch_size * len(counts.sent_counts[rank]) + sum(counts.sent_counts[rank])
            receive[rank] = batch_sizes[rank] * len(counts.received_counts[rank]) + sum(counts.received_counts[rank])
        packed, scope = (
            slots.pack_ids(sent_slots, self._id_dtype, self.world.device),
            ExchangeScope(met, self.tables, x.batch_tag),
        )
        payload = self.world.all_to_all(packed, send, receive, "ids", scope=scope)
        weights = None
        if self.group.is_weighted:
            packed = slots.pack_weights(sent_slots, self.dtype, self.world.device)
            sizes = (
                [sum(n) for n in counts.sent_counts],
                [sum(counts.received_counts.get(r, ())) for r in range(self.world.size)],
            )
            weights = self.world.all_to_all(packed, *sizes, "weights", scope=scope)
        return InputDist(
            batch_tag=x.batch_tag,
            ids=x.ids,
            replicated_ids=slots.replicated_ids(self.routing, x.ids),
            bucketize_permute=bucketize_permutes(x, self.routing),
            distinct_rows=x.distinct_rows,
            batch_size_per_rank=batch_sizes,
            totals_per_rank=tuple(BatchTotals(h.slice_size, h.num_padding, h.weight) for h in counts.headers),
            exhausted_ranks=ExhaustedInput.from_headers(counts.headers),
            ids_per_route=counts.ids_per_route,
            rows_per_route=counts.rows_per_route,
            range_counts=counts.range_counts,
            pending_ids=payload,
            pending_weights=weights,
        )

    def _check_headers(self, x: PendingCounts, headers: Sequence[CountsHeader]) -> None:
        """Raise MesetaError, on all ranks alike, where a rank is at another batch, or its ids are refused."""
        astray = [rank for rank, header in enumerate(headers) if header.batch_tag != headers[0].batch_tag]
        if astray:
            raise MesetaError(
                f"rank {astray[0]} is at another batch than rank 0; every rank must start the same batches in the same "
                "order, and take each stage of them in one order"
            )
        if any(header.feature == BATCH_REJECTED for header in headers):
            self.world.raise_on_all_ranks(x.error)
        for rank, header in enumerate(headers):
            if header.feature >= 0:
                before = sum(of_rank.batch_size for of_rank in headers[:rank])
                raise self.group.out_of_range_error(header.feature, before + header.sample, header.id)

    def forward_ids_within_host(self, x: InputDist) -> None:
        """Where ids have two levels, wait for those of twins and begin to give each rank of this host its own."""
        if self._hierarchical is not None and x.second_hop is None:
            payload = self._hierarchical.forward_ids_within_host(x)
            x.second_hop = (
                payload,
                None if x.pending_weights is None else self._hierarchical.forward_ids_within_host(x, weights=True),
            )

    def wait_for_ids(self, x: InputDist) -> OwnedIds:
        """Wait for the ids that this rank looks up."""
        self.forward_ids_within_host(x)
        payload, of_ids = x.last_hop
        arrival = range(self.world.size) if self._hierarchical is None else self._hierarchical.arrival_order
        weights = None if of_ids is None else of_ids.wait()
        return unpack_ids(x, len(self.routes), arrival, payload.wait(), weights)

    def lookup(self, x: InputDist, owned: OwnedIds, *, is_evaluation: bool = False) -> OutputDist:
        """Look up what this rank owns, and begin to send it to the ranks of the samples; in an evaluation it travels as
        it is."""
        wires = self._make_formats(FP32 if is_evaluation else self.comm.codec("forward"))
        messages = self._expected_messages(x)
        pending = self._lookup_and_send(x, owned, wires.direct, wires.direct.message_sizes(messages))
        return OutputDist(
            wires, messages, pending, self._lookup_replicated_bags(x.replicated_ids)
        )  # while the answers travel

    def start_second_hop(self, x: InputDist, answers: OutputDist) -> None:
        """Where answers have two levels, wait for those of this host and begin to give its twins theirs."""
        if self.routing.reduces_across_hosts and answers.wait_for_second_hop is None:
            views = answers.formats.direct.views(answers.pending.wait(), answers.message_layouts)
            far = answers.formats.inter_host
            answers.wait_for_second_hop = send_to_cross_host_peers(self.routing, self.world, x, views, far, self.tables)

    def output_dist(self, x: InputDist, answers: OutputDist) -> list[Tensor]:
        """[pooled [B_local, sum of D], rows of each unpooled feature ...] for the local slice, of what all ranks have
        answered."""
        self.start_second_hop(x, answers)
        wires, take = answers.formats, answers.wait_for_second_hop
        views = wires.direct.views(answers.pending.wait(), answers.message_layouts)
        came = InterHostEmbeddings(self._empty_host_bags(x), {}, {}) if take is None else take()
        direct = [of_owner[0] for of_owner in views]
        if self._hierarchical is not None:
            direct = [came.direct[owner] for owner in range(self.world.size)]
        rows = (
            came.rows
            if self._hierarchical is not None
            else self._decode_rows(wires.direct, views, answers.message_layouts)
        )
        pooled = self._assemble_pooled(x, wires.inter_host, direct, came.bags, answers.replicated_bags)
        return [pooled, *(self._assemble_unpooled(x, f, rows) for f in self.group.unpooled_indices)]

    def _assemble_pooled(
        self,
        x: InputDist,
        wire: MessageFormat,
        direct: Sequence[Tensor],
        whole: Sequence[Tensor],
        local_bags: Tensor | None,
    ) -> Tensor:
        """[B_local, sum of D]: bags of the owners, of hosts, and at home."""
        batch_size, routing = x.batch_size_per_rank[self.world.rank], self.routing
        pooled = empty((batch_size, routing.output_width), self.dtype, self.world.device)
        local = [] if local_bags is None else [local_bags]
        if wire.is_lossless:
            place_columns(pooled, [*direct, *whole, *local], routing.output_moves)
        else:
            if local:  # rows that every rank holds come first in their table
                place_columns(pooled, local, routing.replicated_moves)
            matrices = [MatrixLayout(batch_size, columns) for columns in routing.direct_columns]
            matrices += [routing.host_bag_layout(host, batch_size) for host in range(len(whole))]
            nothing = torch.empty(batch_size, 0, dtype=torch.uint8, device=self.world.device)
            came = [view if matrix.width else nothing for view, matrix in zip([*direct, *whole], matrices, strict=True)]
            wire.decode_into(pooled, came, matrices, routing.received_moves)
        return self.group.divide_means(pooled, x.ids.lengths.view(len(self.group.features), -1))

    def _make_formats(self, codec: Codec, half: HalfRange | None = None) -> MessageFormats:
        """How bags and rows, or their gradients, are written by a codec."""
        far = MessageFormat(
            self.dtype, self.world.device, codec, half_range=half or HalfRange(num_clamped=self._num_clamped)
        )
        return MessageFormats(replace(far, is_mixed=self.routing.reduces_within_host), far)

    def _decode_rows(
        self, wire: MessageFormat, answers: Sequence[Sequence[Tensor]], messages: Sequence[MessageLayout]
    ) -> RouteRows:
        """By owner and route: rows of those that are not pooled, as owners have answered."""
        found = RouteRows()
        for r, (views, message) in enumerate(zip(answers, messages, strict=True)):
            for i, (view, matrix) in enumerate(zip(views[2:], message[2:], strict=True)):
                found[r, self.routing.host_reduced[r].stop + i] = wire.decode(view, matrix)
        return found

    def _lookup_and_send(
        self, x: InputDist, owned: OwnedIds, wire: MessageFormat, expected: Sequence[int]
    ) -> PendingCollective:
        """Look up what this rank owns, and begin to send each rank the answers for its samples; `expected` are the
        sizes of those that come."""
        rank, routing = self.world.rank, self.routing
        direct, host_reduced = routing.direct[rank], routing.host_reduced[rank]
        bags = self._lookup_bags(x, owned, direct)
        bags = wire.pack(MatrixLayout(x.num_samples, routing.direct_columns[rank]), [bags])
        messages = [
            routing.output_message(rank, r, x.batch_size_per_rank, x.rows_per_route.served)
            for r in range(self.world.size)
        ]
        if len(self.routes) == direct.stop and not (routing.is_hierarchical or wire.is_mixed):
            send = bags.view(-1)
        else:
            partial = dict(enumerate(self._lookup_bags(x, owned, host_reduced).split(x.batch_size_per_rank)))
            rows, of_ranks = self._lookup_rows(x, owned, wire), bags.split(x.batch_size_per_rank)
            send = wire.empty(messages)
            for r, views in enumerate(wire.views(send, messages)):
                askers = routing.requesting_ranks(rank, r)
                peers = routing.cross_host_peers(r) if r in routing.host_ranks(rank) else ()
                parts = [[of_ranks[asker] for asker in askers], [partial[peer] for peer in peers]]
                parts += [[of_route[asker] for asker in askers] for of_route in rows]
                for view, part in zip(views, parts, strict=True):
                    if view.numel():
                        torch.cat(part, out=view)
        scope = ExchangeScope(
            None if self._hierarchical is None else self._hierarchical.host_ranks, self.tables, x.batch_tag
        )
        return self.world.all_to_all(send, wire.message_sizes(messages), expected, "embeddings", scope=scope)

    def _lookup_rows(self, x: InputDist, owned: OwnedIds, wire: MessageFormat) -> list[tuple[Tensor, ...]]:
        """Of each route that is not pooled: the rows for each rank, [rows, columns], as they are written."""
        first = self.routing.host_reduced[self.world.rank].stop
        if first == len(self.routes):
            return []
        tables = [self._rows[route.shard].weight for route in self.routes[first:]]
        counts = [
            [x.rows_per_route.served[r][k] for r in range(self.world.size)] for k in range(first, len(self.routes))
        ]
        begin = sum(owned.sizes[:first])
        ids = owned.bags.ids[begin:]
        if x.distinct_rows is not None:
            rows = ids if owned.rows is None else owned.rows[begin:]
            sizes = [
                x.ids_per_route.served[r][k] for k in range(first, len(self.routes)) for r in range(self.world.size)
            ]
            distinct = unique(rows, list(accumulate(sizes, initial=0)))
            self._check_distinct_counts(distinct.bounds.diff().tolist(), counts)
            ids = (
                distinct.rows
                if owned.rows is None
                else torch.empty_like(distinct.rows).index_copy_(0, distinct.inverse, ids.to(torch.int64))
            )
        bounds = list(accumulate((sum(of_route) for of_route in counts), initial=0))
        found = zip(row_lookup(tables, ids, bounds), counts, strict=True)
        return [wire.pack(MatrixLayout(rows.shape[0], (rows.shape[1],)), [rows]).split(sizes) for rows, sizes in found]

    def _check_distinct_counts(self, counted: Sequence[int], told: Sequence[Sequence[int]]) -> None:
        """Raise MesetaError where a rank has told another number of rows than its ids have."""
        for place, (number, expected) in enumerate(zip(counted, (n for own in told for n in own), strict=True)):
            if number != expected:
                rank = place % self.world.size
                raise MesetaError(
                    f"rank {rank} asks rank {self.world.rank} for {expected} rows of tables {', '.join(self.tables)}, "
                    f"but its ids name {number}; every rank must run the same version and plan"
                )

    def _lookup_bags(self, x: InputDist, owned: OwnedIds, side: RouteRange) -> Tensor:
        """[B_global, columns] of the routes of one matrix."""
        if side.first == side.stop:
            return torch.empty(x.num_samples, 0, dtype=self.dtype, device=self.world.device)
        bags = owned.route_bags(side)
        return lookup_group(self._lookup_groups[side], bags.ids, bags.offsets, bags.weights)

    def _lookup_replicated_bags(self, replicated: KeyedJaggedTensor | None) -> Tensor | None:
        """[B, columns of the pooled features side by side] of ids whose rows every rank holds; None where there are
        none."""
        num_pooled = len(self.routing.pooled_replicated)
        if replicated is None or not num_pooled:
            return None
        bags = replicated.select(replicated.keys[:num_pooled])
        return lookup_group(self._replicated_lookup_group, bags.values, bags.offsets, bags.weights)

    def _lookup_replicated_rows(self, replicated: KeyedJaggedTensor, feature: int) -> Tensor:
        """[nnz_f, D] of the ids at home of a feature that is not pooled."""
        [shard] = (r.shard for r in self.routing.replicated if r.feature == feature)
        values = replicated[self.group.features[feature].name].values
        return row_lookup([self._rows[shard].weight], values, [0, values.numel()])[0]

    def _expected_messages(self, x: InputDist) -> list[list[MatrixLayout]]:
        """Of what each owner answers to this rank."""
        rank, ranks = self.world.rank, range(self.world.size)
        mates = ranks if self._hierarchical is None else self._hierarchical.host_ranks
        through = {r: x.rows_per_route.forwarded_to(r) if r in mates else {} for r in ranks}
        return [self.routing.output_message(r, rank, x.batch_size_per_rank, through[r]) for r in ranks]

    def _empty_host_bags(self, x: InputDist) -> list[Tensor]:
        nothing = torch.empty(x.batch_size_per_rank[self.world.rank], 0, dtype=self.dtype, device=self.world.device)
        return [nothing] * len(self.routing.host_widths)

    def _assemble_unpooled(self, x: InputDist, feature: int, rows: RouteRows) -> Tensor:
        """[nnz_f, D]: rows back in the order of the batch."""
        ranges, is_distinct = [], x.distinct_rows is not None and feature in x.distinct_rows.rows
        for number, pieces in enumerate(self.routing.routes_by_range[feature]):
            if not pieces:
                ranges.append(self._lookup_replicated_range(x, feature, number, is_distinct))
                continue
            columns = [rows[r.rank, index] for index, r in pieces]
            ranges.append(torch.cat(columns, dim=1) if len(columns) > 1 else columns[0])
        grouped, order = torch.cat(ranges), x.bucketize_permute.get(feature)
        if x.distinct_rows is not None and is_distinct:
            return grouped[x.distinct_rows.inverse[feature]]
        return grouped if order is None else torch.empty_like(grouped).index_copy_(0, order, grouped)

    def _lookup_replicated_range(self, x: InputDist, feature: int, number: int, is_distinct: bool) -> Tensor:
        """Rows of a range that every rank holds: of each id, or of each distinct row."""
        assert x.replicated_ids is not None
        if x.distinct_rows is None or not is_distinct:
            return self._lookup_replicated_rows(x.replicated_ids, feature)
        [shard] = (r.shard for r in self.routing.replicated if r.bucket == (feature, number))
        first, stop = self.routing.range_bounds[feature][number : number + 2]
        asked = x.distinct_rows.rows[feature]
        bounds = torch.searchsorted(asked, asked.new_tensor([first, stop])).tolist()
        ids = asked[bounds[0] : bounds[1]] - first
        return row_lookup([self._rows[shard].weight], ids, [0, ids.numel()])[0]

    def start_gradient_dist(
        self, x: InputDist, gradients: Sequence[Tensor], batch: BatchSlice, seed: int
    ) -> GradientDist:
        """Begin to send gradients of what a lookup returned, times the share of this rank's samples, to the owners of
        the rows."""
        wires, draw = self._gradient_formats(x), None
        if wires.inter_host.codec.scale_bytes:
            first = batch.first_sample if self.group.batch_name == "" else sum(x.batch_size_per_rank[: self.world.rank])
            names = tuple(feature.name for feature in self.group.features)
            draw = GradientRounding(seed, batch.step, names, first, x.ids.lengths)
        share = batch.local_share
        return GradientDist(self.routing, self.world, self.group.unpooled_indices, x, wires, draw, gradients, share)

    def _gradient_formats(self, x: InputDist) -> MessageFormats:
        half = HalfRange(gradient_exponent(x.num_samples), self._num_clamped)
        return self._make_formats(self.comm.codec("backward"), half)

    def finish_gradient_dist(self, x: InputDist, owned: OwnedIds, sent: GradientDist) -> GradientSegment:
        """What came to the rows of this rank."""
        wire = self._gradient_formats(x).direct
        direct, host_reduced, rows = receive_gradients(self.routing, self.world, x, sent, wire)
        unpooled = tuple(range(self.routing.host_reduced[self.world.rank].stop, len(self.routes)))
        counts = tuple(x.ids_per_route.served[r] for r in range(self.world.size))
        return GradientSegment(owned, x.batch_size_per_rank, counts, (direct, host_reduced, *rows), unpooled)

    def gradient_layout(
        self, by_shard: Mapping[Shard, int], position: int, matrix: int
    ) -> dict[int, list[FeatureGradient]]:
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
            found.setdefault(self.group.feature_indices[route.feature], []).append(place)
        return found

    def replicated_segment(self, x: InputDist, gradients: Sequence[Tensor]) -> GradientSegment | None:
        """What this rank's samples give to rows that every rank holds; None where there are none."""
        if x.replicated_ids is None:
            return None
        first = len(self.routing.pooled_replicated)
        rows = [
            select_row_gradients(self.group.unpooled_indices, x, gradients, route)
            for route in self.routing.replicated[first:]
        ]
        return local_segment(x.replicated_ids, [gradients[0], *rows], range(first, len(self.routing.replicated)))

    def replica_gradient_layout(
        self, tables: Mapping[str, int], position: int, matrix: int
    ) -> dict[int, FeatureGradient]:
        """The same as `places` for an `replicated_segment` segment, of the tables that `tables` numbers."""
        found, first = {}, len(self.routing.pooled_replicated)
        for k, route in enumerate(self.routing.replicated):
            if route.shard.table in tables:
                table, weighted = tables[route.shard.table], self.group.features[route.feature].weighted
                if k < first:
                    column = self.routing.output_columns[route.feature]
                    place = FeatureGradient(position + k, table, matrix, column, weighted=weighted)
                else:
                    place = FeatureGradient(position + k, table, matrix + 1 + k - first, per_id=True)
                found[self.group.feature_indices[route.feature]] = place
        return found
