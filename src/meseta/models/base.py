"""What a model of this package is: embeddings that are looked up first, and a dense part that scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from meseta.comm import BatchSlice
from meseta.embedding.batch_context import BatchContext
from meseta.jagged import KeyedJaggedTensor
from meseta.jagged.shapes import Float
from meseta.models.layers import MLPOptions, check_dense, check_pooled, pooled_dims
from meseta.spec import MesetaError, TableSpec


@dataclass(frozen=True)
class ModelBuildArgs:
    """What a model of this package is built from, beside its section of a config."""

    embeddings: nn.Module
    """With `tables` and `features`."""
    num_dense: int
    """Dense inputs of a sample."""
    num_tasks: int
    """Labels to predict."""
    seed: int
    """Key of the initial weights."""
    options: MLPOptions
    """Of all MLPs."""


@dataclass(frozen=True)
class DenseActivations:
    """What a model has made of its dense inputs alone, for `score`."""

    value: Any
    """As `ScoringModel.encode_dense` returns it."""


class ScoringModel(nn.Module, ABC):
    """`forward` looks up and scores; a pipeline looks up by itself and calls `forward_dense` while embeddings travel,
    and `score` when they are there."""

    def __init__(self, embeddings: nn.Module, num_dense: int) -> None:
        """Hold `embeddings`, a module with `tables` and `features` whose call returns an object with `pooled.values`
        [B, sum of D_f].

        Raises MesetaError for a feature without pooling.
        """
        super().__init__()
        self.embeddings = embeddings
        self.num_dense = num_dense
        self.dims = pooled_dims(type(self).__name__, embeddings)
        self.pooled_width = sum(self.dims.values())
        tables = cast(Sequence[TableSpec], embeddings.tables)
        self._pooled_dtype = torch.float64 if any(table.dtype == "float64" for table in tables) else torch.float32

    def forward(
        self, dense: Float[Tensor, "B num_dense"], sparse: KeyedJaggedTensor | BatchContext[Any]
    ) -> Float[Tensor, " B *T"]:
        """Logits of the click probability; dense inputs are cast to the type of the embeddings. `sparse` may be what
        `meseta.ahead` puts in its place."""
        return self.score(dense, select_score_input(self, self.embeddings(sparse)))

    def forward_dense(self, dense: Float[Tensor, "B num_dense"]) -> DenseActivations:
        """What needs no embeddings, computed while they travel; `score` takes it in place of the dense inputs.

        Raises MesetaError for inputs of another width than the model was built for.
        """
        check_dense(type(self).__name__, dense, self.num_dense)
        return DenseActivations(self.encode_dense(dense.to(self._pooled_dtype)))

    def score(
        self, dense: Float[Tensor, "B num_dense"] | DenseActivations, pooled: Float[Tensor, "B sum_of_D"]
    ) -> Float[Tensor, " B *T"]:
        """Logits from embeddings that were looked up: [B], or [B, T] where a model has several tasks. `dense` are the
        inputs themselves, or what `forward_dense` made of them.

        Raises MesetaError for inputs of other widths than the model was built for.
        """
        return self.logits(self.resolve_dense(dense, pooled), pooled)

    def resolve_dense(
        self, dense: Float[Tensor, "B num_dense"] | DenseActivations, pooled: Float[Tensor, "B sum_of_D"]
    ) -> Any:
        """What `logits` reads beside `pooled`, of either that `score` takes. Raises MesetaError as it does."""
        check_pooled(type(self).__name__, pooled, self.pooled_width)
        if isinstance(dense, DenseActivations):
            return dense.value
        check_dense(type(self).__name__, dense, self.num_dense)
        return self.encode_dense(dense.to(pooled.dtype))

    @property
    def has_dense_layers(self) -> bool:
        """Whether the model has layers that read dense inputs alone; without such inputs none has."""
        return self.num_dense > 0 and type(self).encode_dense is not ScoringModel.encode_dense

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Any:
        """What layers that read dense inputs alone make of them, given in the type of the embeddings; the inputs
        themselves where a model has no such layer."""
        return dense

    @property
    def batch_slice(self) -> BatchSlice | None:
        """Where the samples that were looked up last lie in the global batch, for dropout and batch norm."""
        return cast("BatchSlice | None", getattr(self.embeddings, "batch_slice", None))

    @abstractmethod
    def logits(self, x: Any, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B *T"]:
        """What `score` returns, of what `encode_dense` has returned."""


def find_dense_forward(model: Any) -> Callable[[Tensor], Any] | None:
    """Return the method `forward_dense` of a model, whose result replaces the dense inputs in calls of `score`.

    Returns `None` if the model has no such method, if the model has no dense layers, or if a subclass overrides `score`
    but not `forward_dense`, because its `score` expects the dense inputs. Raises MesetaError if the model has a method
    `before`, the former name, and no `forward_dense`.
    """
    if not getattr(model, "has_dense_layers", True):
        return None
    order = type(model).__mro__

    def depth(name: str) -> int | None:
        return next((index for index, cls in enumerate(order) if name in vars(cls)), None)

    dense_depth, score_depth = depth("forward_dense"), depth("score")
    former_depth = depth("before")
    # Ignored, a former method would silently cost the overlap of the dense part with the exchange.
    if former_depth is not None and (dense_depth is None or former_depth < dense_depth):
        raise MesetaError(
            f"{order[former_depth].__name__} has a method before, which is now called forward_dense; rename the method"
        )
    if dense_depth is None or (score_depth is not None and score_depth < dense_depth):
        return None
    method: Callable[[Tensor], Any] = model.forward_dense
    return method


def select_score_input(model: Any, embeddings: Any) -> Any:
    """What `score` of a model reads of Embeddings: the pooled vectors side by side [B, sum of D_f], or, where it has
    `reads_embeddings`, all that was looked up, with the rows of features that are not pooled."""
    return embeddings if getattr(model, "reads_embeddings", False) else embeddings.pooled.values


def check_reads_pooled(what: str, model: Any) -> None:
    """Raise MesetaError, in which `what` cannot be done, where a model reads more than pooled vectors."""
    if getattr(model, "reads_embeddings", False):
        raise MesetaError(
            f"{what}: {type(model).__name__} has reads_embeddings, and this knows pooled vectors alone; give the model "
            "a score(dense, pooled) of pooled vectors"
        )


GLOBAL_LOSS_HOOKS = ("global_loss_terms", "global_losses(logits, label, weight)")
"""Names of the terms of a loss of the global batch, and what makes them."""


def loss_term_names(
    model: Any, attribute: str = "loss_terms", method: str = "score_with_losses(dense, pooled, label)"
) -> tuple[str, ...]:
    """`model.loss_terms`: of what a model adds to the cross-entropy; none where it has none. Raises MesetaError for
    what are no names, and where the method that makes the terms is missing."""
    names, who = getattr(model, attribute, ()), type(model).__name__
    if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
        raise MesetaError(f"{who}.{attribute} is {names!r}; give a tuple of names, such as ('block',)")
    if len(set(names)) < len(names):
        raise MesetaError(f"{who}.{attribute} has a name twice: {', '.join(names)}; give each once")
    if names and not callable(getattr(model, method.partition("(")[0], None)):
        raise MesetaError(
            f"{who} has {attribute}, but no method {method} that makes them; write it, or leave {attribute} out"
        )
    return names
