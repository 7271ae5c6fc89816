"""One batch: copy, input_dist, lookup, dense forward, agreement on the loss, backward, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from meseta.comm import World
from meseta.comm.dense_shards import explain_uncalled
from meseta.data.batch import Batch
from meseta.embedding.base import Collection
from meseta.embedding.flight import Flight
from meseta.jagged.shapes import Float
from meseta.ops.allocator import keep_freed_memory
from meseta.ops.sums import total
from meseta.optim.clip import DenseClip
from meseta.pipeline.micro_batches import split_batch
from meseta.spec import MesetaError
from meseta.telemetry.span import StageTimes


@runtime_checkable  # beartype asks for it where the tests check every call
class Model(Protocol):
    """What a step needs of a model: tables that are looked up first, and a dense part that scores."""

    if TYPE_CHECKING:  # a module answers for its parts by __getattr__, which checks at runtime pass by from 3.12 on
        embeddings: Collection[Any]

    def score(self, dense: Float[Tensor, "B num_dense"], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B *T"]:
        """Logits from dense inputs and pooled embeddings: [B], or [B, T] for T > 1 tasks."""


class NonFiniteLoss(MesetaError):
    """The loss of a global batch is no number; raised on all ranks before any update."""


@dataclass(frozen=True)
class Step:
    """What is left of a step."""

    loss: float
    """Weighted mean over the global batch; 0 where all weights are 0."""
    num_samples: int
    """Samples of the global batch, without those that only fill it up."""
    logits: Float[Tensor, " B_local *T"]
    """This rank's predictions, made before the update."""
    votes: tuple[float, ...] = ()
    """Sums over all ranks of what each gave."""


@dataclass(frozen=True)
class _Total:
    """Of a global batch, the same on all ranks."""

    loss_sum: float
    weight: float
    batch_size: int
    num_samples: int
    """Without those that only fill it up."""
    votes: tuple[float, ...]


