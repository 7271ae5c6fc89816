"""Interface and losses of a model in a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from meseta.comm import BatchTotals, World
from meseta.data.read.batch import Batch
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.embedding.batch_context import BatchContext
from meseta.models.layers import GLOBAL_LOSS_HOOKS, loss_term_names
from meseta.ops.common import copy_to_device, total
from meseta.ops.cross_entropy import StepLoss, cross_entropy
from meseta.ops.step_scalars import StepNumbers
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError


@runtime_checkable  # Required by beartype, with which tests check all calls.
class Model(Protocol):
    """Model with embeddings, and a dense part that computes logits from them.

    An optional method `forward_dense(dense)` runs while embeddings are exchanged. `score` then receives its result in
    place of the dense inputs, but must accept dense inputs too. If the attribute `reads_embeddings` is true, `score`
    receives `Embeddings` in place of pooled embeddings.
    """

    # Modules provide submodules by __getattr__, which runtime checks ignore since Python 3.12.
    if TYPE_CHECKING:
        embeddings: BaseEmbeddingCollection[Any]

    def score(self, dense: Float[Tensor, "B num_dense"], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B *T"]:
        """Compute logits, of shape [B], or [B, T] for T > 1 tasks."""


LossKernel = Callable[[Tensor, Tensor, Tensor | None], StepLoss]
"""Function of logits, labels and factors of the losses, see `cross_entropy_step`."""
CROSS_ENTROPY = "cross_entropy"
"""Name of a loss term that replaces the default cross-entropy."""


class NonFiniteLoss(MesetaError):
    """Non-finite loss of a global batch. Raised on all ranks before any update."""


class SkippedUpdate(MesetaError):
    """Error of a step that the host detects one step late. The device has skipped the update."""


class LateNonFiniteLoss(NonFiniteLoss, SkippedUpdate):
    """Non-finite loss that the host detects one step late."""


class BatchLosses:
    """Computes logits and losses of batches of one model.

    Terms in `loss_terms` have one value per sample. Those in `global_loss_terms` are scalars for the global batch,
    added to the mean loss. `global_losses(logits, label, weight)` computes them from all samples except padding. If
    labels may be missing, `weight` has the shape [B, T], and is 0 for a missing label.
    """

    def __init__(self, model: Model, task_weights: Tensor | None, accumulate_steps: int = 1) -> None:
        """Create the losses of a model. `task_weights` [T] multiplies the losses of the tasks. `None` means 1.

        Raises MesetaError if loss terms are invalid, or a model with global loss terms accumulates steps.
        """
        self._sample_term_names, self._global_term_names = (
            loss_term_names(model),
            loss_term_names(model, *GLOBAL_LOSS_HOOKS),
        )
        self.term_names = (*self._sample_term_names, *self._global_term_names)
        if self._global_term_names and accumulate_steps > 1:
            raise MesetaError(
                f"{type(model).__name__} has global_loss_terms, which need a global batch that is not divided, but "
                f"train.accumulate_steps is {accumulate_steps}; set train.accumulate_steps=1"
            )
        if len(set(self.term_names)) < len(self.term_names):
            raise MesetaError(
                f"{type(model).__name__}: loss_terms and global_loss_terms must have different names, got "
                f"{', '.join(self.term_names)}"
            )
        self._model = model
        self._task_weights = task_weights

    def __call__(
        self,
        dense: Any,
        pooled: Any,
        batch: Batch,
        flight: BatchContext[Any],
        task_factors: Tensor | None = None,
        loss_kernel: LossKernel | None = None,
    ) -> tuple[Float[Tensor, " B *T"], Float[Tensor, ""] | StepLoss, Float[Tensor, " _losses"]]:
        """Compute the losses of a batch. Collective if there is a loss of the global batch.

        Args:
            dense: Dense inputs as `score` accepts them.
            pooled: Embeddings as `score` accepts them.
            batch: Samples of this rank. With a mask of known labels, only these count.
            flight: Context of the batch.
            task_factors: Factors [T] of the task losses for a batch with missing labels, see `start_task_factors`.
            loss_kernel: Function that computes a loss without terms. The second result is then that of the function.

        Returns (logits, differentiable weighted sum of the loss, detached float64 sums of the loss and of each term).
        Raises MesetaError if logits or terms have unexpected names or shapes.
        """
        model: Any = self._model
        if self._sample_term_names:
            logits, terms = model.score_with_losses(dense, pooled, batch.label)
        else:
            logits, terms = model.score(dense, pooled), {}
        weigh = _LossWeights(batch, self._task_weights, task_factors)
        if loss_kernel is not None:
            _check_label(logits, batch.label)
            loss = loss_kernel(logits.detach(), batch.label, weigh(logits, is_of_tasks=True))
            return logits, loss, loss.sums
        sums = [
            self._weighted_sum(name, one, logits, weigh)
            for name, one in self._ordered_terms("score_with_losses", terms)
        ]
        parts = sums if CROSS_ENTROPY in self._sample_term_names else [_cross_entropy(logits, batch, weigh), *sums]
        summed = parts[0]
        for part in parts[1:]:
            summed = summed + part
        reported = [one.detach().double() for one in (summed, *sums)]
        for term, is_told in self._global_terms(logits, batch, flight) if self._global_term_names else ():
            summed = summed + term
            reported.append(term.detach().double() * is_told)
            reported[0] = reported[0] + reported[-1]
        return logits, summed, torch.stack(reported) if len(reported) > 1 else reported[0].view(1)

    def _global_terms(self, logits: Tensor, batch: Batch, flight: BatchContext[Any]) -> list[tuple[Tensor, bool]]:
        """Return pairs (term, is_reported). Each term is multiplied by the total weight."""
        assert flight.batch_slice is not None and flight.global_totals is not None
        world, num_real = flight.batch_slice.world, batch.batch_size - batch.num_padding
        weight = torch.ones(batch.batch_size, device=logits.device) if batch.weight is None else batch.weight
        columns = [logits.flatten(1) if logits.dim() > 1 else logits[:, None], batch.label.view(len(logits), -1)]
        num_tasks = columns[0].shape[1]
        of_samples = weight[:, None]
        if batch.label_mask_2d is not None:
            of_samples = of_samples * batch.label_mask_2d
        local_rows = torch.cat([column.to(logits.dtype) for column in (*columns, of_samples)], dim=1)[:num_real]
        sent = local_rows.new_zeros(max(flight.batch_slice.batch_size_per_rank), local_rows.shape[1] + 1)
        sent[:num_real, :-1], sent[:num_real, -1] = local_rows.detach(), 1.0
        gathered = world.all_gather(sent, "logits")
        # Logits of other ranks have no gradient. The gradients of all ranks add up to that of the global batch.
        rows = [local_rows if rank == world.rank else one[one[:, -1] > 0][:, :-1] for rank, one in enumerate(gathered)]
        scores, label, of_sample = torch.cat(rows).split([num_tasks, num_tasks, of_samples.shape[1]], dim=1)
        if logits.dim() == 1:
            scores, label = scores[:, 0], label[:, 0]
        terms = cast(Any, self._model).global_losses(scores, label, of_sample.squeeze(1))
        ordered = self._ordered_terms("global_losses", terms)
        for name, term in ordered:
            if term.shape != ():
                raise MesetaError(
                    f"{type(self._model).__name__}.global_losses: the term {name!r} must be a scalar, got shape "
                    f"{list(term.shape)}; return one number for the whole batch"
                )
        # The loss is later divided by the total weight. All ranks have the whole term, so only rank 0 reports it.
        return [(term * flight.global_totals.weight, world.rank == 0) for _, term in ordered]

    def _ordered_terms(self, method: str, terms: Any) -> list[tuple[str, Tensor]]:
        names = self._sample_term_names if method == "score_with_losses" else self._global_term_names
        received = list(terms) if isinstance(terms, Mapping) else type(terms).__name__
        if not isinstance(terms, Mapping) or set(terms) != set(names):
            raise MesetaError(
                f"{type(self._model).__name__}.{method} must return a mapping with a tensor for each of the terms "
                f"{list(names)}, got {received}"
            )
        return [(name, terms[name]) for name in names]

    def _weighted_sum(self, name: str, term: Tensor, logits: Tensor, weigh: _LossWeights) -> Tensor:
        if term.shape not in (logits.shape, logits.shape[:1]):
            raise MesetaError(
                f"{type(self._model).__name__}.score_with_losses: the term {name!r} has shape {list(term.shape)} for "
                f"logits {list(logits.shape)}; return one number for each sample, or for each sample and task"
            )
        factor = weigh(term, is_of_tasks=term.dim() > 1)
        return total(term if factor is None else term * factor)


@dataclass(frozen=True)
class _LossWeights:
    batch: Batch
    task_weights: Tensor | None
    """Factors [T] of the tasks. `None` means 1."""
    task_factors: Tensor | None
    """Factors [T] of the tasks, see `start_task_factors`. `None` if no label is missing."""

    def __call__(self, losses: Tensor, *, is_of_tasks: bool) -> Tensor | None:
        """Return the factors of `losses`, of shape [B] or [B, T]. `None` means 1."""
        batch = self.batch
        factor = self.task_weights.to(losses.dtype) if self.task_weights is not None and is_of_tasks else None
        if batch.weight is not None:
            weight = batch.weight.to(losses.dtype).view(-1, *[1] * (losses.dim() - 1))
            factor = weight if factor is None else weight * factor
        if batch.label_mask is None or batch.label_mask_2d is None:
            return factor
        mask: Tensor = batch.label_mask
        if is_of_tasks:
            assert self.task_factors is not None
            mask = mask * (self.task_factors if mask.dim() > 1 else self.task_factors[0])
        else:
            # A loss of a sample counts if any of its labels is known.
            mask = batch.label_mask_2d.any(1)
        return mask.to(losses.dtype) if factor is None else factor * mask.to(losses.dtype)


def _cross_entropy(logits: Tensor, batch: Batch, weigh: _LossWeights) -> Tensor:
    _check_label(logits, batch.label)
    label = batch.label.to(logits.dtype)
    factor = weigh(logits, is_of_tasks=True)
    if logits.is_cuda:
        return cross_entropy(logits, label, factor)
    return total(functional.binary_cross_entropy_with_logits(logits, label, factor, reduction="none"))


def _check_label(logits: Tensor, label: Tensor) -> None:
    if label.shape != logits.shape:
        raise MesetaError(
            f"the model returned logits {list(logits.shape)} for labels {list(label.shape)}; it must return one output "
            "per label of the dataset"
        )


def make_batch_totals(batch: Batch) -> BatchTotals:
    """Return the totals of a rank's slice. A sample without any known label has the weight 0."""
    if batch.label_mask_2d is None:
        weight = float(batch.batch_size if batch.weight is None else total(batch.weight.double()))
    else:
        weight = _sum_weights(batch, batch.label_mask_2d.any(1))
    return BatchTotals(batch.batch_size, batch.num_padding, weight)


