"""The sharded embedding: start, exchange, finish, and the step of the rows that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from meseta.comm import Pending, Totals, World, abandon
from meseta.comm.coding import SumCoding
from meseta.embedding.accumulate import GradientSegment, join_passes
from meseta.embedding.base import Collection, UpdateInBackward
from meseta.embedding.collection import EmbeddingBagCollection
from meseta.embedding.exchange import Exchanged, OwnedIds, Started
from meseta.embedding.flight import Flight, RanOut, Timer
from meseta.embedding.gradients import SentGradients, gather_column_stats
from meseta.embedding.replicas import Replicas
from meseta.embedding.sharded_lookup import Answers, ShardedLookup
from meseta.embedding.update import group_shards, step_shards, sum_gradients, update_rows
from meseta.embedding.wire import gradient_exponent
from meseta.jagged import Embeddings, KeyedJaggedTensor
from meseta.ops.codec import HalfRange
from meseta.ops.id_policy import CheckedIds
from meseta.ops.row_program.optimizer import Hyper
from meseta.ops.row_update import FeatureGradient, TableRows
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, Plan, Shard
from meseta.spec.codecs import DIRECTIONS, Communication, Direction
from meseta.spec.tiers import StorageOptions
from meseta.spec.transfer import INT32_MAX
from meseta.storage import TableStorage, make_storages


@dataclass(eq=False)
class Leg:
    """What one group of features has of a batch under way; each field is there once its stage has been."""

    lookup: ShardedLookup
    started: Started
    exchanged: Exchanged = field(init=False)
    owned: OwnedIds = field(init=False)
    answers: Answers | None = field(init=False, default=None)
    """None where none are on the way."""
    gradients: Sequence[Tensor] = field(init=False)
    """Of the bags [B_local, sum of D] and of the rows of each unpooled feature, before they travel."""


class ShardedEmbeddingBagCollection(Collection[Leg]):
    """An EmbeddingBagCollection whose tables lie on the ranks that a plan names.

    `forward` is `finish(look_up(exchange(start(kjt))))`; a pipeline calls these itself. Every rank gives its contiguous
    slice of the global batch and gets the embeddings of that slice. Gradients are of the local mean of the loss: they
    are scaled by B_local / B_global here. All ranks must call forward and backward in the same order.
    """

    def __init__(
        self,
        source: EmbeddingBagCollection,
        plan: Plan,
        world: World,
        comm: Communication | None = None,
        storage: StorageOptions | None = None,
    ) -> None:
        """Allocate this rank's shards of `source`'s tables; the plan must fit the tables and the world. `comm` says how
        ranks write what they send; which way it takes is the plan's. `storage` has room for rows that lie far."""
        super().__init__(source.tables, source.features, source.seed)
        plan.check(self.tables)
        comm = comm or Communication()
        comm.check_dtype(self.tables[0].dtype)
        self.comm = comm
        """How ranks write what they send."""
        if any(comm.codec(direction).name == "fp16" for direction in DIRECTIONS):
            self.clamped = torch.zeros(1, dtype=torch.int64, device=world.device)
        if plan.num_ranks != world.size:
            raise MesetaError(f"plan: it is for {plan.num_ranks} ranks, but this run has {world.size}; make a new plan")
        storage = storage or StorageOptions()
        plan.check_room(storage)
        self._follow(plan, storage)
        self.world = world
        pieces = [(table, shard) for table in self.tables for shard in plan[table.name].shards]
        pieces = [(table, shard) for table, shard in pieces if world.rank in shard.ranks]
        self._shards = make_storages(pieces, seed=self.seed, device=world.device, options=storage)
        self.lookups = tuple(
            ShardedLookup(group, self.tables, plan, self.dtype, world, comm, self.clamped) for group in self.groups
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
        self._kept_local: list[list[GradientSegment]] = []

    @property
    def num_ranks(self) -> int:
        return self.world.size

    @property
    def shards(self) -> tuple[TableStorage, ...]:
        """The pieces of tables on this rank."""
        return self._shards

    def _describe(self, rows: Sequence[TableRows]) -> None:
        by_shard = {shard.shard: lent for shard, lent in zip(self.shards, rows, strict=True)}
        for look in self.lookups:
            look.lend(by_shard)
        self.replicas.lend(by_shard)
        places = [place for place in self._gradients if place.table not in self._staged]
        self._fused = group_shards(self.shards, rows, places)
        """Shards that need nothing from other ranks."""

    def _begin(self, flight: Flight[Leg], kjt: KeyedJaggedTensor | RanOut | Exception) -> None:
        """Sort the ids by owner, begin the exchange of counts. No host sync, unless ids are dropped."""
        checked: Sequence[CheckedIds | MesetaError]
        try:
            if isinstance(kjt, Exception):
                raise kjt if isinstance(kjt, MesetaError) else MesetaError(repr(kjt))
            ids = self._no_samples(self.world.device) if isinstance(kjt, RanOut) else kjt
            self._refuse(ids)
            checked = accepted = self.check_ids(ids)
            flight.num_outside = self.count_outside(accepted)
            if isinstance(kjt, RanOut):
                checked = [replace(own, first_error=kjt.told(self.world.device)) for own in accepted]
        except MesetaError as error:  # Raised here alone, it would leave the other ranks waiting.
            checked = [error] * len(self.lookups)
        size = 0 if isinstance(checked[0], MesetaError) else checked[0].kjt.batch_size
        totals = flight.totals or Totals(size, 0, float(size))
        started = [look.start(own, flight.mark, totals) for look, own in zip(self.lookups, checked, strict=True)]
        flight.parts = tuple(Leg(look, own) for look, own in zip(self.lookups, started, strict=True))

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

    @property
    def local_share(self) -> float:
        """B_local / B_global of the batch in hand, see `batch_slice`."""
        batch_slice = self.batch_slice
        return 1.0 / self.world.size if batch_slice is None else batch_slice.local_share

    def exchange(self, flight: Flight[Leg]) -> Flight[Leg]:
        """Read the counts, agree on errors, begin the exchange of lengths and ids."""
        flight.enter("exchanged", after="started")
        with flight.dropped_by_errors():
            for leg in flight.parts:
                leg.exchanged = leg.lookup.exchange(leg.started)
                del leg.started
            exchanged = flight.parts[0].exchanged
            flight.whole = Totals.over_ranks(exchanged.totals, self.world.ranks_per_host)
            flight.ran_out = exchanged.ran_out
        return flight

    def drop(self, flight: Flight[Leg]) -> None:
        for leg in flight.parts:
            if flight.stage == "started":
                leg.started.received.wait()
            elif flight.stage == "exchanged":
                leg.exchanged.wait()
        if flight.stage == "looked up":
            self.answers(flight)
        super().drop(flight)

    def look_up(self, flight: Flight[Leg]) -> Flight[Leg]:
        """Look up what this rank owns, begin to return it to the ranks that asked."""
        flight.enter("looked up", after="exchanged")
        with flight.dropped_by_errors():
            exchanged = flight.parts[0].exchanged
            self._looked_up(flight, self.world, exchanged.batch_sizes, exchanged.totals)
            if flight.lease is None:
                self._unpack(flight)
            if self.lies_far:
                self._borrow_far(flight)
            else:
                self._borrow(flight)
            is_evaluation = not torch.is_grad_enabled()
            with torch.no_grad():
                for leg in flight.parts if flight.answers is None else ():
                    leg.answers = leg.lookup.look_up(leg.exchanged, leg.owned, is_evaluation=is_evaluation)
        return flight

    def _unpack(self, flight: Flight[Leg]) -> None:
        """Wait for the ids that this rank looks up."""
        for leg in flight.parts:
            leg.owned = leg.lookup.unpack(leg.exchanged)

    def _begin_to_borrow(self, flight: Flight[Leg]) -> None:
        if self._far and flight.lease is None:
            self._unpack(flight)
            self._borrow_rows(flight)

    def _borrow_rows(self, flight: Flight[Leg]) -> None:
        """Borrow rows where ids become the places of their rows, unless that was done before."""
        if flight.lease is not None:
            return
        looked_up = []
        for leg in flight.parts:
            of_routes = zip(leg.lookup.routes, leg.owned.ids(), strict=True)
            looked_up += [(self._shard_of[route.shard], rows) for route, rows in of_routes]
        places = iter(self._borrow(flight, looked_up))
        for leg in flight.parts:
            leg.owned = leg.owned.at([next(places) for _ in leg.lookup.routes])

    def _borrow_far(self, flight: Flight[Leg]) -> None:
        """The same, and wait for them. What keeps a rank from having its rows is raised on all. Collective."""
        problem = None
        try:
            self._borrow_rows(flight)
            assert flight.lease is not None
            flight.lease.wait()
        except MesetaError as error:
            problem = error
        failures = torch.tensor([0.0 if problem is None else 1.0])
        if self.world.sum_of_few(failures.to(self.world.device), "agree").item():
            self.world.raise_together(problem)

    @cached_property
    def _shard_of(self) -> dict[Shard, int]:
        """Index of each."""
        return {storage.shard: index for index, storage in enumerate(self.shards)}

    def hand_on(self, flight: Flight[Leg]) -> None:
        is_exchanged = flight.stage == "exchanged"
        with flight.stage_timer("input_dist" if is_exchanged else "output_dist"):
            for leg in flight.parts:
                if is_exchanged:
                    leg.lookup.hand_on_ids(leg.exchanged)
                elif leg.answers is not None:
                    leg.lookup.hand_on(leg.exchanged, leg.answers)

    def _assemble(self, flight: Flight[Leg]) -> Sequence[Tensor]:
        """Put what all ranks have answered together."""
        each = [leg.lookup.assemble(leg.exchanged, leg.answers) for leg in flight.parts if leg.answers is not None]
        for leg in flight.parts:
            leg.answers = None
        return [tensor for of_group in each for tensor in of_group]

    def _finish(self, flight: Flight[Leg]) -> Embeddings:
        with flight.stage_timer("output_dist"):
            self.answers(flight)
            update = partial(self._run_backward, flight)
            found = UpdateInBackward.apply(self._anchor, flight.take_answers(), update)
        return self._embeddings(flight, [leg.exchanged.ids for leg in flight.parts], found)

    def _send_gradients(
        self, flight: Flight[Leg], *gradients: Tensor
    ) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Begin to send upstream gradients to the owners of the rows."""
        assert flight.batch_slice is not None
        legs, share = flight.take_parts(), flight.batch_slice.local_share
        for leg, (of_bags, *of_rows) in zip(legs, self.by_group(gradients), strict=True):
            leg.gradients = [leg.lookup.group.gradient_of_sums(of_bags, leg.exchanged.ids.lengths), *of_rows]
        with flight.stage_timer("gradient_dist"):
            sent = [leg.lookup.send(leg.exchanged, leg.gradients, flight.batch_slice, self.seed) for leg in legs]
        take = partial(self._received, legs, sent, flight.stage_timer)
        if not self._waits(flight):
            return (), partial(self._update, flight, self._start_replicas(legs, share), take)
        self._keep_local(legs, share)
        self._kept.append(take if flight.overlaps else partial(list, take()))
        return (), lambda: None

    def _update(
        self, flight: Flight[Leg], replicated: Pending | None, take: Callable[[], list[GradientSegment]]
    ) -> None:
        """Step every shard once, by what came for it."""
        received = [*(kept() for kept in self._kept), take()]
        flight.before_update()
        with flight.stage_timer("table_update"):
            whole, moved = join_passes(received)
            self._forget_rows()
            for fused in self._fused:
                step_shards(fused, self.lr(flight, fused.spec), self.step + 1, whole.bags, moved, flight.found_inf)
            self._update_staged(flight, whole, moved)
            self.replicas.finish_update(replicated, partial(self.lr, flight), self.step + 1, flight.found_inf)
        self.step += 1

    def _received(
        self, legs: Sequence[Leg], sent: Sequence[SentGradients], stage_timer: Timer
    ) -> list[GradientSegment]:
        """What came to the rows of this rank."""
        with stage_timer("gradient_dist"):
            each = zip(legs, sent, strict=True)
            return [leg.lookup.received(leg.exchanged, leg.owned, pending) for leg, pending in each]

    def _at_home(self, legs: Sequence[Leg], scale: float = 1.0) -> list[GradientSegment]:
        """What this rank's samples give to rows that every rank holds, of the groups that read such, times `scale`."""
        found = []
        for leg in legs:
            scaled = leg.gradients if scale == 1.0 else [gradient * scale for gradient in leg.gradients]
            found.append(leg.lookup.replicated_segment(leg.exchanged, scaled))
        return [segment for segment in found if segment is not None]

    def _start_replicas(self, legs: Sequence[Leg], share: float) -> Pending | None:
        """Begin to add up what the rows get that every rank holds."""
        if not self.replicas.learn:
            return None
        exponent = gradient_exponent(legs[0].exchanged.num_samples)
        make_coding = self.make_coding("backward", "replicas", exponent)
        if not self._kept_local:
            return self.replicas.start_update(*join_passes([self._at_home(legs)]), share, make_coding)
        self._keep_local(legs, share)
        return self.replicas.start_update(*join_passes(self._kept_local), 1.0, make_coding)

    def make_coding(self, direction: Direction, name: str, exponent: int) -> Callable[[int], SumCoding] | None:
        """What tells how so many numbers of a sum cross hosts in the step of the batch in hand; None: as they are."""
        codec = self.comm.codec(direction)
        if codec.is_whole:
            return None

        def make(num_coded: int) -> SumCoding:
            step = self.step if self.batch_slice is None else self.batch_slice.step
            return SumCoding(codec, num_coded, (self.seed, step, name), HalfRange(exponent, self.clamped))

        return make

    def _keep_local(self, legs: Sequence[Leg], share: float) -> None:
        """Keep what the replicas get from this rank's samples; micro-batches may differ in `share`."""
        if self.replicas.learn:
            self._kept_local.append(self._at_home(legs, share))

    def forget_kept(self) -> None:
        if self._kept:
            abandon(list(self._kept))
        super().forget_kept()

    def _forget_rows(self) -> None:
        super()._forget_rows()
        self._kept_local.clear()

    @cached_property
    def _gradients(self) -> tuple[FeatureGradient, ...]:
        """Where the gradient of each route comes, ordered by feature as in one process."""
        found: dict[int, list[FeatureGradient]] = {}
        position = matrix = 0
        for look in self.lookups:
            found |= look.places(self._shard_of, position, matrix)
            position += len(look.routes)
            matrix += 2 + len(look.routes) - look.routing.host_reduced[self.world.rank].stop
        return tuple(place for at in sorted(found) for place in found[at])

    @cached_property
    def _staged(self) -> frozenset[int]:
        """Shards that hold some columns of rows whose optimizer needs sums over whole rows."""
        return frozenset(
            index
            for index, shard in enumerate(self.shards)
            if shard.optimizer.row_stats and shard.shard.num_columns < shard.spec.embedding_dim
        )

    def _update_staged(self, flight: Flight[Leg], owned: OwnedIds, gradients: Sequence[Tensor]) -> None:
        """Step column shards; ranks exchange the statistics of rows between the stages."""
        if not self.num_stat_exchanges:
            return
        assert flight.lease is not None
        places = [at for at in self._gradients if at.table in self._staged]
        sums = sum_gradients(self.shards, flight.lease.rows, places, owned, gradients)
        used = [self.shards[i] for i in sums]
        hypers = [Hyper(self.lr(flight, s.spec), self.step + 1, s.spec.embedding_dim) for s in used]
        gather = partial(gather_column_stats, self.plan, self.world, self.dtype, used)
        rows = [flight.lease.rows[i] for i in sums]
        update_rows(used, rows, list(sums.values()), hypers, gather, self.num_stat_exchanges, flight.found_inf)