class TrainStep:
    """Runs one step after the other; every rank calls it with its slice of the same global batch.

    The loss is sum(w_i * l_i) / sum(w_i) over the samples of the global batch, where w_i is the weight of a sample (1
    where the batch has none) and l_i the binary cross-entropy, summed over tasks.
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
    ) -> None:
        """`optimizer` holds the dense parameters; the tables step inside the backward pass. `task_weights` multiply
        the losses of the tasks, in the order of the labels; None: all 1. `clip` limits the dense gradients.
        With `accumulate_steps` k each rank takes its slice in k parts, forward and back one after the other, and every
        optimizer steps once after the last: the memory of activations is that of a part.

        On a CPU this process keeps the memory that its steps free, see meseta.ops.allocator.
        """
        self.model = model
        self.optimizer = optimizer
        # That of sharded tables knows the hosts of their plan.
        self.world = getattr(model.embeddings, "world", world)
        self.task_weights = None if task_weights is None else torch.tensor(task_weights, device=world.device)
        self.clip = clip
        self.accumulate_steps = accumulate_steps
        self.times = StageTimes(torch.cuda.synchronize) if world.device.type == "cuda" else StageTimes()
        if world.device.type == "cpu":
            keep_freed_memory()

    def __call__(self, batch: Batch, *, lr_factor: float | None = None, votes: Sequence[float] = ()) -> Step:
        """Train on one batch; one whose weights add up to 0 changes nothing, and counts as no step of any optimizer.

        `lr_factor` multiplies the learning rates of the tables; None: as their collection says when they are updated.
        `votes` are numbers that travel with the loss and are summed over ranks; as many on every rank.

        Raises NonFiniteLoss on all ranks, before any update, when the loss is not finite, and MesetaError for ids
        outside their table.
        """
        with self.world.transfers.in_step():
            return self._step(batch, lr_factor, votes)

    def _step(self, batch: Batch, lr_factor: float | None, votes: Sequence[float]) -> Step:
        """The same."""
        parts = split_batch(batch, self.accumulate_steps)
        # Parts are divided by the weight of all of them, so it has to be known before the first goes back.
        whole = None if len(parts) == 1 else self._agree(None, batch, votes)
        first_samples: Sequence[int | None] = [None] if len(parts) == 1 else self._first_samples(parts)
        totals, logits = [], []
        try:
            for index, (part, first_sample) in enumerate(zip(parts, first_samples, strict=True)):
                is_last = index == len(parts) - 1
                with self.times.stage("copy"):
                    part = part.to(self.world.device, non_blocking=True)  # noqa: PLW2901
                with self.times.stage("input_dist"):
                    flight = self.model.embeddings.start(
                        part.sparse,
                        lr_factor=lr_factor,
                        first_sample=first_sample,
                        is_part=not is_last,
                        stage_timer=self.times.stage,
                    )
                    self.model.embeddings.exchange(flight)
                total, own = self._forward_backward(part, flight, whole, votes, is_first=index == 0)
                totals.append(total)
                logits.append(own)
        except MesetaError as error:
            if len(parts) == 1:
                raise
            told = type(error)(f"micro-batch {index + 1} of {len(parts)}: {error}")
            told.rank = error.rank
            raise told from None
        finally:
            self.model.embeddings.forget_kept()
        whole = whole or totals[0]
        if whole.weight > 0:
            with self.times.stage("update"):
                if self.clip is not None:
                    self.clip(p for group in self.optimizer.param_groups for p in group["params"])
                self.optimizer.step()
        self.times.end_step()
        loss = sum(total.loss_sum for total in totals) / (whole.weight or 1.0)
        return Step(loss=loss, num_samples=whole.num_samples, logits=torch.cat(logits), votes=whole.votes)

    def _forward_backward(
        self, batch: Batch, flight: Flight[Any], whole: _Total | None, votes: Sequence[float], *, is_first: bool
    ) -> tuple[_Total, Tensor]:
        """Gradients of one part of the global batch `whole` (None: of all of it), and this rank's logits."""
        embeddings, stage = self.model.embeddings, self.times.stage
        with stage("lookup"):
            pooled = embeddings.finish(flight).pooled.values
        with embeddings.in_hand(flight):
            with stage("dense_forward"):
                with explain_uncalled():
                    logits = self.model.score(batch.dense, pooled)
                local_sum = self._loss_sum(logits, batch)
            with stage("agree"):
                total = self._agree(local_sum.detach(), batch, votes)
            weight = (whole or total).weight
            if weight > 0:
                with stage("backward"):
                    if is_first:
                        self.optimizer.zero_grad(set_to_none=True)
                    # The tables and the dense gradients weigh this by B_local / B_global, so that it is divided by
                    # the sum of weights in the end. Without weights the divisor is the local batch size, to the bit.
                    divisor = batch.batch_size * weight / max(total.batch_size, 1)
                    (local_sum / (divisor or 1.0)).backward()
        return total, logits.detach()

    def _first_samples(self, parts: Sequence[Batch]) -> list[int]:
        """Place in the global batch of the first sample of each part of this rank's slice."""
        sizes = [part.batch_size for part in parts]
        every = self.world.all_gather(torch.tensor([sum(sizes)], device=self.world.device), "batch sizes")
        return list(accumulate(sizes[:-1], initial=int(every[: self.world.rank].sum())))

    def _loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """The sum over this rank's samples, and over tasks."""
        label = batch.label.to(logits.dtype)
        if label.shape != logits.shape:
            raise MesetaError(
                f"the model gives logits {list(logits.shape)} for labels {list(label.shape)}; the outputs of the model "
                "must be one per label of the dataset"
            )
        factor = None if self.task_weights is None else self.task_weights.to(logits.dtype)
        if batch.weight is not None:
            weight = batch.weight.to(logits.dtype).view(-1, *[1] * (label.dim() - 1))
            factor = weight if factor is None else weight * factor
        return total(functional.binary_cross_entropy_with_logits(logits, label, factor, reduction="none"))

    def _agree(self, local_sum: Tensor | None, batch: Batch, votes: Sequence[float]) -> _Total:
        """What all ranks know of a global batch, added in float64; without a loss, before it is computed."""
        weight = batch.batch_size if batch.weight is None else float(total(batch.weight.double()))
        own = [0.0 if local_sum is None else float(local_sum), weight, batch.batch_size, batch.num_padding, *votes]
        sums = self.world.sum_of_few(torch.tensor(own, dtype=torch.float64, device=self.world.device), "agree")
        loss_sum, weight_sum, batch_size, num_padding, *all_votes = sums.tolist()
        if not (math.isfinite(loss_sum) and math.isfinite(weight_sum)):
            raise NonFiniteLoss(
                f"the loss is {loss_sum / (weight_sum or 1.0)}, and nothing was updated; look for NaN or huge values "
                "in the dense inputs, or lower the learning rates"
            )
        return _Total(
            loss_sum=loss_sum,
            weight=weight_sum,
            batch_size=int(batch_size),
            num_samples=int(batch_size - num_padding),
            votes=tuple(all_votes),
        )
