"""The sharded embedding: start, exchange, finish, and the way back of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meseta.comm import BatchSlice, Pending, World
from meseta.embedding.accumulate import Segment, join, local_segment
from meseta.embedding.base import Collection, UpdateInBackward
from meseta.embedding.collection import EmbeddingBagCollection
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
from meseta.embedding.gradients import gather_column_stats, receive_gradients, rows_of_range, send_gradients
from meseta.embedding.replicas import Replicas
from meseta.embedding.routes import Side, make_routing
from meseta.embedding.update import (
    Contribution,
    FusedShards,
    every_row,
    group_shards,
    samples_of,
    step_shards,
    sum_contributions,
    update_rows,
)
from meseta.jagged import Embeddings, KeyedJaggedTensor
from meseta.ops.columns import place_columns
from meseta.ops.id_policy import CheckedIds
from meseta.ops.memory import empty
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_lookup import row_lookup
from meseta.ops.row_update import FeatureGradient
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, Plan
from meseta.storage import TableShard

HEADER = 4
"""Numbers before the counts of a rank: its batch size, and (feature, sample, id) of the first refused id."""
REFUSED = -2
"""Stands for the feature where a batch was refused as a whole."""
MOST = 2**31 - 1
"""The largest number of 32 bits."""


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
        for shard in (shard for entry in plan.tables for shard in entry.shards):
            if shard.tier != "hbm":
                raise MesetaError(
                    f"plan: table {shard.table!r} has rows in tier {shard.tier!r}, but they can be in 'hbm' alone; "
                    "place them there"
                )
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
        # What goes to all ranks is one gather of [batch size, ids of each feature, first refused id, ids of each row
        # range of the features that are cut].
        num_features = len(self.features)
        at = {(f, 0): 1 + f for f in range(num_features)}
        ranges = [(f, n) for f in self.routing.cut_features for n in range(len(self.routing.cuts[f]) - 1)]
        at |= {slot: HEADER + num_features + index for index, slot in enumerate(ranges)}
        self._range_counts_at = [[at[f, n] for n in range(len(cuts) - 1)] for f, cuts in enumerate(self.routing.cuts)]
        header = (0, *range(1 + num_features, HEADER + num_features))
        gathered = [n for routes in self.routing.by_rank for n in (*header, *(at[r.slot] for r in routes))]
        self._sent_counts_at = gathered
        self._gather_counts = torch.tensor(gathered, device=world.device)
        longest = max(b - a for cuts in self.routing.cuts for a, b in pairwise(cuts))
        # Ids travel as rows of their range, so half the bits are enough for most.
        self._id_dtype = torch.int32 if longest <= MOST else torch.int64
        self.replicas = Replicas(self.features, self.routing, self.shards, world)
        self._kept_local: list[Segment] = []
        self.local_share = 1.0 / world.size
        """B_local / B_global of the last batch."""

    def forward(self, sparse: KeyedJaggedTensor | Exchanged) -> Embeddings:
        """Rows for the local slice, pooled [B_local, sum of D] and unpooled [nnz_f, D], of ids or of an exchange."""
        return self.finish(sparse if isinstance(sparse, Exchanged) else self.exchange(self.start(sparse)))

    def start(self, kjt: KeyedJaggedTensor) -> Started:
        """Check the ids, sort them by owner, begin the exchange of counts. No host sync, unless ids are dropped."""
        failed: MesetaError | None = None
        try:
            self._refuse(kjt)
            checked = self.check_ids(kjt)
            ids, batch_size = checked.kjt, checked.kjt.batch_size
        except MesetaError as error:  # Raised here alone, it would leave the other ranks waiting.
            failed, checked = error, self._refused()
            ids, batch_size = checked.kjt, 0
        cut = sort_cut_features(ids, self.routing)
        counts = [batch_size, *(b - a for a, b in pairwise(ids.key_offsets))]
        parts = [torch.tensor(counts, device=self.world.device), checked.first_error]
        known = torch.cat(parts if cut is None else [*parts, cut.totals])
        mine = HEADER + len(self._routes)
        splits = [HEADER + len(routes) for routes in self.routing.by_rank]
        received = self.world.all_to_all(known[self._gather_counts], splits, [mine] * self.world.size)
        return Started(ids=ids, cut=cut, counts=known, received=received, failed=failed)

    def _refuse(self, kjt: KeyedJaggedTensor) -> None:
        """Raise MesetaError for a batch that cannot be looked up here."""
        if kjt.values.numel() > MOST:
            raise MesetaError(f"the batch has {kjt.values.numel()} ids on one rank, at most {MOST} can be; cut it up")
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
        received = x.received.wait()
        numbers = torch.cat([x.counts, received]).tolist()  # The one host sync.
        own, numbers = numbers[: x.counts.numel()], numbers[x.counts.numel() :]
        known = [own[i] for i in self._sent_counts_at]
        sent, at = [], 0
        for routes in self.routing.by_rank:
            sent.append(tuple(known[at + HEADER : at + HEADER + len(routes)]))
            at += HEADER + len(routes)
        size = HEADER + len(self._routes)
        headers = [numbers[r * size : (r + 1) * size] for r in range(self.world.size)]
        batch_sizes = tuple(header[0] for header in headers)
        if any(header[1] == REFUSED for header in headers):
            self.world.raise_together(x.failed)
        for rank, (_, feature, sample, row, *_rest) in enumerate(headers):
            if feature >= 0:
                raise self.refuse(feature, sum(batch_sizes[:rank]) + sample, row)
        counts = tuple(tuple(header[HEADER:]) for header in headers)
        batch = batch_sizes[self.world.rank]
        range_counts = [[own[i] for i in ranges] for ranges in self._range_counts_at]
        slots = Slots.of(x, self.routing, range_counts, self._id_dtype)
        payload = self.world.all_to_all(
            slots.pack_ids(self.routing, self._id_dtype, self.world.device),
            [batch * len(routes) + sum(n) for routes, n in zip(self.routing.by_rank, sent, strict=True)],
            [b * len(self._routes) + sum(n) for b, n in zip(batch_sizes, counts, strict=True)],
        )
        weights = None
        if self._weighted:
            packed = slots.pack_weights(self.routing, self.dtype, self.world.device)
            weights = self.world.all_to_all(packed, [sum(n) for n in sent], [sum(n) for n in counts])
        return Exchanged(
            ids=x.ids,
            home=slots.at_home(self.routing, x.ids),
            order=order_of_unpooled(x, self.routing),
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
        self.batch_slice = BatchSlice(world=self.world, step=self.step, sizes=x.batch_sizes, first=self.first_sample)
        owned = unpack(x, len(self._routes))
        pooled, *rows = UpdateInBackward.apply(
            self._anchor,
            None,
            partial(self._lookup, x, owned),
            partial(self._update, x, owned, share),
        )
        return self.embeddings(x.ids, pooled, rows)

    def _lookup(self, x: Exchanged, owned: OwnedIds) -> list[Tensor]:
        """[pooled [B_local, sum of D], rows of each unpooled feature ...] for the local slice."""
        pending = self._answer(x, owned)
        at_home = self.replicas.lookup(x.home)  # while the answers travel
        answers = matrices(pending.wait(), self._answer_shapes(x))
        whole = self._add_in_host(x, answers) if self.routing.sums_in_hosts else self._nothing_of_hosts(x)
        pooled = empty((x.batch_sizes[self.world.rank], self.routing.out_width), self.dtype, self.world.device)
        sources = [*(own[0] for own in answers), *whole, *([] if at_home is None else [at_home])]
        place_columns(pooled, sources, self.routing.answer_moves)
        self.divide_means(pooled, x.ids.lengths.view(len(self.features), -1))
        return [pooled, *(self._assemble_rows(x, f, answers) for f in self._unpooled)]

    def _answer(self, x: Exchanged, owned: OwnedIds) -> Pending:
        """Look up what this rank owns, and begin to send each rank the answers for its samples."""
        rank = self.world.rank
        straight, summed = self.routing.straight[rank], self.routing.summed[rank]
        bags = self._look_up_bags(x, owned, straight)
        shapes = [self.routing.answer_shapes(rank, r, x.batch_sizes, n) for r, n in enumerate(x.received)]
        send = bags.view(-1)
        if len(self._routes) > straight.stop:
            partial = dict(enumerate(self._look_up_bags(x, owned, summed).split(x.batch_sizes)))
            tables = [self.shards[self._by_shard[r.shard]].weight for r in self._routes[summed.stop :]]
            single, sizes = owned.bags.ids[sum(owned.sizes[: summed.stop]) :], owned.sizes[summed.stop :]
            rows = row_lookup(tables, single, list(accumulate(sizes, initial=0))) if tables else []
            rows_by_rank = [own.split([n[summed.stop + k] for n in x.received]) for k, own in enumerate(rows)]
            parts = []
            for r, own in enumerate(bags.split(x.batch_sizes)):
                twins = self.routing.twins(r) if r in self.routing.mates(rank) else ()
                parts += [own, *(partial[twin] for twin in twins), *(of_route[r] for of_route in rows_by_rank)]
            send = torch.cat([part.reshape(-1) for part in parts])
        return self.world.all_to_all(send, numbers_in(shapes), numbers_in(self._answer_shapes(x)))

    def _look_up_bags(self, x: Exchanged, owned: OwnedIds, side: Side) -> Tensor:
        """[B_global, columns] of the routes of one matrix."""
        if side.first == side.stop:
            return torch.empty(x.num_samples, 0, dtype=self.dtype, device=self.world.device)
        bags = owned.bags_of(side)
        return lookup_group(self._tables_of[side], bags.ids, bags.offsets, bags.weights)

    @cached_property
    def _tables_of(self) -> dict[Side, LookupGroup]:
        """Of both kinds of bags that this rank owns."""
        groups = {}
        for side in (self.routing.straight[self.world.rank], self.routing.summed[self.world.rank]):
            routes = self._routes[side.first : side.stop]
            groups[side] = LookupGroup(
                tuple(self.shards[self._by_shard[r.shard]].weight for r in routes),
                tuple(self.features[r.feature].weighted for r in routes),
            )
        return groups

    def _answer_shapes(self, x: Exchanged) -> list[list[tuple[int, int]]]:
        """Of what each owner answers to this rank."""
        return [self.routing.answer_shapes(r, self.world.rank, x.batch_sizes, n) for r, n in enumerate(x.sent)]

    def _add_in_host(self, x: Exchanged, answers: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """Add up the partial bags of this host for the samples of this rank and its twins, give the twins theirs, and
        return [B_local, columns] of every host's whole bags."""
        rank, routing = self.world.rank, self.routing
        twins, own = routing.twins(rank), x.batch_sizes[rank]
        host = rank // routing.per_host
        whole = empty((sum(x.batch_sizes[t] for t in twins), routing.host_widths[host]), self.dtype, self.world.device)
        place_columns(whole, [answers[mate][1] for mate in routing.mates(rank)], routing.host_moves[host])
        send, receive = [0] * self.world.size, [0] * self.world.size
        for twin, width in zip(twins, routing.host_widths, strict=True):
            send[twin], receive[twin] = x.batch_sizes[twin] * routing.host_widths[host], own * width
        received = self.world.all_to_all(whole.view(-1), send, receive).wait()
        return [matrix for [matrix] in matrices(received, [[(own, width)] for width in routing.host_widths])]

    def _nothing_of_hosts(self, x: Exchanged) -> Sequence[Tensor]:
        nothing = torch.empty(x.batch_sizes[self.world.rank], 0, dtype=self.dtype, device=self.world.device)
        return [nothing] * len(self.routing.host_widths)

    def _assemble_rows(self, x: Exchanged, feature: int, answers: Sequence[Sequence[Tensor]]) -> Tensor:
        """[nnz_f, D]: rows back in the order of the batch."""
        ranges = []
        for pieces in self.routing.pieces[feature]:
            if not pieces:
                assert x.home is not None
                ranges.append(self.replicas.rows(x.home, self.features[feature]))
                continue
            columns = [answers[r.rank][2 + index - self.routing.summed[r.rank].stop] for index, r in pieces]
            ranges.append(torch.cat(columns, dim=1) if len(columns) > 1 else columns[0])
        grouped, order = torch.cat(ranges), x.order.get(feature)
        return grouped if order is None else torch.empty_like(grouped).index_copy_(0, order, grouped)

    def _update(self, x: Exchanged, owned: OwnedIds, share: float, *gradients: Tensor) -> None:
        """Send upstream gradients to the owners of the rows, then step every shard once."""
        pooled, *rows = gradients
        if any(f.pooling == "mean" for f in self.pooled_features):
            pooled = self.divide_means(pooled.clone(), x.ids.lengths.view(len(self.features), -1))
        given: Sequence[Tensor] = [pooled, *rows]
        sent = send_gradients(self, x, given, share)
        if self._is_accumulating:
            self._keep_local(x, given, share)
            self._kept.append(self._received(x, owned, sent))
            return
        replicated = self._start_replicas(x, given, share)
        whole = join([*self._kept, self._received(x, owned, sent)])
        self.forget_kept()
        for fused in self._fused:
            step_shards(fused, self.lr(fused.spec), self.step + 1, whole.ids.bags, whole.gradients)
        self._update_staged(whole.ids, whole.gradients)
        self.replicas.finish_update(replicated, self.lr, self.step + 1)
        self.step += 1

    def _received(self, x: Exchanged, owned: OwnedIds, sent: Pending) -> Segment:
        """What came to the rows of this rank."""
        straight, summed, rows = receive_gradients(self, x, sent)
        unpooled = tuple(range(self.routing.summed[self.world.rank].stop, len(self._routes)))
        return Segment(owned, x.batch_sizes, x.received, (straight, summed, *rows), unpooled)

    def _start_replicas(self, x: Exchanged, given: Sequence[Tensor], share: float) -> Pending | None:
        """Begin to add up what the rows get that every rank holds."""
        if x.home is None or not self.replicas.learn:
            return None
        home, gradients = x.home, self._gradients_at_home(x, given)
        if self._kept_local:
            self._keep_local(x, given, share)
            local = join(self._kept_local)
            home, gradients, share = local.as_batch(home.keys), list(local.gradients), 1.0
        return self.replicas.start_update(home, gradients, share)

    def _gradients_at_home(self, x: Exchanged, given: Sequence[Tensor]) -> list[Tensor]:
        """That of what a lookup returned, and of the rows at home of each feature that is not pooled."""
        unpooled = self.routing.home[len(self.routing.pooled_home) :]
        return [given[0], *(rows_of_range(self, x, given, route) for route in unpooled)]

    def _keep_local(self, x: Exchanged, given: Sequence[Tensor], share: float) -> None:
        """Keep what the replicas get from this rank's samples; micro-batches may differ in `share`."""
        if x.home is not None and self.replicas.learn:
            scaled = [gradient * share for gradient in self._gradients_at_home(x, given)]
            unpooled = range(len(self.routing.pooled_home), len(self.routing.home))
            self._kept_local.append(local_segment(x.home, scaled, unpooled))

    def forget_kept(self) -> None:
        """Drop what `accumulating` has kept, where its step is not to be taken."""
        self._kept.clear()
        self._kept_local.clear()

    @cached_property
    def _gradients(self) -> tuple[FeatureGradient, ...]:
        """Where the gradient of each route comes, ordered by feature as in one process: routes have the pooled ones
        first."""
        straight, summed = self.routing.straight[self.world.rank], self.routing.summed[self.world.rank]
        places = []
        for k, route in sorted(enumerate(self._routes), key=lambda entry: entry[1].feature):
            weighted, shard = self.features[route.feature].weighted, self._by_shard[route.shard]
            if k < summed.stop:
                matrix = 0 if k < straight.stop else 1
                places.append(FeatureGradient(k, shard, matrix, route.column, weighted=weighted))
            else:
                places.append(FeatureGradient(k, shard, 2 + k - summed.stop, per_id=True))
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
        for index, own in parts.items():
            if self.shards[index].spec.optimizer.stepped_rows == "all":
                own.append(every_row(self.shards[index]))
        used = [self.shards[i] for i in sorted(parts)]
        sums = [sum_contributions(self.shards[i], parts[i], num_samples) for i in sorted(parts)]
        hypers = [self.hyper(shard.spec) for shard in used]
        update_rows(used, sums, hypers, lambda stats: gather_column_stats(self, used, stats), self.num_stat_exchanges)