def known_label_weights(batch: Batch) -> list[float]:
    """Return the total weight of a rank's samples whose label is known, for each of T tasks."""
    assert batch.label_mask_2d is not None
    return [_sum_weights(batch, is_known) for is_known in batch.label_mask_2d.unbind(1)]


def _sum_weights(batch: Batch, is_counted: Tensor) -> float:
    # Sum in the same order as over all samples, so that the results are equal if all are selected.
    return float(total(is_counted.double() if batch.weight is None else batch.weight.double() * is_counted))


def start_task_factors(world: World, batch: Batch | None, num_tasks: int) -> Callable[[float], Float[Tensor, " T"]]:
    """Start summing the weights of known labels over all ranks. Return a function from W to the factors of the tasks.

    The factor of task t is W / W_t, or 0 for a task without known labels. W is the weight of all samples in the global
    batch, and W_t that of the samples whose label of task t is known. The first call of the function waits for the
    other ranks. All ranks call this for the same batches in the same order. `batch` is `None` if it could not be read.
    """
    known_weights = [0.0] * num_tasks if batch is None else known_label_weights(batch)
    wait = world.start_all_reduce_small(copy_to_device(known_weights, torch.float64, world.device), "label weights")
    sums: list[Tensor] = []

    def factors(weight: float) -> Tensor:
        if not sums:
            sums.append(wait())
        # A loss that is divided by W becomes the mean over known labels. If all are known, the factor is exactly 1.
        return torch.where(sums[0] > 0, weight / sums[0], 0.0)

    return factors


def loss_divisor(batch_size: int, weight: float, num_samples: int) -> float:
    """Return the divisor of a rank's sum of losses, given its samples, and weight and samples of the global batch."""
    # Tables and dense gradients scale the loss by B_local / B_global, so it is finally divided by the total weight.
    # Without weights, the divisor is exactly the local batch size.
    return batch_size * weight / max(num_samples, 1) or 1.0


def inverse_divisor(dtype: torch.dtype, numbers: StepNumbers) -> list[float]:
    """Return 1 / divisor of a step [1], divided in the dtype of the loss, float32 or float64."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    return [float(kind(1.0) / kind(numbers.divisor))]
