"""What a step makes small: the cross-entropy of the logits, and what a model adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from meseta.data.batch import Batch
from meseta.embedding.batch_context import BatchContext
from meseta.jagged.shapes import Float
from meseta.models.base import GLOBAL_LOSS_HOOKS, loss_term_names
from meseta.ops.sums import total
from meseta.pipeline.model import Model
from meseta.spec import MesetaError

CROSS_ENTROPY = "cross_entropy"
"""A term of this name stands in place of what every model loses."""


class BatchLosses:
    """Scores batches of one model, and adds up what they lose.

    Terms of `loss_terms` are of each sample. Those of `global_loss_terms` are each a number of the whole global batch,
    made by `global_losses(logits, label, weight)` of all samples without those that fill it up, and added to the mean
    over it. If labels may be missing, `weight` is [B, T] and 0 for a missing one. Each rank has the logits of the
    others without a gradient; what their gradients add up to over ranks is that of the whole.
    """

    def __init__(self, model: Model, task_weights: Tensor | None, accumulate_steps: int = 1) -> None:
        """`task_weights` [T] multiply the losses of the tasks; None: all 1. Raises MesetaError as `term_names` does,
        and where a loss of the global batch meets batches that are cut into parts."""
        self._sample_term_names, self._global_term_names = (
            loss_term_names(model),
            loss_term_names(model, *GLOBAL_LOSS_HOOKS),
        )
        self.term_names = (*self._sample_term_names, *self._global_term_names)
        if self._global_term_names and accumulate_steps > 1:
            raise MesetaError(
                f"{type(model).__name__} has global_loss_terms, of all samples of a global batch together, which "
                f"train.accumulate_steps {accumulate_steps} cuts into parts; set train.accumulate_steps=1"
            )
        if len(set(self.term_names)) < len(self.term_names):
            raise MesetaError(
                f"{type(model).__name__}: loss_terms and global_loss_terms share a name: "
                f"{', '.join(self.term_names)}; give "
                "each once"
            )
        self._model = model
        self._task_weights = task_weights

    def __call__(
        self, dense: Any, pooled: Any, batch: Batch, flight: BatchContext[Any], task_factors: Tensor | None = None
    ) -> tuple[Float[Tensor, " B *T"], Float[Tensor, ""], Float[Tensor, " _losses"]]:
        """(logits, the sum to be made small, the same and that of each term without a gradient in float64) over the
        samples of `batch`, each by its weight; `dense` and `pooled` are as `score` takes them, `flight` knows the other
        ranks. If the batch has a mask of known labels, only these count, and `task_factors` [T] multiply the losses of
        the tasks, see `start_task_factors`. Collective where there is a loss of the global batch.

        Raises MesetaError for logits of another shape than the labels, and for terms that are not those of the model or
        have another shape than they must.
        """
        model: Any = self._model
        if self._sample_term_names:
            logits, terms = model.score_with_losses(dense, pooled, batch.label)
        else:
            logits, terms = model.score(dense, pooled), {}
        weigh = _LossWeights(batch, self._task_weights, task_factors)
        sums = [
            self._weighted_sum(name, one, logits, weigh)
            for name, one in self._ordered_terms("score_with_losses", terms)
        ]
        parts = sums if CROSS_ENTROPY in self._sample_term_names else [_cross_entropy(logits, batch, weigh), *sums]
        summed = parts[0]
        for part in parts[1:]:
            summed = summed + part
        told = [one.detach().double() for one in (summed, *sums)]
        for term, is_told in self._global_terms(logits, batch, flight) if self._global_term_names else ():
            summed = summed + term
            told.append(term.detach().double() * is_told)
            told[0] = told[0] + told[-1]
        return logits, summed, torch.stack(told)

    def _global_terms(self, logits: Tensor, batch: Batch, flight: BatchContext[Any]) -> list[tuple[Tensor, bool]]:
        """Each times the sum of all weights, by which the sum over samples is divided, and whether it is this rank that
        tells what it is: each has all of it."""
        assert flight.batch_slice is not None and flight.global_totals is not None
        world, num_real = flight.batch_slice.world, batch.batch_size - batch.num_padding
        weight = torch.ones(batch.batch_size, device=logits.device) if batch.weight is None else batch.weight
        columns = [logits.flatten(1) if logits.dim() > 1 else logits[:, None], batch.label.view(len(logits), -1)]
        num_tasks = columns[0].shape[1]
        of_samples = weight[:, None]
        if batch.label_mask_2d is not None:
            of_samples = of_samples * batch.label_mask_2d
        own = torch.cat([column.to(logits.dtype) for column in (*columns, of_samples)], dim=1)[:num_real]
        sent = own.new_zeros(max(flight.batch_slice.batch_size_per_rank), own.shape[1] + 1)
        sent[:num_real, :-1], sent[:num_real, -1] = own.detach(), 1.0
        others = world.all_gather(sent, "logits")
        rows = [own if rank == world.rank else one[one[:, -1] > 0][:, :-1] for rank, one in enumerate(others)]
        scores, label, of_sample = torch.cat(rows).split([num_tasks, num_tasks, of_samples.shape[1]], dim=1)
        if logits.dim() == 1:
            scores, label = scores[:, 0], label[:, 0]
        terms = cast(Any, self._model).global_losses(scores, label, of_sample.squeeze(1))
        found = self._ordered_terms("global_losses", terms)
        for name, term in found:
            if term.shape != ():
                raise MesetaError(
                    f"{type(self._model).__name__}.global_losses: the term {name!r} is {list(term.shape)}; give one "
                    "number for the whole batch"
                )
        return [(term * flight.global_totals.weight, world.rank == 0) for _, term in found]

    def _ordered_terms(self, method: str, terms: Any) -> list[tuple[str, Tensor]]:
        names = self._sample_term_names if method == "score_with_losses" else self._global_term_names
        found = list(terms) if isinstance(terms, Mapping) else type(terms).__name__
        if not isinstance(terms, Mapping) or set(terms) != set(names):
            raise MesetaError(
                f"{type(self._model).__name__}.{method} gave the terms {found}, but its names are {list(names)}; give "
                "a mapping with a tensor for each"
            )
        return [(name, terms[name]) for name in names]

    def _weighted_sum(self, name: str, term: Tensor, logits: Tensor, weigh: _LossWeights) -> Tensor:
        if term.shape not in (logits.shape, logits.shape[:1]):
            raise MesetaError(
                f"{type(self._model).__name__}.score_with_losses: the term {name!r} is {list(term.shape)} for logits "
                f"{list(logits.shape)}; give one number for each sample, or for each sample and task"
            )
        factor = weigh(term, is_of_tasks=term.dim() > 1)
        return total(term if factor is None else term * factor)


@dataclass(frozen=True)
class _LossWeights:
    """What multiplies the losses of a batch before they are added up."""

    batch: Batch
    task_weights: Tensor | None
    """[T]; None: all 1."""
    task_factors: Tensor | None
    """[T], for a batch whose labels are not all known, see `start_task_factors`."""

    def __call__(self, losses: Tensor, *, is_of_tasks: bool) -> Tensor | None:
        """Return the factors of `losses` [B] or [B, T], which belong to tasks or to whole samples; None: all 1."""
        batch = self.batch
        factor = self.task_weights.to(losses.dtype) if self.task_weights is not None and is_of_tasks else None
        if batch.weight is not None:
            weight = batch.weight.to(losses.dtype).view(-1, *[1] * (losses.dim() - 1))
            factor = weight if factor is None else weight * factor
        if batch.label_mask is None or batch.label_mask_2d is None:
            return factor
        known: Tensor = batch.label_mask
        if is_of_tasks:
            assert self.task_factors is not None
            known = known * (self.task_factors if known.dim() > 1 else self.task_factors[0])
        else:
            known = batch.label_mask_2d.any(1)
        return known.to(losses.dtype) if factor is None else factor * known.to(losses.dtype)


def _cross_entropy(logits: Tensor, batch: Batch, weigh: _LossWeights) -> Tensor:
    """Sum of w_i * l_i over this rank's samples and tasks; l_i is the binary cross-entropy, w_i what `weigh` returns.

    Raises MesetaError for logits of another shape than the labels.
    """
    label = batch.label.to(logits.dtype)
    if label.shape != logits.shape:
        raise MesetaError(
            f"the model gives logits {list(logits.shape)} for labels {list(label.shape)}; the outputs of the model "
            "must be one per label of the dataset"
        )
    factor = weigh(logits, is_of_tasks=True)
    return total(functional.binary_cross_entropy_with_logits(logits, label, factor, reduction="none"))
