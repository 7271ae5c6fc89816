"""The sharded embedding: start, exchange, finish, and the step of the rows that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from meseta.comm import BatchSlice, Pending, World
from meseta.embedding.accumulate import Segment, join_passes
from meseta.embedding.base import Collection, UpdateInBackward
from meseta.embedding.collection import EmbeddingBagCollection
from meseta.embedding.exchange import Exchanged, OwnedIds, Started
from meseta.embedding.gradients import gather_column_stats
from meseta.embedding.replicas import Replicas
from meseta.embedding.sharded_lookup import ShardedLookup
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
from meseta.ops.row_update import FeatureGradient
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, Plan
from meseta.spec.transfer import INT32_MAX
from meseta.storage import TableShard


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
        weights = {s.shard: s.weight for s in self.shards}
        self.lookups = tuple(
            ShardedLookup(group, self.tables, plan, weights, self.dtype, world) for group in self.groups
        )
        """One per group of features."""
        stages = [
            len(make_row_optimizer(t.optimizer).row_stats)
            for t in self.tables
            if len({s.columns for s in plan[t.name].shards}) > 1
        ]
        self.num_stat_exchanges = max(stages, default=0)
        """Stages of sums over rows that lie in column shards: every rank exchanges so many times per step."""
        self.replicas = Replicas(self.lookups, self.shards, plan, world)
        self._kept_local: list[list[Segment]] = []
        self.local_share = 1.0 / world.size
        """B_local / B_global of the last batch."""

    def forward(self, sparse: KeyedJaggedTensor | Sequence[Exchanged]) -> Embeddings:
        """Rows for the local slice, pooled [B_local, sum of D] and unpooled [nnz_f, D], of ids or of an exchange."""
        return self.finish(self.exchange(self.start(sparse)) if isinstance(sparse, KeyedJaggedTensor) else sparse)

    def start(self, kjt: KeyedJaggedTensor) -> Sequence[Started]:
        """Check the ids, sort them by owner, begin the exchange of counts. No host sync, unless ids are dropped."""
        try:
            self._refuse(kjt)
            checked = self.check_ids(kjt)
        except MesetaError as error:  # Raised here alone, it would leave the other ranks waiting.
            return [lookup.start(error) for lookup in self.lookups]
        return [lookup.start(own) for lookup, own in zip(self.lookups, checked, strict=True)]

    def _refuse(self, kjt: KeyedJaggedTensor) -> None:
        """Raise MesetaError for a batch that cannot be looked up here."""
        if kjt.values.numel() > INT32_MAX:
            raise MesetaError(
                f"the batch has {kjt.values.numel()} ids on one rank, at most {INT32_MAX} can be; cut it up"
            )
        if any(group.is_weighted for group in self.groups) and kjt.weights is not None and kjt.weights.requires_grad:
            raise MesetaError(
                "the weights of the batch require a gradient, which a sharded lookup does not send back; detach them, "
                "or set pooling='none' and apply them to the returned rows"
            )

    def exchange(self, x: Sequence[Started]) -> Sequence[Exchanged]:
        """Read the counts, agree on errors, begin the exchange of lengths and ids."""
        return [lookup.exchange(own) for lookup, own in zip(self.lookups, x, strict=True)]

    def finish(self, x: Sequence[Exchanged]) -> Embeddings:
        """Look up what this rank owns, return it to the ranks that asked, put the answers together."""
        sizes = x[0].batch_sizes
        share = self.local_share = sizes[self.world.rank] / max(sum(sizes), 1)
        self.batch_slice = BatchSlice(world=self.world, step=self.step, sizes=sizes, first=self.first_sample)
        owned = [lookup.unpack(own) for lookup, own in zip(self.lookups, x, strict=True)]
        each = zip(self.lookups, x, owned, strict=True)
        lookups = [partial(look.look_up, own, ids, self.stage) for look, own, ids in each]
        found = UpdateInBackward.apply(self._anchor, lookups, partial(self._update, x, owned, share))
        return self.embeddings([own.ids for own in x], found)

    def _update(
        self, x: Sequence[Exchanged], owned: Sequence[OwnedIds], share: float, *gradients: Tensor
    ) -> Sequence[Tensor | None]:
        """Send upstream gradients to the owners of the rows, then step every shard once."""
        given: list[Sequence[Tensor]] = []
        for group, own, (pooled, *rows) in zip(self.groups, x, self.by_group(gradients), strict=True):
            lengths = own.ids.lengths.view(len(group.features), -1)
            given.append([group.divide_means(pooled.clone(), lengths) if group.has_means else pooled, *rows])
        with self.stage("gradient_dist"):
            sent = [look.send(own, moved, share) for look, own, moved in zip(self.lookups, x, given, strict=True)]
        if self._is_accumulating:
            self._keep_local(x, given, share)
            self._kept.append(self._received(x, owned, sent))
            return ()
        replicated = self._start_replicas(x, given, share)
        received = self._received(x, owned, sent)
        with self.stage("table_update"):
            whole, moved = join_passes([*self._kept, received])
            self.forget_kept()
            for fused in self._fused:
                step_shards(fused, self.lr(fused.spec), self.step + 1, whole.bags, moved)
            self._update_staged(whole, moved)
            self.replicas.finish_update(replicated, self.lr, self.step + 1)
        self.step += 1
        return ()

    def _received(self, x: Sequence[Exchanged], owned: Sequence[OwnedIds], sent: Sequence[Pending]) -> list[Segment]:
        """What came to the rows of this rank."""
        each = zip(self.lookups, x, owned, sent, strict=True)
        with self.stage("gradient_dist"):
            return [look.received(own, ids, pending) for look, own, ids, pending in each]

    def _at_home(self, x: Sequence[Exchanged], given: Sequence[Sequence[Tensor]]) -> list[Segment]:
        """What this rank's samples give to rows that every rank holds, of the groups that read such."""
        found = [look.at_home(own, moved) for look, own, moved in zip(self.lookups, x, given, strict=True)]
        return [segment for segment in found if segment is not None]

    def _start_replicas(
        self, x: Sequence[Exchanged], given: Sequence[Sequence[Tensor]], share: float
    ) -> Pending | None:
        """Begin to add up what the rows get that every rank holds."""
        if not self.replicas.learn:
            return None
        if not self._kept_local:
            return self.replicas.start_update(*join_passes([self._at_home(x, given)]), share)
        self._keep_local(x, given, share)
        return self.replicas.start_update(*join_passes(self._kept_local), 1.0)

    def _keep_local(self, x: Sequence[Exchanged], given: Sequence[Sequence[Tensor]], share: float) -> None:
        """Keep what the replicas get from this rank's samples; micro-batches may differ in `share`."""
        if self.replicas.learn:
            scaled = [[gradient * share for gradient in of_group] for of_group in given]
            self._kept_local.append(self._at_home(x, scaled))

    def forget_kept(self) -> None:
        """Drop what `accumulating` has kept, where its step is not to be taken."""
        self._kept.clear()
        self._kept_local.clear()

    @cached_property
    def _gradients(self) -> tuple[FeatureGradient, ...]:
        """Where the gradient of each route comes, ordered by feature as in one process."""
        by_shard = {s.shard: index for index, s in enumerate(self.shards)}
        found: dict[int, list[FeatureGradient]] = {}
        position = matrix = 0
        for look in self.lookups:
            found |= look.places(by_shard, position, matrix)
            position += len(look.routes)
            matrix += 2 + len(look.routes) - look.routing.summed[self.world.rank].stop
        return tuple(place for at in sorted(found) for place in found[at])

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
        gather = partial(gather_column_stats, self.plan, self.world, self.dtype, used)
        update_rows(used, sums, hypers, gather, self.num_stat_exchanges)
