"""Batches in, steps out: copy, input_dist, lookup, dense forward, agreement on the loss, backward, update; what travels
goes on while something is computed, where `meseta.spec.stages` lists it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from meseta.comm import DenseGradients, World, abandon
from meseta.comm.dense_shards import explain_uncalled
from meseta.data.batch import Batch
from meseta.embedding.flight import Flight
from meseta.jagged.shapes import Float
from meseta.models.base import before_of, readable
from meseta.ops.allocator import keep_freed_memory
from meseta.optim.clip import DenseClip
from meseta.optim.dense import dense_parameters, step_unless
from meseta.pipeline.agreement import Agreement, LateNonFiniteLoss, UnheardStep, begin_task_factors, totals_of
from meseta.pipeline.carried import Carried
from meseta.pipeline.losses import BatchLosses
from meseta.pipeline.micro_batches import split_batch, told_by_number
from meseta.pipeline.model import Model
from meseta.pipeline.side_copy import SideCopies
from meseta.spec import MesetaError
from meseta.spec.stages import Overlap
from meseta.telemetry.span import DeviceClock, StageTimes


@dataclass(frozen=True)
class Step:
    """What is left of a step."""

    agreement: Agreement = field(repr=False)
    """What all ranks have agreed on, with the terms of the loss that the model names."""
    num_samples: int
    """Samples of the global batch, without those that only fill it up."""
    logits: Float[Tensor, " B_local *T"]
    """This rank's predictions, made before the update."""
    batch: Batch
    """What they are of."""
    votes: tuple[float, ...] = ()
    """Sums over all ranks of what each gave; on a GPU those of the step before, and none in the first."""

    @property
    def loss(self) -> float:
        """Weighted mean over the global batch; 0 where all weights are 0. On a GPU, which is waited for, raises
        NonFiniteLoss where it is no number."""
        return self.agreement.loss


@dataclass(eq=False)
class _MicroBatch:
    """A micro-batch on its way."""

    batch: Batch | None
    """On its device; None where it could not be read."""
    flight: Flight[Any]

    @property
    def on_device(self) -> Batch:
        """The samples; a batch that could not be read has raised before."""
        assert self.batch is not None
        return self.batch


@dataclass(eq=False)
class _Coming:
    """A batch that was read."""

    batch: Batch | None
    """None where it could not be read."""
    error: Exception | None = None
    """Why."""
    refused: MesetaError | None = None
    """What all ranks were told is wrong with it before its step has come, which raises it."""
    copies: list[Callable[[], Batch]] = field(default_factory=list)
    """Gives each micro-batch on the device; empty until copies are begun."""
    parts: list[_MicroBatch] = field(default_factory=list)
    """Empty until it is begun."""
    task_factors: Callable[[float], Tensor] | None = None
    """Factors of the tasks, see `begin_task_factors`; `None` until it is begun, or if all labels are known."""


