"""One batch: copy, input_dist, lookup, dense forward, agreement on the loss, backward, update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from meseta.comm import World
from meseta.data.batch import Batch
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection
from meseta.jagged.shapes import Float
from meseta.ops.allocator import keep_freed_memory
from meseta.pipeline.times import StageTimes
from meseta.spec import MesetaError


@runtime_checkable  # beartype asks for it where the tests check every call
class Model(Protocol):
    """What a step needs of a model: tables that are looked up first, and a dense part that scores."""

    embeddings: EmbeddingBagCollection | ShardedEmbeddingBagCollection

    def score(self, dense: Float[Tensor, "B num_dense"], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        """Logits from dense inputs and pooled embeddings."""


class NonFiniteLoss(MesetaError):
    """The loss of a global batch is no number; raised on all ranks before any update."""


@dataclass(frozen=True)
class Step:
    """What is left of a step."""

    loss: float
    """Mean over the global batch."""
    num_samples: int
    """Samples of the global batch."""
    logits: Float[Tensor, " B_local"]
    """This rank's predictions, made before the update."""
    votes: tuple[float, ...] = ()
    """Sums over all ranks of what each gave as `TrainStep.votes`."""


class TrainStep:
    """Runs one step after the other; every rank calls it with its slice of the same global batch."""

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer, world: World) -> None:
        """`optimizer` holds the dense parameters; the tables step inside the backward pass.

        On a CPU this process keeps the memory that its steps free, see meseta.ops.allocator.
        """
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.times = StageTimes(world.device)
        self.votes: tuple[float, ...] = ()
        """Numbers that travel with the loss of the next step and are summed over ranks; as many on every rank."""
        if world.device.type == "cpu":
            keep_freed_memory()

    def __call__(self, batch: Batch) -> Step:
        """Train on one batch. Raises NonFiniteLoss on all ranks, before any update, when the loss is not finite,
        and MesetaError for ids outside their table."""
        embeddings, stage = self.model.embeddings, self.times.stage
        with stage("copy"):
            batch = batch.to(self.world.device, non_blocking=True)
        with stage("input_dist"):
            x = embeddings.exchange(embeddings.start(batch.sparse))  # type: ignore[arg-type]
        with stage("lookup"):
            pooled = embeddings.finish(x).pooled.values  # type: ignore[arg-type]
        with stage("dense_forward"):
            logits = self.model.score(batch.dense, pooled)
            local_sum = functional.binary_cross_entropy_with_logits(
                logits, batch.label.to(logits.dtype), reduction="sum"
            )
        with stage("agree"):
            loss, num_samples, votes = self._global_mean(local_sum.detach(), batch.batch_size)
        with stage("backward"):
            self.optimizer.zero_grad(set_to_none=True)
            # The mean over this rank; the tables and the dense gradients weigh it by B_local / B_global.
            (local_sum / max(batch.batch_size, 1)).backward()
        with stage("update"):
            self.optimizer.step()
        self.times.end_step()
        return Step(loss=loss, num_samples=num_samples, logits=logits.detach(), votes=votes)

    def _global_mean(self, local_sum: Tensor, batch_size: int) -> tuple[float, int, tuple[float, ...]]:
        """The loss that all ranks agree on, added in float64, the samples of the global batch, the sums of votes."""
        own = local_sum.double().new_tensor([float(local_sum), batch_size, *self.votes])
        total, count, *votes = self.world.all_reduce(own).tolist()
        loss = total / max(count, 1.0)
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss is {loss}, and nothing was updated; look for NaN or huge values in the dense inputs, or "
                "lower the learning rates"
            )
        return loss, int(count), tuple(votes)
