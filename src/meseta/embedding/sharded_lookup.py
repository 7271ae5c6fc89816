"""Distributed lookup of one feature group over the ranks of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from meseta.comm import BatchSlice, BatchTotals, ExchangeScope, PendingCollective, World
from meseta.embedding.averages import RowAverages, look_up_rows
from meseta.embedding.batch_context import ExhaustedInput, FeatureGroup
from meseta.embedding.hierarchical import (
    CountsExchange,
    InterHostEmbeddings,
    InterHostGradients,
    RouteRows,
    order_by_cross_host_peer,
    order_by_rank,
    send_gradients_to_cross_host_peers,
    send_to_cross_host_peers,
)
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
from meseta.embedding.routes import (
    GradientRounding,
    MatrixLayout,
    MessageFormat,
    MessageFormats,
    MessageLayout,
    Route,
    RouteRange,
    Routing,
    column_groups,
    gradient_exponent,
    make_routing,
)
from meseta.embedding.update import GradientSegment, local_segment
from meseta.ops.codec import HalfRange
from meseta.ops.columns import place_columns
from meseta.ops.id_policy import CheckedIds
from meseta.ops.memory import empty
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_update import FeatureGradient, TableRows
from meseta.ops.unique import unique
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import COLUMN_BLOCK, MesetaError, Plan, Shard, TableSpec
from meseta.spec.codecs import FP32, Codec, Communication
from meseta.spec.transfer import BATCH_REJECTED, CountsHeader, id_bytes, max_range_rows
from meseta.storage import TableStorage

ID_DTYPES = {4: torch.int32, 8: torch.int64}
"""Dtype of ids in exchanges, by their size in bytes. Ids are relative to their row range, so that 4 bytes often
suffice."""


@dataclass(eq=False)
class OutputDist:
    """Embeddings in flight from owners to the ranks of the samples."""

    formats: MessageFormats
    message_layouts: Sequence[MessageLayout]
    """Layouts of the messages to this rank from all owners. With a hierarchical exchange, only ranks of this host send
    messages."""
    pending: PendingCollective
    replicated_bags: Tensor | None
    wait_for_second_hop: Callable[[], InterHostEmbeddings] | None = None
    """Waits for embeddings from other hosts. `None` before the second hop."""


class ShardedLookup:
    """Distributes the ids of one feature group to the ranks that own the rows, and returns the looked-up rows.

    The backward pass sends gradients along the same routes in reverse. All ranks must call the same methods in the same
    order.
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
        """Create a lookup of `dtype` embeddings. Call `bind_rows` first. `clamped` [1] counts overflows of fp16."""
        self.group = group
        self.world = world
        self.comm = comm
        self._num_clamped = clamped
        self.dtype = dtype
        self.routing = make_routing(tables, group.features, plan)
        self.routes = self.routing.routes_by_owner[world.rank]
        self.tables = tuple(dict.fromkeys(feature.table for feature in group.features))
        self.averages: RowAverages | None = None
        """Averages to look up in place of rows."""
        self._rows: Mapping[Shard, TableRows] = {}
        self._counts_exchange = CountsExchange(self.routing, world, self.tables, len(group.features))
        self._hierarchical = self._counts_exchange.hierarchical
        self._id_dtype = ID_DTYPES[id_bytes(max_range_rows(tables, plan))]

    def bind_rows(self, rows: Mapping[Shard, TableRows]) -> None:
        """Use the given rows of this rank's shards from now on."""
        self._rows = rows
        owned, replicated = self.routing.routes_by_owner[self.world.rank], self.routing.pooled_replicated
        sides = (self.routing.direct[self.world.rank], self.routing.host_reduced[self.world.rank])
        self._lookup_groups = {side: self._make_lookup_group(owned[side.first : side.stop]) for side in sides}
        self._replicated_lookup_group = self._make_lookup_group(replicated)

    def _make_lookup_group(self, routes: Sequence[Route]) -> tuple[list[TableRows], LookupGroup]:
        weighted = tuple(self.group.features[route.feature].weighted for route in routes)
        rows = [self._rows[route.shard] for route in routes]
        return rows, LookupGroup(tuple(table.weight for table in rows), weighted)

    def start_input_dist(self, checked: CheckedIds | MesetaError, batch_tag: int, totals: BatchTotals) -> PendingCounts:
        """Sort the ids by owner, and start to exchange counts with the batch tag and the totals of this rank.

        Does not wait for a GPU, unless distinct rows are counted. An error in `checked` is sent to all ranks, and
        `input_dist` raises it.
        """
        failed = checked if isinstance(checked, MesetaError) else None
        valid_ids = self._refused_batch() if isinstance(checked, MesetaError) else checked
        buckets, distinct = (
            bucketize_features_by_row(valid_ids.kjt, self.routing),
            DistinctRows.from_batch(valid_ids.kjt, self.routing),
        )
        local_counts = self._counts_exchange.pack_local_counts(
            batch_tag, totals, valid_ids.kjt, valid_ids.first_error, buckets, distinct
        )
        return PendingCounts(
            batch_tag=batch_tag,
            ids=valid_ids.kjt,
            buckets=buckets,
            local_counts=local_counts,
            pending=self._counts_exchange.start(local_counts),
            distinct_rows=distinct,
            error=failed,
        )

    def _refused_batch(self) -> CheckedIds:
        keys = tuple(f.name for f in self.group.features)
        first_error = torch.tensor([BATCH_REJECTED, 0, 0], device=self.world.device)
        ids = KeyedJaggedTensor(keys=keys, values=first_error[:0], lengths=first_error[:0])
        return CheckedIds(kjt=ids, num_outside=first_error.new_zeros(len(keys)), first_error=first_error)

    def input_dist(self, x: PendingCounts) -> InputDist:
        """Wait for the counts, raise errors on all ranks, and start to exchange lengths and ids."""
        counts, first_hop_ranks, send_layout = (
            self._counts_exchange.wait(x.local_counts, x.pending),
            self._counts_exchange.first_hop_ranks,
            self._counts_exchange.send_layout,
        )
        self._check_headers(x, counts.headers)
        batch_sizes = tuple(header.batch_size for header in counts.headers)
        slots = BucketizedIds.from_counts(x, self.routing, counts.range_counts, self._id_dtype)
        send, receive = [0] * self.world.size, [0] * self.world.size
        for rank in first_hop_ranks:
            send[rank] = x.ids.batch_size * len(counts.sent_counts[rank]) + sum(counts.sent_counts[rank])
            receive[rank] = batch_sizes[rank] * len(counts.received_counts[rank]) + sum(counts.received_counts[rank])
        packed, scope = (
            slots.pack_ids(send_layout, self._id_dtype, self.world.device),
            ExchangeScope(first_hop_ranks, self.tables, x.batch_tag),
        )
        payload = self.world.all_to_all(packed, send, receive, "ids", scope=scope)
        # Weights have another dtype than ids, so they are sent separately.
        weights = None
        if self.group.is_weighted:
            packed = slots.pack_weights(send_layout, self.dtype, self.world.device)
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
        diverged = [rank for rank, header in enumerate(headers) if header.batch_tag != headers[0].batch_tag]
        if diverged:
            raise MesetaError(
                f"rank {diverged[0]} is at another batch than rank 0; start the same batches on all ranks in the same "
                "order, and run their stages in the same order"
            )
        if any(header.feature == BATCH_REJECTED for header in headers):
            self.world.raise_on_all_ranks(x.error)
        for rank, header in enumerate(headers):
            if header.feature >= 0:
                before = sum(other.batch_size for other in headers[:rank])
                raise self.group.out_of_range_error(header.feature, before + header.sample, header.id)

    def forward_ids_within_host(self, x: InputDist) -> None:
        """Start the second hop of ids after the first one arrived. Does nothing if the exchange is flat or it has
        started."""
        if self._hierarchical is not None and x.second_hop is None:
            payload = self._hierarchical.forward_ids_within_host(x)
            x.second_hop = (
                payload,
                None if x.pending_weights is None else self._hierarchical.forward_ids_within_host(x, weights=True),
            )

    def wait_for_ids(self, x: InputDist) -> OwnedIds:
        self.forward_ids_within_host(x)
        payload, pending_weights = x.last_hop
        arrival = range(self.world.size) if self._hierarchical is None else self._hierarchical.arrival_order
        weights = None if pending_weights is None else pending_weights.wait()
        return unpack_ids(x, len(self.routes), arrival, payload.wait(), weights)

    def lookup(self, x: InputDist, owned: OwnedIds, *, is_evaluation: bool = False) -> OutputDist:
        """Look up owned rows, and start to send them to the ranks of the samples. Evaluation uses no codec."""
        formats = self._make_formats(FP32 if is_evaluation else self.comm.codec("forward"))
        messages = self._expected_messages(x)
        pending = self._lookup_and_send(x, owned, formats.direct, formats.direct.message_sizes(messages))
        # Replicated rows are looked up while embeddings are in flight.
        return OutputDist(formats, messages, pending, self._lookup_replicated_bags(x.replicated_ids))

    def start_second_hop(self, x: InputDist, output: OutputDist) -> None:
        """Start the second hop of embeddings after the first one arrived. Does nothing without a hop between hosts, or
        if it has started."""
        if self.routing.reduces_across_hosts and output.wait_for_second_hop is None:
            views = output.formats.direct.views(output.pending.wait(), output.message_layouts)
            inter_host = output.formats.inter_host
            output.wait_for_second_hop = send_to_cross_host_peers(
                self.routing, self.world, x, views, inter_host, self.tables
            )

    def output_dist(self, x: InputDist, output: OutputDist) -> list[Tensor]:
        """Wait for the local slice's embeddings: pooled [B_local, sum of D], then rows of each unpooled feature."""
        self.start_second_hop(x, output)
        formats, wait_for_second_hop = output.formats, output.wait_for_second_hop
        views = formats.direct.views(output.pending.wait(), output.message_layouts)
        inter_host = (
            InterHostEmbeddings(self._empty_host_bags(x), {}, {})
            if wait_for_second_hop is None
            else wait_for_second_hop()
        )
        direct = [owner_views[0] for owner_views in views]
        if self._hierarchical is not None:
            direct = [inter_host.direct[owner] for owner in range(self.world.size)]
        rows = (
            inter_host.rows
            if self._hierarchical is not None
            else self._decode_rows(formats.direct, views, output.message_layouts)
        )
        pooled = self._assemble_pooled(x, formats.inter_host, direct, inter_host.bags, output.replicated_bags)
        return [pooled, *(self._assemble_unpooled(x, f, rows) for f in self.group.unpooled_indices)]

    def _assemble_pooled(
        self,
        x: InputDist,
        message_format: MessageFormat,
        direct: Sequence[Tensor],
        whole: Sequence[Tensor],
        local_bags: Tensor | None,
    ) -> Tensor:
        batch_size, routing = x.batch_size_per_rank[self.world.rank], self.routing
        width = sum(routing.dims[f] for f in routing.output_columns)
        pooled = empty((batch_size, width), self.dtype, self.world.device)
        local = [] if local_bags is None else [local_bags]
        if message_format.is_lossless:
            place_columns(pooled, [*direct, *whole, *local], routing.output_moves)
        else:
            if local:  # Replicated rows are the first rows of their tables, and rows are added in ascending order.
                place_columns(pooled, local, routing.replicated_moves)
            matrices = [MatrixLayout(batch_size, columns) for columns in routing.direct_columns]
            matrices += [routing.host_bag_layout(host, batch_size) for host in range(len(whole))]
            nothing = torch.empty(batch_size, 0, dtype=torch.uint8, device=self.world.device)
            received = [
                view if matrix.width else nothing for view, matrix in zip([*direct, *whole], matrices, strict=True)
            ]
            message_format.decode_into(pooled, received, matrices, routing.received_moves)
        return self.group.divide_means(pooled, x.ids.lengths.view(len(self.group.features), -1))

    def _make_formats(self, codec: Codec, half: HalfRange | None = None) -> MessageFormats:
        inter_host = MessageFormat(
            self.dtype, self.world.device, codec, half_range=half or HalfRange(num_clamped=self._num_clamped)
        )
        return MessageFormats(replace(inter_host, is_mixed=self.routing.reduces_within_host), inter_host)

    def _decode_rows(
        self,
        message_format: MessageFormat,
        views_by_owner: Sequence[Sequence[Tensor]],
        messages: Sequence[MessageLayout],
    ) -> RouteRows:
        rows_by_route = RouteRows()
        for r, (views, message) in enumerate(zip(views_by_owner, messages, strict=True)):
            for i, (view, matrix) in enumerate(zip(views[2:], message[2:], strict=True)):
                rows_by_route[r, self.routing.host_reduced[r].stop + i] = message_format.decode(view, matrix)
        return rows_by_route

    def _lookup_and_send(
        self, x: InputDist, owned: OwnedIds, message_format: MessageFormat, expected: Sequence[int]
    ) -> PendingCollective:
        """Look up the rows that this rank owns, and start to send them. `expected` are the sizes of the received
        messages."""
        rank, routing = self.world.rank, self.routing
        direct, host_reduced = routing.direct[rank], routing.host_reduced[rank]
        bags = self._lookup_bags(x, owned, direct)
        bags = message_format.pack(MatrixLayout(x.num_samples, routing.direct_columns[rank]), [bags])
        messages = [
            routing.output_message(rank, r, x.batch_size_per_rank, x.rows_per_route.served)
            for r in range(self.world.size)
        ]
        if len(self.routes) == direct.stop and not (routing.is_hierarchical or message_format.is_mixed):
            send = bags.view(-1)
        else:
            partial = dict(enumerate(self._lookup_bags(x, owned, host_reduced).split(x.batch_size_per_rank)))
            rows, bags_per_rank = self._lookup_rows(x, owned, message_format), bags.split(x.batch_size_per_rank)
            send = message_format.empty(messages)
            for r, views in enumerate(message_format.views(send, messages)):
                requesting_ranks = routing.requesting_ranks(rank, r)
                peers = routing.cross_host_peers(r) if r in routing.host_ranks(rank) else ()
                parts = [
                    [bags_per_rank[requester] for requester in requesting_ranks],
                    [partial[peer] for peer in peers],
                ]
                parts += [[route_rows[requester] for requester in requesting_ranks] for route_rows in rows]
                for view, part in zip(views, parts, strict=True):
                    if view.numel():
                        torch.cat(part, out=view)
        scope = ExchangeScope(
            None if self._hierarchical is None else self._hierarchical.host_ranks, self.tables, x.batch_tag
        )
        return self.world.all_to_all(send, message_format.message_sizes(messages), expected, "embeddings", scope=scope)

    def _lookup_rows(self, x: InputDist, owned: OwnedIds, message_format: MessageFormat) -> list[tuple[Tensor, ...]]:
        """Return the encoded rows [rows, columns] for each rank, for each unpooled route of this rank."""
        first = self.routing.host_reduced[self.world.rank].stop
        if first == len(self.routes):
            return []
        tables = [self._rows[route.shard] for route in self.routes[first:]]
        counts = [
            [x.rows_per_route.served[r][k] for r in range(self.world.size)] for k in range(first, len(self.routes))
        ]
        begin = sum(owned.sizes[:first])
        ids = owned.bags.ids[begin:]
        if x.distinct_rows is not None:
            # Each row is looked up and sent once per requesting rank.
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
        bounds = list(accumulate((sum(route_counts) for route_counts in counts), initial=0))
        rows_and_sizes = zip(look_up_rows(self.averages, tables, ids, bounds), counts, strict=True)
        return [
            message_format.pack(MatrixLayout(rows.shape[0], (rows.shape[1],)), [rows]).split(sizes)
            for rows, sizes in rows_and_sizes
        ]

    def _check_distinct_counts(self, actual: Sequence[int], announced: Sequence[Sequence[int]]) -> None:
        for place, (number, expected) in enumerate(
            zip(actual, (n for route_counts in announced for n in route_counts), strict=True)
        ):
            if number != expected:
                rank = place % self.world.size
                raise MesetaError(
                    f"rank {rank} requested {expected} rows of tables {', '.join(self.tables)} from rank "
                    f"{self.world.rank}, but sent ids of {number} rows; run the same version and plan on all ranks"
                )

    def _lookup_bags(self, x: InputDist, owned: OwnedIds, side: RouteRange) -> Tensor:
        if side.first == side.stop:
            return torch.empty(x.num_samples, 0, dtype=self.dtype, device=self.world.device)
        bags = owned.route_bags(side)
        tables, group = self._lookup_groups[side]
        if self.averages is not None:
            return self.averages.pool(tables, group, bags.ids, bags.offsets, bags.weights)
        return lookup_group(group, bags.ids, bags.offsets, bags.weights)

    def _lookup_replicated_bags(self, replicated: KeyedJaggedTensor | None) -> Tensor | None:
        """Look up the bags of replicated rows [B, sum of columns], or return `None` if there are none."""
        num_pooled = len(self.routing.pooled_replicated)
        if replicated is None or not num_pooled:
            return None
        bags = replicated.select(replicated.keys[:num_pooled])
        tables, group = self._replicated_lookup_group
        if self.averages is not None:
            return self.averages.pool(tables, group, bags.values, bags.offsets, bags.weights)
        return lookup_group(group, bags.values, bags.offsets, bags.weights)

    def _expected_messages(self, x: InputDist) -> list[list[MatrixLayout]]:
        rank, ranks = self.world.rank, range(self.world.size)
        host_ranks = ranks if self._hierarchical is None else self._hierarchical.host_ranks
        through = {r: x.rows_per_route.forwarded_to(r) if r in host_ranks else {} for r in ranks}
        return [self.routing.output_message(r, rank, x.batch_size_per_rank, through[r]) for r in ranks]

    def _empty_host_bags(self, x: InputDist) -> list[Tensor]:
        nothing = torch.empty(x.batch_size_per_rank[self.world.rank], 0, dtype=self.dtype, device=self.world.device)
        return [nothing] * len(self.routing.host_widths)

    def _assemble_unpooled(self, x: InputDist, feature: int, rows: RouteRows) -> Tensor:
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
        assert x.replicated_ids is not None
        if x.distinct_rows is None or not is_distinct:
            [shard] = (r.shard for r in self.routing.replicated if r.feature == feature)
            values = x.replicated_ids[self.group.features[feature].name].values
            return look_up_rows(self.averages, [self._rows[shard]], values, [0, values.numel()])[0]
        [shard] = (r.shard for r in self.routing.replicated if r.bucket == (feature, number))
        first, stop = self.routing.range_bounds[feature][number : number + 2]
        distinct = x.distinct_rows.rows[feature]
        bounds = torch.searchsorted(distinct, distinct.new_tensor([first, stop])).tolist()
        ids = distinct[bounds[0] : bounds[1]] - first
        return look_up_rows(self.averages, [self._rows[shard]], ids, [0, ids.numel()])[0]

    def start_gradient_dist(
        self, x: InputDist, gradients: Sequence[Tensor], batch: BatchSlice, seed: int
    ) -> GradientDist:
        """Start to send gradients, weighted by the share of this rank's samples, to the owners of the rows."""
        formats, draw = self._gradient_formats(x), None
        if formats.inter_host.codec.scale_bytes:
            first = batch.first_sample if self.group.batch_name == "" else sum(x.batch_size_per_rank[: self.world.rank])
            names = tuple(feature.name for feature in self.group.features)
            draw = GradientRounding(seed, batch.step, names, first, x.ids.lengths)
        share = batch.local_share
        return GradientDist(self.routing, self.world, self.group.unpooled_indices, x, formats, draw, gradients, share)

    def _gradient_formats(self, x: InputDist) -> MessageFormats:
        half = HalfRange(gradient_exponent(x.num_samples), self._num_clamped)
        return self._make_formats(self.comm.codec("backward"), half)

    def finish_gradient_dist(self, x: InputDist, owned: OwnedIds, sent: GradientDist) -> GradientSegment:
        message_format = self._gradient_formats(x).direct
        direct, host_reduced, rows = receive_gradients(self.routing, self.world, x, sent, message_format)
        unpooled = tuple(range(self.routing.host_reduced[self.world.rank].stop, len(self.routes)))
        counts = tuple(x.ids_per_route.served[r] for r in range(self.world.size))
        return GradientSegment(owned, x.batch_size_per_rank, counts, (direct, host_reduced, *rows), unpooled)

    def gradient_layout(
        self, by_shard: Mapping[Shard, int], position: int, matrix: int
    ) -> dict[int, list[FeatureGradient]]:
        """Return the positions of the gradients of each feature's routes in the segment of `finish_gradient_dist`.

        Keys are indices of features in the collection. `by_shard` has the index of each shard of this rank. `position`
        and `matrix` are the indices of the first route and matrix of this group.
        """
        direct, host_reduced = self.routing.direct[self.world.rank], self.routing.host_reduced[self.world.rank]
        places: dict[int, list[FeatureGradient]] = {}
        for k, route in enumerate(self.routes):
            weighted, shard = self.group.features[route.feature].weighted, by_shard[route.shard]
            if k < host_reduced.stop:
                gradient_matrix = matrix if k < direct.stop else matrix + 1
                place = FeatureGradient(position + k, shard, gradient_matrix, route.column, weighted=weighted)
            else:
                place = FeatureGradient(position + k, shard, matrix + 2 + k - host_reduced.stop, per_id=True)
            places.setdefault(self.group.feature_indices[route.feature], []).append(place)
        return places

    def replicated_segment(self, x: InputDist, gradients: Sequence[Tensor]) -> GradientSegment | None:
        """Return the gradients of replicated rows from this rank's samples, or `None` if there are no such rows."""
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
        """Return positions like `gradient_layout` in the segment of `replicated_segment`, given the index of each
        table."""
        places, first = {}, len(self.routing.pooled_replicated)
        for k, route in enumerate(self.routing.replicated):
            if route.shard.table in tables:
                table, weighted = tables[route.shard.table], self.group.features[route.feature].weighted
                if k < first:
                    column = self.routing.output_columns[route.feature]
                    place = FeatureGradient(position + k, table, matrix, column, weighted=weighted)
                else:
                    place = FeatureGradient(position + k, table, matrix + 1 + k - first, per_id=True)
                places[self.group.feature_indices[route.feature]] = place
        return places