class Pipeline:
    """Trains on batches one after the other; every rank gives its slice of the same global batches.

    The loss is sum(w_i * l_i) / sum(w_i) over the samples of the global batch, where w_i is the weight of a sample (1
    where the batch has none) and l_i the binary cross-entropy, summed over tasks, and what the model adds to it, see
    meseta.pipeline.losses. If labels may be missing, the mean of each task is over the samples whose label is known. A
    batch whose weights add up to 0 changes nothing, and counts as no step of any optimizer.
    """

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        task_weights: Sequence[float] | None = None,
        clip: DenseClip | None = None,
        accumulate_steps: int = 1,
        overlap: Collection[Overlap] = (),
    ) -> None:
        """`optimizer` holds the dense parameters; the tables step inside the backward pass. `task_weights` multiply
        the losses of the tasks, in the order of the labels; None: all 1. `clip` limits the dense gradients.
        With `accumulate_steps` k each rank takes its slice in k parts, forward and back one after the other, and every
        optimizer steps once after the last: the memory of activations is that of a part. `overlap` says what travels
        while something is computed; it changes no bit.

        On a CPU this process keeps the memory that its steps free, see meseta.ops.allocator.
        """
        self.model = model
        self.optimizer = optimizer
        # That of sharded tables knows the hosts of their plan.
        self.world = getattr(model.embeddings, "world", world)
        weights = None if task_weights is None else torch.tensor(task_weights, device=world.device)
        self._losses = BatchLosses(model, weights, accumulate_steps)
        self.clip = clip
        self.accumulate_steps = accumulate_steps
        self.num_masked_tasks = 0
        """Number of tasks if batches have a mask of known labels, else 0; to be set before the first step."""
        self.overlap = frozenset(overlap)
        self.stale = False
        """Whether every batch is looked up before the update of the one before moves a row, so that answers too travel
        a batch ahead; to be set before the first step."""
        self.carried: Carried | None = None
        """Answers of the batch to come, which it takes, where it was looked up before this loop."""
        self.learns_late = world.device.type != "cpu"
        """Whether the device itself keeps all as it is where a loss is no number, while the host learns of it, and of
        the votes, in the next step or in `settle`; to be set before the first step."""
        self._unheard: UnheardStep | None = None
        self._heard: tuple[float, ...] = ()
        """Votes that no step has given out yet."""
        is_gpu = world.device.type == "cuda"
        self.times = StageTimes(_device_clock() if is_gpu else None)
        self.side_copies = SideCopies(world.device, self.times) if is_gpu else None
        """Copy each batch to the device while the one before is computed; None: each is copied when its step comes."""
        self.batch: Batch | None = None
        """The one that is trained, or was trained last."""
        self._before = before_of(model)
        self._dense: DenseGradients | None = getattr(model, "dense_gradients", None)
        if self._dense is not None:
            self._dense.lasts = "dense" in self.overlap
        self._ahead: deque[_Coming] = deque()
        """Batches that were read before their steps."""
        self._is_open = False
        """Whether the dense update of the last step is still to come."""
        if world.device.type == "cpu":
            keep_freed_memory()

    def __call__(self, batch: Batch, *, lr_factor: float | None = None, votes: Sequence[float] = ()) -> Step:
        """Train on one batch alone, with all updates in place when it returns.

        `lr_factor` multiplies the learning rates of the tables; None: as their collection says when they are updated.
        `votes` are numbers that travel with the loss and are summed over ranks; as many on every rank. On a GPU it is
        waited for.

        Raises NonFiniteLoss on all ranks, before any update, when the loss is not finite, and MesetaError for ids
        outside their table.
        """
        [step] = self.steps(iter([batch]), schedule=lambda: lr_factor, votes=lambda: votes)
        if self.learns_late:
            step, self._heard = replace(step, votes=self._heard), ()
        return step

    def steps(
        self,
        batches: Iterator[Batch],
        *,
        schedule: Callable[[], float | None] = lambda: None,
        votes: Callable[[], Sequence[float]] = tuple,
    ) -> Generator[Step, None, None]:
        """Train on one batch after the other; what is wrong with one, or keeps a rank from reading it, is raised at its
        step, on all ranks.

        A step is given out when its rows have moved, on a GPU when their update has begun; `settle` puts all else in
        place. Leaving the loop early closes what is open; every rank must leave it after the same step. On a GPU a loss
        that is no number is raised in the step behind it, or by `settle`, as LateNonFiniteLoss.

        Args:
            batches: as many on every rank.
            schedule: called in each step when the updates before it are in place: sets the rates of `optimizer`, and
                returns what multiplies those of tables; None: as their collection says.
            votes: called in each step for what `__call__` takes under this name.
        """
        self.times.begin_step()
        coming = self._read(batches)
        try:
            while coming is not None:
                self.batch = coming.batch
                with self.world.transfers.in_step():
                    step = self._train(coming, batches, schedule, votes)
                coming = None  # nothing holds a batch while the next one is waited for
                yield step
                self.times.begin_step()
                del step
                coming = self._ahead.popleft() if self._ahead else None if self._num_ahead else self._read(batches)
        except (GeneratorExit, LateNonFiniteLoss):  # all ranks leave alike
            for begun in (coming, *self._ahead):
                for part in [] if begun is None else begun.parts:
                    self.model.embeddings.drop(part.flight)
            raise
        except BaseException:
            abandon((coming, *self._ahead))
            raise
        finally:
            self._ahead.clear()
            self.settle()

    def settle(self) -> None:
        """Wait until every update of the last step is in place: before weights are looked at. Raises LateNonFiniteLoss
        where there is none, since its loss is no number."""
        self._finish_update()
        self._hear()

    def _hear(self) -> None:
        """What all ranks agreed on in the step before; where its loss is no number, raises, and all is as before it."""
        unheard, self._unheard = self._unheard, None
        if unheard is None:
            return
        try:
            with self.times.stage("agree"):
                self._heard = unheard.votes()
        except LateNonFiniteLoss:
            self.model.embeddings.step, self.batch = unheard.step, unheard.batch
            raise

    def _finish_update(self) -> None:
        """Step the dense part, where that is still to come."""
        if not self._is_open:
            return
        self._is_open = False
        with self.times.stage("update"):
            if self._dense is not None:
                self._dense.finish()
            if self.clip is not None and not self.clip.with_rows:  # else it was called in the backward pass
                if self.clip.norm is not None:  # which the host reads, and refuses where it is no number
                    self._hear()
                self.clip(dense_parameters(self.optimizer))
            if self._unheard is None:
                self.optimizer.step()
            else:
                self._unheard.undo = step_unless(self.optimizer, self._unheard.found_inf)

    def carry(self) -> Carried | None:
        """Between two steps, the answers of the batch to come that were looked up before the last update, on rank 0 of
        all ranks; None where there are none. Later loops begin with them. Collective."""
        coming = self._ahead[0] if self._ahead else None
        if self.stale and self.carried is None and coming and coming.batch is not None and coming.refused is None:
            answers = [self.model.embeddings.answers(part.flight)[0] for part in coming.parts]
            self.carried = Carried.gather(self.world, coming.batch, torch.cat(answers))
        return self.carried

    @property
    def _begins_ahead(self) -> bool:
        return self.stale or "ids" in self.overlap or self.model.embeddings.lookahead > 0

    @property
    def _num_ahead(self) -> int:
        """Batches that are read before their steps."""
        if self._begins_ahead or self.side_copies is not None:
            return max(self.model.embeddings.lookahead, 1)
        return 0

    def _read(self, batches: Iterator[Batch]) -> _Coming | None:
        """The next batch; None at their end."""
        try:
            with self.times.stage("data"):
                return _Coming(next(batches))
        except StopIteration:
            return None
        except Exception as error:
            return _Coming(None, error)

    def _copy(self, coming: _Coming) -> None:
        """Begin to copy a batch to its device, where that was not done before."""
        if coming.batch is None or coming.copies:
            return
        with self.times.stage("copy"):
            for part in split_batch(coming.batch, self.accumulate_steps):
                now = partial(part.to, self.world.device, non_blocking=True)
                coming.copies.append(now if self.side_copies is None else self.side_copies.begin(part))

    def _begin(self, coming: _Coming) -> None:
        """Copy a batch to its device, and begin to tell the owners of rows how many ids come to them."""
        batch, error, start = coming.batch, coming.error, self.model.embeddings.start
        if self.num_masked_tasks:
            coming.task_factors = begin_task_factors(self.world, batch, self.num_masked_tasks)
        if batch is None:
            assert error is not None
            coming.parts = [_MicroBatch(None, start(error)) for _ in range(self.accumulate_steps)]
            return
        self._copy(coming)
        totals, place = totals_of(batch), 0
        for index, take in enumerate(coming.copies):
            with self.times.stage("copy"):
                on_device = take()
            is_part = index < self.accumulate_steps - 1
            with self.times.stage("input_dist"):
                flight = start(on_device.sparse, totals=totals, is_part=is_part, stage_timer=self.times.stage)
            flight.place, flight.overlaps = place, "gradients" in self.overlap
            coming.parts.append(_MicroBatch(on_device, flight))
            place += on_device.batch_size
        coming.copies.clear()

    def _give(self, carried: Carried, coming: _Coming) -> None:
        """Give a batch the answers of an earlier lookup."""
        for part in coming.parts:
            self._exchange(part)
        assert coming.batch is not None
        answers = carried.slice_of(self.world, coming.batch)
        for part in coming.parts:
            part.flight.answers = [answers[part.flight.place :][: part.on_device.batch_size]]

    def _begin_ahead(self, batches: Iterator[Batch]) -> None:
        """Read batches ahead, where ids, rows or copies travel ahead. All ranks stop at one that cannot be trained."""
        while len(self._ahead) < self._num_ahead:
            if self._ahead:
                self._for_each_ahead(self._exchange)
                if self._ahead[-1].batch is None or self._ahead[-1].refused is not None:
                    return
            if (coming := self._read(batches)) is None:
                return
            self._ahead.append(coming)
            if self._begins_ahead and (coming.batch is not None or self.world.size > 1):
                try:
                    self._begin(coming)
                except MesetaError as error:
                    coming.refused = error
            else:
                self._copy(coming)

    def _for_each_ahead(self, carry_on: Callable[[_MicroBatch], object], count: int | None = None) -> None:
        """Carry on with the first ones ahead; None: with all. What is wrong with one is raised at its step."""
        for coming in list(self._ahead)[:count]:
            if coming.refused is None:
                try:
                    for part in coming.parts:
                        carry_on(part)
                except MesetaError as error:
                    coming.refused = error

    def _bring_rows(self, parts: Sequence[_MicroBatch]) -> None:
        """Begin to bring the rows of the batch in hand and of those ahead, in their order, as far as there is room."""
        if self.model.embeddings.lookahead:
            with self.times.stage("lookup"):
                for part in (*parts, *(part for coming in self._ahead for part in coming.parts)):
                    if part.flight.stage == "started" or not self.model.embeddings.fetch(part.flight):
                        break

    def _look_up_ahead(self, step: int, part: _MicroBatch) -> None:
        """Look up a batch whose step comes after `step` others, of which one is under way."""
        part.flight.step = step
        self._look_up(part)

    def _exchange(self, part: _MicroBatch) -> None:
        """Begin to send ids to the owners of rows, where that was not done before."""
        if part.flight.stage == "started":
            with self.times.stage("input_dist"):
                self.model.embeddings.exchange(part.flight)

    def _look_up(self, part: _MicroBatch) -> None:
        """Begin to send rows and bags to the ranks of the samples, likewise."""
        self._exchange(part)
        if part.flight.stage == "exchanged":
            with self.times.stage("lookup"):
                self.model.embeddings.look_up(part.flight)

    def _train(
        self,
        coming: _Coming,
        batches: Iterator[Batch],
        schedule: Callable[[], float | None],
        votes: Callable[[], Sequence[float]],
    ) -> Step:
        """One step; the batch after it is begun on the way where ids travel ahead."""
        carried, self.carried = self.carried, None
        if not coming.parts:
            self._begin(coming)
            if carried is not None:
                self._give(carried, coming)
        if coming.refused is not None:
            raise coming.refused
        parts, logits, former_step = coming.parts, list[Tensor](), self.model.embeddings.step
        local_losses: Tensor | None = None
        try:
            for index, part in enumerate(parts):
                is_last = index == len(parts) - 1
                with told_by_number(index, len(parts)):
                    self._look_up(part)
                    if index == 0:
                        self._begin_ahead(batches)
                    if "answers" in self.overlap:
                        self.model.embeddings.hand_on(part.flight)
                    if index == 0:
                        self._finish_update()
                        self._set_rates(parts, schedule())
                    scores, summed, sums = self._score(coming, part, None if is_last else parts[index + 1])
                    local_losses = sums if local_losses is None else local_losses + sums
                    logits.append(scores.detach())
                    if index == 0:
                        self._for_each_ahead(lambda ahead: self.model.embeddings.hand_on(ahead.flight))
                        self._bring_rows(parts)
                        if self.stale:
                            self._for_each_ahead(partial(self._look_up_ahead, self._num_steps_after(part)), count=1)
                    agreement = self._agree(part, local_losses, votes()) if is_last else None
                    self._backward(part, summed, is_first=index == 0)
        finally:
            self.model.embeddings.forget_kept()
        assert agreement is not None
        self._take_in(agreement, coming, former_step)
        whole = agreement.whole
        self._is_open = whole.weight > 0
        if "dense" not in self.overlap:
            self._finish_update()
        self.times.end_step()
        votes_heard, self._heard = self._heard, ()
        return Step(
            agreement=agreement,
            num_samples=whole.num_samples - whole.num_padding,
            logits=torch.cat(logits),
            batch=cast(Batch, coming.batch),
            votes=votes_heard,
        )

    def _take_in(self, agreement: Agreement, coming: _Coming, former_step: int) -> None:
        """The votes of a step, where the host waits for them; else it is told later, see `_hear`."""
        flight = coming.parts[-1].flight
        self._tell(agreement, flight)
        if flight.found_inf is None:
            self._heard = agreement.votes
        else:
            self._unheard = UnheardStep(agreement, flight.found_inf, coming.batch, former_step)

    def _num_steps_after(self, part: _MicroBatch) -> int:
        """Steps trained when the one of a batch that was looked up is over."""
        assert part.flight.whole is not None and part.flight.batch_slice is not None
        return part.flight.batch_slice.step + (part.flight.whole.weight > 0)

    def _set_rates(self, parts: Sequence[_MicroBatch], lr_factor: float | None) -> None:
        for part in parts:
            part.flight.lr_factor = lr_factor

    def _score(
        self, coming: _Coming, part: _MicroBatch, following: _MicroBatch | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of a micro-batch and sums of its losses, see BatchLosses; `following` is looked up meanwhile."""
        embeddings, stage, batch = self.model.embeddings, self.times.stage, part.on_device
        hides = "answers" in self.overlap
        with embeddings.in_hand(part.flight):
            dense: Any = batch.dense
            if hides and self._before is not None:
                with stage("dense_forward"), explain_uncalled():
                    dense = self._before(dense)
            with stage("lookup"):
                pooled = readable(self.model, embeddings.finish(part.flight))
            self._for_each_ahead(self._exchange)
            self._hear()  # behind the counts, for which the host has waited
            if hides and following is not None:
                self._look_up(following)
            with stage("dense_forward"), explain_uncalled():
                assert part.flight.whole is not None
                factors = None if coming.task_factors is None else coming.task_factors(part.flight.whole.weight)
                return self._losses(dense, pooled, batch, part.flight, factors)

    def _agree(self, part: _MicroBatch, local_losses: Tensor, votes: Sequence[float]) -> Agreement:
        """Begin to agree on the loss of a global batch, of which this is the last part; nothing moves before that."""
        assert part.flight.whole is not None
        with self.times.stage("agree"):
            agreement = Agreement.begin(self.world, part.flight.whole, local_losses, votes, self._losses.names)
        if "agree" not in self.overlap:
            self._tell(agreement, part.flight)
        part.flight.before_update = partial(self._tell, agreement, part.flight)
        return agreement

    def _tell(self, agreement: Agreement, flight: Flight[Any]) -> None:
        """Tell a flight whether its rows may move: the host, or the device alone."""
        with self.times.stage("agree"):
            if not self.learns_late:
                agreement.check()
            elif flight.found_inf is None:
                flight.found_inf = agreement.found_inf()

    def _backward(self, part: _MicroBatch, summed: Tensor, *, is_first: bool) -> None:
        """Gradients of a micro-batch; the last one's update of rows."""
        flight = part.flight
        assert flight.whole is not None
        weight, num_samples = flight.whole.weight, sum(flight.sizes)
        if not weight > 0:
            return
        with self.model.embeddings.in_hand(flight), self.times.stage("backward"):
            if is_first:
                self.optimizer.zero_grad(set_to_none=True)
            # The tables and the dense gradients weigh this by B_local / B_global, so that it is divided by the sum of
            # weights in the end. Without weights the divisor is the local batch size, to the bit.
            if self.clip is not None and self.clip.with_rows:  # at the end of the pass, when all gradients are there
                flight.overlaps, flight.clip = True, partial(self.clip, dense_parameters(self.optimizer))
            divisor = part.on_device.batch_size * weight / max(num_samples, 1)
            (summed / (divisor or 1.0)).backward()


def _device_clock() -> DeviceClock:
    """Of this rank's GPU."""
    new_event = partial(torch.cuda.Event, enable_timing=True)
    return DeviceClock(new_event, torch.cuda.current_stream, torch.cuda.synchronize)
