"""The sharded embedding: start, exchange, finish, and the way back of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from meseta.comm import Pending, World
from meseta.embedding.base import Collection, UpdateInBackward
from meseta.embedding.collection import EmbeddingBagCollection
from meseta.embedding.gradients import gather_column_stats, send_gradients, update_replicas
from meseta.embedding.routes import make_routing
from meseta.embedding.update import Contribution, FusedShards, group_shards, samples_of, sum_contributions, update_rows
from meseta.jagged import Embeddings, KeyedJaggedTensor
from meseta.jagged.shapes import Int
from meseta.ops.bucketize import bucketize
from meseta.ops.id_policy import CheckedIds
from meseta.ops.pooled_lookup import pooled_lookup
from meseta.ops.row_lookup import row_lookup
from meseta.ops.row_update import Bags, FeatureGradient, row_update
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, Plan
from meseta.storage import TableShard

HEADER = 4
"""Numbers before the counts of a rank: its batch size, and (feature, sample, id) of the first refused id."""
REFUSED = -2
"""Stands for the feature where a batch was refused as a whole."""


@dataclass(frozen=True)
class Bucketed:
    """Ids of one routed feature, grouped by the row range that holds them."""

    ids: Int[Tensor, " nnz"]
    """Local to their range."""
    lengths: Int[Tensor, "num_ranges B"]
    """Ids per (range, sample)."""
    order: Int[Tensor, " nnz"] | None
    """Where each id stood in the batch; None: nothing moved."""


@dataclass(frozen=True)
class Started:
    """The exchange of counts is in flight."""

    ids: KeyedJaggedTensor
    """Valid ids of all features."""
    buckets: dict[int, Bucketed]
    """By index of the routed feature."""
    counts_sent: Int[Tensor, " n"]
    counts: Pending
    failed: MesetaError | None = None
    """Why this rank cannot take part; `exchange` raises it on all ranks."""


@dataclass(frozen=True)
class Exchanged:
    """The counts are known, and the exchange of lengths and ids is in flight."""

    ids: KeyedJaggedTensor
    buckets: dict[int, Bucketed]
    batch_sizes: tuple[int, ...]
    """Samples of each rank; their sum is the global batch."""
    sent: tuple[tuple[int, ...], ...]
    """sent[r][k]: ids for route k of rank r."""
    received: tuple[tuple[int, ...], ...]
    """received[r][k]: ids from rank r for this rank's route k."""
    range_counts: dict[int, list[int]]
    """Ids of the local slice per row range, by index of the routed feature."""
    payload: Pending
    weights: Pending | None

    @property
    def num_samples(self) -> int:
        return sum(self.batch_sizes)


@dataclass(frozen=True)
class OwnedIds:
    """Ids of the global batch that this rank looks up, one route after the other."""

    bags: Bags
    """Ids of each route, ordered by (global sample, position)."""
    lengths: Int[Tensor, " routes_times_B"]
    """Ids per global sample of each route."""
    sizes: tuple[int, ...]
    """Ids of each route."""

    def ids(self) -> tuple[Tensor, ...]:
        """By route."""
        return self.bags.ids.split(self.sizes)

    def pooled(self, num_routes: int) -> Bags:
        """Of the first routes."""
        size, num_samples = sum(self.sizes[:num_routes]), self.bags.num_samples
        weights = None if self.bags.weights is None else self.bags.weights[:size]
        return Bags(self.bags.ids[:size], self.bags.offsets[: num_routes * num_samples + 1], num_samples, weights)