@dataclass(eq=False)
class GradientDist:
    """Gradients of one batch in flight to the owners of rows. The exchange starts when the object is created."""

    routing: Routing
    world: World
    unpooled_features: Sequence[int]
    input_dist: InputDist
    formats: MessageFormats
    rounding: GradientRounding | None
    """Stochastic rounding, or `None` if the codec does not use it."""
    gradients: Sequence[Tensor]
    """Gradients of the bags of all pooled features, then of the rows of each unpooled feature."""
    scale: float

    _wait_for_first_hop: Callable[[], InterHostGradients] | None = field(init=False, default=None)
    _pending: PendingCollective | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.routing.reduces_across_hosts:
            self._wait_for_first_hop = self._start_first_hop()
        else:
            self._pending = self._send_to_owners(InterHostGradients(torch.empty(0), {}, {}))

    def wait(self) -> Tensor:
        """Return the gradients that this rank received as an owner of rows."""
        if self._wait_for_first_hop is not None:
            take, self._wait_for_first_hop = self._wait_for_first_hop, None
            self._pending = self._send_to_owners(take())
        assert self._pending is not None
        return self._pending.wait()

    def _send_to_owners(self, inter_host: InterHostGradients) -> PendingCollective:
        """Start to send gradients of bags [B_local, columns] and of unpooled rows [ids, D] to all owners, in the layout
        of the embeddings.

        Owners in this host also receive the gradients of partial bags.
        """
        routing, world, x, message_format = self.routing, self.world, self.input_dist, self.formats.direct
        ranks, host_ranks = range(world.size), routing.host_ranks(world.rank)
        exchange_ranks = host_ranks if routing.is_hierarchical else ranks
        send = [
            routing.output_message(
                r, world.rank, x.batch_size_per_rank, x.ids_per_route.forwarded_to(r) if r in exchange_ranks else {}
            )
            for r in ranks
        ]
        receive = [routing.output_message(world.rank, r, x.batch_size_per_rank, x.ids_per_route.served) for r in ranks]
        buffer = message_format.empty(send)
        for r, (direct, host_reduced, *rows) in enumerate(message_format.views(buffer, send)):
            direct_layout, reduced_layout, *route_layouts = send[r]
            if direct.numel() and routing.is_hierarchical:
                direct.copy_(inter_host.direct[r])
            elif direct.numel():
                self._write_bags(
                    message_format, direct, direct_layout, routing.gradient_moves[r], routing.direct_pieces[r]
                )
            if host_reduced.numel():
                message_format.write(
                    host_reduced, reduced_layout, [inter_host.bags], routing.host_reduced_gradient_moves[r]
                )
            for k, (out, matrix) in enumerate(
                zip(rows, route_layouts, strict=True), start=routing.host_reduced[r].stop
            ):
                if not routing.is_hierarchical:
                    self._write_rows(message_format, out, matrix, routing.routes_by_owner[r][k])
                elif r in host_ranks:
                    out.copy_(inter_host.rows[r, k])
        scope = ExchangeScope(exchange_ranks, batch_tag=x.batch_tag)
        return world.all_to_all(
            buffer, message_format.message_sizes(send), message_format.message_sizes(receive), "gradients", scope=scope
        )

    def _start_first_hop(self) -> Callable[[], InterHostGradients]:
        routing, x, message_format = self.routing, self.input_dist, self.formats.inter_host
        batch_size, hosts = x.batch_size_per_rank[self.world.rank], range(len(routing.host_widths))
        messages = [routing.cross_host_message(host, batch_size, x.ids_per_route.requested) for host in hosts]
        buffer = message_format.empty(messages)
        for host, (bags, *other_views) in enumerate(message_format.views(buffer, messages)):
            owners, (bag_layout, *other_layouts) = routing.forwarding_ranks(host), messages[host]
            self._write_bags(
                message_format, bags, bag_layout, routing.host_gradient_moves[host], routing.host_pieces[host]
            )
            for r, out, matrix in zip(owners, other_views, other_layouts, strict=False):
                self._write_bags(message_format, out, matrix, routing.gradient_moves[r], routing.direct_pieces[r])
            routes = zip(
                routing.host_unpooled_routes[host],
                other_views[len(owners) :],
                other_layouts[len(owners) :],
                strict=True,
            )
            for (r, k), out, matrix in routes:
                self._write_rows(message_format, out, matrix, routing.routes_by_owner[r][k])
        return send_gradients_to_cross_host_peers(routing, self.world, x, buffer, message_format)

    def _write_bags(
        self,
        message_format: MessageFormat,
        out: Tensor,
        matrix: MatrixLayout,
        moves: Sequence[int],
        pieces: Sequence[tuple[int, int]],
    ) -> None:
        """Write gradients of bags. `pieces` are pairs (feature, first column)."""
        if not out.numel():
            return
        rounding = None if self.rounding is None else self.rounding.bag_rounding(pieces)
        message_format.write(out, matrix, self.gradients[:1], moves, self.scale, rounding)

    def _write_rows(self, message_format: MessageFormat, out: Tensor, matrix: MatrixLayout, route: Route) -> None:
        rows, rounding = select_row_gradients(self.unpooled_features, self.input_dist, self.gradients, route), None
        if self.rounding is not None:
            numbers = select_range(self.input_dist, self.rounding.row_positions(route.feature), route)
            rounding = self.rounding.row_rounding(route.feature, route.shard.columns[0], numbers)
        message_format.write(out, matrix, [rows[:, slice(*route.shard.columns)]], None, self.scale, rounding)


