"""What a step makes small: the cross-entropy of the logits, and what a model adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meseta.data.batch import Batch
from meseta.jagged.shapes import Float
from meseta.models.base import term_names
from meseta.ops.sums import total
from meseta.pipeline.model import Model
from meseta.spec import MesetaError

CROSS_ENTROPY = "cross_entropy"
"""A term of this name stands in place of what every model loses."""


class BatchLosses:
    """Scores batches of one model, and adds up what they lose."""

    def __init__(self, model: Model, task_weights: Tensor | None) -> None:
        """`task_weights` [T] multiply the losses of the tasks; None: all 1. Raises MesetaError as `term_names` does."""
        self.names = term_names(model)
        self._model = model
        self._task_weights = task_weights

    def __call__(
        self, dense: Any, pooled: Any, batch: Batch
    ) -> tuple[Float[Tensor, " B *T"], Float[Tensor, ""], Float[Tensor, " _losses"]]:
        """(logits, the sum to be made small, the same and that of each term without a gradient in float64) over the
        samples of `batch`, each by its weight; `dense` and `pooled` are as `score` takes them.

        Raises MesetaError for logits of another shape than the labels, and for terms that are not those of `loss_terms`
        or not one number for each sample, or for each sample and task.
        """
        if not self.names:
            logits = self._model.score(dense, pooled)
            summed = loss_sum(logits, batch, self._task_weights)
            return logits, summed, summed.detach().double().view(1)
        model: Any = self._model
        logits, terms = model.score_with_losses(dense, pooled, batch.label)
        sums = [self._sum(name, term, logits, batch) for name, term in self._in_order(terms)]
        parts = sums if CROSS_ENTROPY in self.names else [loss_sum(logits, batch, self._task_weights), *sums]
        summed = parts[0]
        for part in parts[1:]:
            summed = summed + part
        return logits, summed, torch.stack([one.detach().double() for one in (summed, *sums)])

    def _in_order(self, terms: Any) -> list[tuple[str, Tensor]]:
        found = list(terms) if isinstance(terms, Mapping) else type(terms).__name__
        if not isinstance(terms, Mapping) or set(terms) != set(self.names):
            raise MesetaError(
                f"{type(self._model).__name__}.score_with_losses gave the terms {found}, but loss_terms are "
                f"{list(self.names)}; give logits and a mapping with a tensor for each"
            )
        return [(name, terms[name]) for name in self.names]

    def _sum(self, name: str, term: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        if term.shape not in (logits.shape, logits.shape[:1]):
            raise MesetaError(
                f"{type(self._model).__name__}.score_with_losses: the term {name!r} is {list(term.shape)} for logits "
                f"{list(logits.shape)}; give one number for each sample, or for each sample and task"
            )
        factor = _factor(batch, self._task_weights if term.dim() > 1 else None, term)
        return total(term if factor is None else term * factor)


def loss_sum(logits: Tensor, batch: Batch, task_weights: Tensor | None) -> Tensor:
    """The sum over this rank's samples, and over tasks: sum of w_i * l_i, where w_i is the weight of a sample (1 where
    the batch has none) and l_i the binary cross-entropy, each task's times its weight.

    Raises MesetaError for logits of another shape than the labels.
    """
    label = batch.label.to(logits.dtype)
    if label.shape != logits.shape:
        raise MesetaError(
            f"the model gives logits {list(logits.shape)} for labels {list(label.shape)}; the outputs of the model "
            "must be one per label of the dataset"
        )
    factor = _factor(batch, task_weights, logits)
    return total(functional.binary_cross_entropy_with_logits(logits, label, factor, reduction="none"))


def _factor(batch: Batch, task_weights: Tensor | None, losses: Tensor) -> Tensor | None:
    """What multiplies losses [B] or [B, T]; None: nothing."""
    factor = None if task_weights is None else task_weights.to(losses.dtype)
    if batch.weight is not None:
        weight = batch.weight.to(losses.dtype).view(-1, *[1] * (losses.dim() - 1))
        factor = weight if factor is None else weight * factor
    return factor