class ShardedEmbeddingBagCollection(Collection):
    """An EmbeddingBagCollection whose tables lie on the ranks that a plan names.

    `forward` is `finish(exchange(start(kjt)))`; a pipeline calls the three itself. Every rank gives its contiguous
    slice of the global batch and gets the embeddings of that slice. Gradients are of the local mean of the loss: they
    are scaled by B_local / B_global here. All ranks must call forward and backward in the same order.
    """

    def __init__(self, source: EmbeddingBagCollection, plan: Plan, world: World) -> None:
        """Allocate this rank's shards of `source`'s tables; the plan must fit the tables and the world."""
        super().__init__(source.tables, source.features, source.seed)
        plan.check(self.tables)
        if plan.num_ranks != world.size:
            raise MesetaError(f"plan: it is for {plan.num_ranks} ranks, but this run has {world.size}; make a new plan")
        self.plan = plan
        self.world = world
        self.routing = make_routing(self.tables, self.features, plan)
        self.shards = tuple(
            TableShard.create(
                table,
                shard,
                make_row_optimizer(table.optimizer),
                seed=self.seed,
                device=world.device,
            )
            for table in self.tables
            for shard in plan[table.name].shards
            if world.rank in shard.ranks
        )
        self._by_shard = {s.shard: index for index, s in enumerate(self.shards)}
        self._routes = self.routing.by_rank[world.rank]
        self._weighted = any(f.weighted for f in self.features)
        stages = [
            len(make_row_optimizer(t.optimizer).row_stats)
            for t in self.tables
            if len({s.columns for s in plan[t.name].shards}) > 1
        ]
        self.num_stat_exchanges = max(stages, default=0)
        """Stages of sums over rows that lie in column shards: every rank exchanges so many times per step."""
        # Position of each (feature, range) in the vector of counts: what goes to all ranks is one gather of it.
        position, index = {}, HEADER
        for f, cuts in self.routing.cuts.items():
            for n in range(len(cuts) - 1):
                position[f, n], index = index, index + 1
        gathered = [
            entry
            for routes in self.routing.by_rank
            for entry in (*range(HEADER), *(position[r.feature, r.range] for r in routes))
        ]
        self._gather_counts = torch.tensor(gathered, device=world.device)
        self.local_share = 1.0 / world.size
        """B_local / B_global of the last batch."""

    def forward(self, sparse: KeyedJaggedTensor | Exchanged) -> Embeddings:
        """Rows for the local slice, pooled [B_local, sum of D] and unpooled [nnz_f, D], of ids or of an exchange."""
        return self.finish(sparse if isinstance(sparse, Exchanged) else self.exchange(self.start(sparse)))

    def start(self, kjt: KeyedJaggedTensor) -> Started:
        """Check the ids, sort them by owner, begin the exchange of counts. No host sync, unless ids are dropped."""
        failed: MesetaError | None = None
        try:
            self._refuse_weight_gradient(kjt)
            checked = self.check_ids(kjt)
            ids, batch_size = checked.kjt, checked.kjt.batch_size
        except MesetaError as error:  # Raised here alone, it would leave the other ranks waiting.
            failed, checked = error, self._refused()
            ids, batch_size = checked.kjt, 0
        lengths = ids.lengths.view(len(self.features), batch_size)
        buckets, counts = {}, [checked.first_error.new_tensor([batch_size]), checked.first_error]
        for f, cuts in self.routing.cuts.items():
            values = ids[self.features[f].name].values
            if len(cuts) > 2:
                buckets[f] = Bucketed(*bucketize(values, lengths[f], cuts))
            else:
                buckets[f] = Bucketed(values, lengths[f : f + 1], None)
            counts.append(buckets[f].lengths.sum(dim=1))
        sent = torch.cat(counts)[self._gather_counts]
        mine = HEADER + len(self._routes)
        splits = [HEADER + len(routes) for routes in self.routing.by_rank]
        pending = self.world.all_to_all(sent, splits, [mine] * self.world.size)
        return Started(ids=ids, buckets=buckets, counts_sent=sent, counts=pending, failed=failed)

    def _refuse_weight_gradient(self, kjt: KeyedJaggedTensor) -> None:
        if self._weighted and kjt.weights is not None and kjt.weights.requires_grad:
            raise MesetaError(
                "the weights of the batch require a gradient, which a sharded lookup does not send back; detach them, "
                "or set pooling='none' and apply them to the returned rows"
            )

    def _refused(self) -> CheckedIds:
        """No samples, and the mark that tells the other ranks."""
        keys, nothing = tuple(f.name for f in self.features), self._gather_counts.new_empty(0)
        ids = KeyedJaggedTensor(keys=keys, values=nothing, lengths=nothing)
        mark = self._gather_counts.new_tensor([REFUSED, 0, 0])
        return CheckedIds(kjt=ids, num_outside=mark.new_zeros(len(keys)), first_error=mark)

    def exchange(self, x: Started) -> Exchanged:
        """Read the counts, agree on errors, begin the exchange of lengths and ids."""
        received = x.counts.wait()
        numbers = torch.cat([x.counts_sent, received]).tolist()  # The one host sync.
        sent, at = [], 0
        for routes in self.routing.by_rank:
            sent.append(tuple(numbers[at + HEADER : at + HEADER + len(routes)]))
            at += HEADER + len(routes)
        size = HEADER + len(self._routes)
        headers = [numbers[at + r * size : at + (r + 1) * size] for r in range(self.world.size)]
        batch_sizes = tuple(header[0] for header in headers)
        if any(header[1] == REFUSED for header in headers):
            self.world.raise_together(x.failed)
        for rank, (_, feature, sample, row, *_rest) in enumerate(headers):
            if feature >= 0:
                raise self.refuse(feature, sum(batch_sizes[:rank]) + sample, row)
        counts = tuple(tuple(header[HEADER:]) for header in headers)
        batch = batch_sizes[self.world.rank]
        of_route = {
            (route.feature, route.range): n
            for routes, row in zip(self.routing.by_rank, sent, strict=True)
            for route, n in zip(routes, row, strict=True)
        }
        range_counts = {f: [of_route[f, n] for n in range(len(cuts) - 1)] for f, cuts in self.routing.cuts.items()}
        payload = self.world.all_to_all(
            self._pack(x.buckets, range_counts),
            [batch * len(routes) + sum(n) for routes, n in zip(self.routing.by_rank, sent, strict=True)],
            [b * len(self._routes) + sum(n) for b, n in zip(batch_sizes, counts, strict=True)],
        )
        weights = None
        if self._weighted:
            packed = self._pack_weights(x, range_counts)
            weights = self.world.all_to_all(packed, [sum(n) for n in sent], [sum(n) for n in counts])
        return Exchanged(
            ids=x.ids,
            buckets=x.buckets,
            batch_sizes=batch_sizes,
            sent=tuple(sent),
            received=counts,
            range_counts=range_counts,
            payload=payload,
            weights=weights,
        )

    def finish(self, x: Exchanged) -> Embeddings:
        """Look up what this rank owns, return it to the ranks that asked, put the answers together."""
        share = self.local_share = x.batch_sizes[self.world.rank] / max(x.num_samples, 1)
        owned = self._unpack(x)
        pooled, *rows = UpdateInBackward.apply(
            self._anchor,
            None,
            lambda: self._lookup(x, owned),
            lambda *gradients: self._update(x, owned, share, gradients),
        )
        return self.embeddings(x.ids, pooled, rows)

    def _pack(self, buckets: dict[int, Bucketed], range_counts: dict[int, list[int]]) -> Tensor:
        """For each rank: the lengths of all its routes, then their ids."""
        ids = {f: bucket.ids.split(range_counts[f]) for f, bucket in buckets.items()}
        parts = []
        for routes in self.routing.by_rank:
            parts += [buckets[r.feature].lengths[r.range].to(torch.int64) for r in routes]
            parts += [ids[r.feature][r.range] for r in routes]
        return torch.cat(parts) if parts else self._gather_counts.new_empty(0)

    def _pack_weights(self, x: Started, range_counts: dict[int, list[int]]) -> Tensor:
        """One weight for each id that `_pack` sends."""
        weights = {}
        for f, bucket in x.buckets.items():
            own = x.ids[self.features[f].name].weights
            assert own is not None
            moved = own if bucket.order is None else own[bucket.order]
            weights[f] = moved.to(self.dtype).split(range_counts[f])
        parts = [weights[r.feature][r.range] for routes in self.routing.by_rank for r in routes]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype, device=self.world.device)

    def _unpack(self, x: Exchanged) -> OwnedIds:
        """From (rank, lengths | ids) to one list per route in the order of global samples."""
        num_routes, step = len(self._routes), 2 * len(self._routes)
        sizes = [s for b, n in zip(x.batch_sizes, x.received, strict=True) for s in (*[b] * num_routes, *n)]
        pieces = x.payload.wait().split(sizes)

        def by_route(parts: Sequence[Tensor], first: int, stride: int, like: Tensor) -> Tensor:
            ordered = [part for k in range(num_routes) for part in parts[first + k :: stride]]
            return torch.cat(ordered) if ordered else like.new_empty(0)

        ids, lengths = (by_route(pieces, first, step, self._gather_counts) for first in (num_routes, 0))
        weights = None
        if x.weights is not None:
            parts = x.weights.wait().split([n for counts in x.received for n in counts])
            weights = by_route(parts, 0, num_routes, self._anchor.to(self.dtype))
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        owned = tuple(sum(n[k] for n in x.received) for k in range(num_routes))
        return OwnedIds(bags=Bags(ids, offsets, x.num_samples, weights), lengths=lengths, sizes=owned)

    def _lookup(self, x: Exchanged, owned: OwnedIds) -> list[Tensor]:
        """[pooled [B_local, sum of D], rows of each unpooled feature ...] for the local slice."""
        tables = [self.shards[self._by_shard[r.shard]].weight for r in self._routes]
        num_pooled = self.routing.num_pooled[self.world.rank]
        pooled = self._pool(owned, tables[:num_pooled], x.num_samples)
        single, sizes = owned.bags.ids[sum(owned.sizes[:num_pooled]) :], owned.sizes[num_pooled:]
        rows = row_lookup(tables[num_pooled:], single, list(accumulate(sizes, initial=0)))
        answers = self._return(x, pooled, rows)
        out: dict[int, Tensor] = {}
        for f in self.routing.cuts:
            out[f] = (
                self._assemble_rows(x, f, answers) if self.features[f].pooling == "none" else self._assemble(f, answers)
            )
        for f in self.routing.replicated:
            out[f] = self._lookup_replica(x.ids, f)
        ordered = [out[f] for f, spec in enumerate(self.features) if spec.pooling != "none"]
        empty = torch.empty(x.ids.batch_size, 0, dtype=self.dtype, device=self.world.device)
        together = torch.cat([empty, *ordered], dim=1)
        self.divide_means(together, x.ids.lengths.view(len(self.features), -1))
        return [together, *(out[f] for f, spec in enumerate(self.features) if spec.pooling == "none")]

    def _pool(self, owned: OwnedIds, tables: Sequence[Tensor], num_samples: int) -> Tensor:
        """[B_global, columns of this rank's pooled routes]."""
        n = len(tables)
        if n == 0:
            return torch.empty(num_samples, 0, dtype=self.dtype, device=self.world.device)
        bags = owned.pooled(n)
        weighted = [self.features[r.feature].weighted for r in self._routes[:n]]
        return pooled_lookup(tables, bags.ids, bags.offsets, bags.weights, weighted)

    def _return(self, x: Exchanged, pooled: Tensor, rows: Sequence[Tensor]) -> list[list[Tensor]]:
        """Send each rank the answers for its samples: answers[r] = [pooled [B_local, columns of r], rows of each
        ...]."""
        first = self.routing.num_pooled[self.world.rank]
        by_rank = [rows_k.split([n[first + k] for n in x.received]) for k, rows_k in enumerate(rows)]
        parts, splits = [], []
        for r, piece in enumerate(pooled.split(x.batch_sizes)):
            mine = [piece.reshape(-1), *(rows_k[r].reshape(-1) for rows_k in by_rank)]
            parts += mine
            splits.append(sum(p.numel() for p in mine))
        shapes = [self._answer_shapes(x, r) for r in range(self.world.size)]
        receive = [sum(a * b for a, b in shape) for shape in shapes]
        flat = self.world.all_to_all(torch.cat(parts), splits, receive).wait().split(receive)
        return [
            [piece.view(shape) for piece, shape in zip(f.split([a * b for a, b in s]), s, strict=True)]
            for f, s in zip(flat, shapes, strict=True)
        ]

    def _answer_shapes(self, x: Exchanged, rank: int) -> list[tuple[int, int]]:
        """Shapes of what rank `rank` answers: its pooled columns, then the rows of each unpooled route."""
        first = self.routing.num_pooled[rank]
        rows = [
            (x.sent[rank][first + k], route.shard.num_columns)
            for k, route in enumerate(self.routing.by_rank[rank][first:])
        ]
        return [(x.batch_sizes[self.world.rank], self.routing.pooled_columns[rank]), *rows]

    def _assemble(self, feature: int, answers: Sequence[Sequence[Tensor]]) -> Tensor:
        """[B_local, D]: columns side by side, row ranges added from the first to the last."""
        total: Tensor | None = None
        for pieces in self.routing.pieces[feature]:
            columns = [answers[r.rank][0][:, r.column : r.column + r.shard.num_columns] for _, r in pieces]
            part = torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]
            total = part if total is None else total + part
        assert total is not None
        return total

    def _assemble_rows(self, x: Exchanged, feature: int, answers: Sequence[Sequence[Tensor]]) -> Tensor:
        """[nnz_f, D]: rows back in the order of the batch."""
        ranges = []
        for pieces in self.routing.pieces[feature]:
            columns = [answers[r.rank][1 + index - self.routing.num_pooled[r.rank]] for index, r in pieces]
            ranges.append(torch.cat(columns, dim=1) if len(columns) > 1 else columns[0])
        grouped = torch.cat(ranges)
        order = x.buckets[feature].order
        return grouped if order is None else torch.empty_like(grouped).index_copy_(0, order, grouped)

    def _lookup_replica(self, ids: KeyedJaggedTensor, feature: int) -> Tensor:
        """Rows or pooled rows of a table that lies here whole."""
        spec, jagged = self.features[feature], ids[self.features[feature].name]
        table = self.shards[self._by_shard[self.plan[spec.table].shards[0]]].weight
        if spec.pooling == "none":
            return row_lookup([table], jagged.values, [0, jagged.values.numel()])[0]
        return pooled_lookup([table], jagged.values, jagged.offsets, jagged.weights, [spec.weighted])

    def _update(self, x: Exchanged, owned: OwnedIds, share: float, gradients: Sequence[Tensor]) -> None:
        """Send upstream gradients to the owners of the rows, then step every shard once."""
        # The mean over a rank without samples is NaN; it weighs nothing.
        scaled = [g * share if share > 0 else torch.zeros_like(g) for g in gradients]
        self.divide_means(scaled[0], x.ids.lengths.view(len(self.features), -1))
        pooled, rows = send_gradients(self, x, scaled)
        for fused in self._fused:
            row_update(fused.group, self.lr(fused.spec), self.step + 1, owned.bags, [pooled, *rows])
        self._update_staged(owned, [pooled, *rows])
        update_replicas(self, x, scaled)
        self.step += 1

    @cached_property
    def _gradients(self) -> tuple[FeatureGradient, ...]:
        """Where the gradient of each route comes, ordered by feature as in one process: routes have the pooled ones
        first."""
        first = self.routing.num_pooled[self.world.rank]
        places = []
        for k, route in sorted(enumerate(self._routes), key=lambda entry: entry[1].feature):
            weighted, shard = self.features[route.feature].weighted, self._by_shard[route.shard]
            if k < first:
                places.append(FeatureGradient(k, shard, 0, route.column, weighted=weighted))
            else:
                places.append(FeatureGradient(k, shard, 1 + k - first, per_id=True))
        return tuple(places)

    @cached_property
    def _fused(self) -> tuple[FusedShards, ...]:
        """Shards that need nothing from other ranks."""
        return group_shards(self.shards, [f for f in self._gradients if f.table not in self._staged])

    @cached_property
    def _staged(self) -> frozenset[int]:
        """Shards that hold some columns of rows whose optimizer needs sums over whole rows."""
        return frozenset(
            index
            for index, shard in enumerate(self.shards)
            if shard.optimizer.row_stats and shard.shard.num_columns < shard.spec.embedding_dim
        )

    def _update_staged(self, owned: OwnedIds, gradients: Sequence[Tensor]) -> None:
        """Step column shards; ranks exchange the statistics of rows between the stages."""
        if not self.num_stat_exchanges:
            return
        num_samples = owned.bags.num_samples
        ids = owned.ids()
        samples = samples_of(
            ids, owned.lengths.split(num_samples) if num_samples else [owned.lengths] * len(ids), num_samples
        )
        parts: dict[int, list[Contribution]] = {}
        for at in self._gradients:
            if at.table in self._staged:
                width, k = self.shards[at.table].shard.num_columns, at.position
                source = torch.arange(ids[k].numel(), device=ids[k].device) if at.per_id else samples[k]
                scale = (
                    owned.bags.weights.split(owned.sizes)[k] if at.weighted and owned.bags.weights is not None else None
                )
                gradient = gradients[at.gradient][:, at.column : at.column + width]
                parts.setdefault(at.table, []).append(Contribution(ids[k], samples[k], gradient, source, scale))
        used = [self.shards[i] for i in sorted(parts)]
        sums = [sum_contributions(self.shards[i], parts[i], num_samples) for i in sorted(parts)]
        hypers = [self.hyper(shard.spec) for shard in used]
        update_rows(used, sums, hypers, lambda stats: gather_column_stats(self, used, stats), self.num_stat_exchanges)