def select_row_gradients(unpooled: Sequence[int], x: InputDist, gradients: Sequence[Tensor], route: Route) -> Tensor:
    """Return the gradients [ids, D] of an unpooled feature for the row range of a route, in the order of the range."""
    return select_range(x, gradients[1 + unpooled.index(route.feature)], route)


def select_range(x: InputDist, values: Tensor, route: Route) -> Tensor:
    """Select values [ids, ...] in a route's row range from those of its feature, in the order of the range."""
    f = route.feature
    moved = values if f not in x.bucketize_permute else values[x.bucketize_permute[f]]
    return moved.split(x.range_counts[f])[route.row_range]


def receive_gradients(
    routing: Routing, world: World, x: InputDist, sent: GradientDist, message_format: MessageFormat
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return this owner's gradients as (direct bags, partial bags, rows per unpooled route), [B_global, columns] for
    bags and [ids, D] for rows."""
    rank, buffer = world.rank, sent.wait()
    routes = routing.routes_by_owner[rank]
    messages = [
        routing.output_message(rank, r, x.batch_size_per_rank, x.ids_per_route.served) for r in range(world.size)
    ]
    host_reduced = torch.empty(
        x.num_samples, routing.host_reduced[rank].width, dtype=message_format.dtype, device=message_format.device
    )
    columns = routing.direct_columns[rank]
    # With direct bags only, the messages of all ranks form one matrix.
    if len(messages[0]) == 2 and not (routing.is_hierarchical or message_format.is_mixed):
        whole = MatrixLayout(x.num_samples, columns)
        [[view]] = message_format.views(buffer, [[whole]])
        return message_format.decode(view, whole), host_reduced, []
    direct, partial, *rows = (
        list(rank_parts) for rank_parts in zip(*message_format.views(buffer, messages), strict=True)
    )
    if host_reduced.numel():
        torch.cat(order_by_cross_host_peer(routing, rank, partial, x.batch_size_per_rank), out=host_reduced)
    bags = message_format.decode_all(order_by_rank(routing, rank, direct, x.batch_size_per_rank), columns)
    ordered = []
    for k, parts in enumerate(rows, start=routing.host_reduced[rank].stop):
        counts = [x.ids_per_route.served[r][k] for r in range(world.size)]
        ordered.append(
            message_format.decode_all(order_by_rank(routing, rank, parts, counts), (routes[k].shard.num_columns,))
        )
    return bags, host_reduced, ordered


def gather_column_stats(
    plan: Plan, world: World, dtype: torch.dtype, shards: Sequence[TableStorage], stats: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gather the statistics of each shard [n U, blocks of the shard] to those of whole rows [n U, blocks of the row].

    There are n statistics of `dtype`. Blocks are ordered by column.
    """
    # Column shards of a row range receive the same ids, so each rank knows the U of the others without an exchange.
    stats_by_shard = {shard.shard: stat for shard, stat in zip(shards, stats, strict=True) if stat is not None}
    groups = column_groups(list(stats_by_shard), plan)
    send, splits, expected, sizes = [], [], [], []
    for rank in range(world.size):
        shared = [g for g in groups if rank != world.rank and any(s.ranks[0] == rank for s in g)]
        pieces = [stats_by_shard[s].reshape(-1) for group in shared for s in group if s in stats_by_shard]
        send += pieces
        splits.append(sum(piece.numel() for piece in pieces))
        remote_shards = [(s, _num_rows(group, stats_by_shard)) for group in shared for s in group if s.ranks[0] == rank]
        expected += remote_shards
        sizes.append(sum(num_rows * _num_blocks(s) for s, num_rows in remote_shards))
    flat = torch.cat(send) if send else torch.empty(0, dtype=dtype, device=world.device)
    received = world.all_to_all(flat, splits, sizes, "row statistics").wait()
    pieces = received.split([num_rows * _num_blocks(s) for s, num_rows in expected])
    for (shard, num_rows), piece in zip(expected, pieces, strict=True):
        stats_by_shard[shard] = piece.view(num_rows, _num_blocks(shard))
    gathered = {s: torch.cat([stats_by_shard[piece] for piece in group], dim=1) for group in groups for s in group}
    return [gathered.get(shard.shard) for shard in shards]


def _num_blocks(shard: Shard) -> int:
    return -(-shard.num_columns // COLUMN_BLOCK)


def _num_rows(group: Sequence[Shard], stats_by_shard: Mapping[Shard, Tensor]) -> int:
    return next(stats_by_shard[s].shape[0] for s in group if s in stats_by_shard)
