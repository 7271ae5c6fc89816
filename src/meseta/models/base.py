"""Fields: dense inputs and sparse features as vectors of equal width, and their first-order weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from meseta.comm import BatchSlice
from meseta.embedding.batch_context import BatchContext
from meseta.models.layers import MLP, MLPOptions, SkipInitLinear, check_dense, check_pooled, fill_normal, pooled_dims
from meseta.ops.sums import repeat
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError, TableSpec

INITIAL_STD = 0.1
"""Standard deviation of the initial vectors of dense inputs, as in libFM."""


class FieldVectors(nn.Module):
    """Vectors of all fields: x_j v_j with a learned v_j for dense input j, and pooled rows for a sparse feature."""

    def __init__(self, num_dense: int, num_sparse: int, width: int, seed: int) -> None:
        super().__init__()
        self.num_sparse = num_sparse
        self.num_fields = num_dense + num_sparse
        self.width = width
        self.dense_vectors = nn.Parameter(torch.empty(num_dense, width))
        fill_normal(self.dense_vectors, INITIAL_STD, seed, "fields.dense_vectors")

    def forward(self, dense: Float[Tensor, "B num_dense"]) -> Float[Tensor, "B num_dense D"]:
        """Return the vectors of the dense inputs, which precede those of sparse features."""
        return dense[..., None] * repeat(self.dense_vectors, dense.shape[0])

    def concat_sparse(
        self, of_dense: Float[Tensor, "B num_dense D"], pooled: Float[Tensor, "B sum_of_D"]
    ) -> Float[Tensor, "B M D"]:
        """Concatenate the vectors of dense inputs and sparse features."""
        return torch.cat([of_dense, pooled.unflatten(1, (self.num_sparse, self.width))], dim=1)


class DenseVector(nn.Module):
    """MLP that maps all dense inputs to one vector of the width of the embeddings, with ReLU after each layer."""

    def __init__(
        self, num_dense: int, hidden: Sequence[int], width: int, options: MLPOptions | None, name: str
    ) -> None:
        """Create the MLP. `hidden` has the widths of all layers but the last. `name` is the module's path in the
        model."""
        super().__init__()
        self.num_vectors = min(num_dense, 1)  # Without dense inputs there is no vector.
        self.width = width
        self.mlp = (
            MLP([num_dense, *hidden, width], relu_last=True, options=options, name=f"{name}.mlp") if num_dense else None
        )

    def forward(self, dense: Float[Tensor, "B num_dense"], batch: BatchSlice | None) -> Float[Tensor, "B one D"]:
        """Return the vector in the type of the inputs, [B, 0, D] without dense inputs."""
        if self.mlp is None:
            return dense.new_empty(dense.shape[0], 0, self.width)
        return cast(Tensor, self.mlp(dense, batch)).to(dense.dtype)[:, None]


class FieldMixer(nn.Module):
    """Linear combinations of fields, element by element of their vectors: y_l = sum_m W_lm x_m [+ b_l]."""

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.linear = SkipInitLinear(num_inputs, num_outputs, bias=bias)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B L D"]:
        return self.mix_columns(fields).transpose(1, 2)

    def mix_columns(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B D L"]:
        """Return the combinations as columns of a matrix per sample."""
        rows = fields.transpose(1, 2)
        return cast(Tensor, self.linear(rows.flatten(0, 1))).unflatten(0, rows.shape[:2])


class FirstOrderTerm(nn.Module):
    """First-order term of a model: a bias, a weight per dense input, and a weight per id."""

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.dense = SkipInitLinear(num_dense, 1)
        with torch.no_grad():
            self.dense.weight.zero_()
            self.dense.bias.zero_()

    def forward(self, dense: Float[Tensor, "B num_dense"]) -> Float[Tensor, " B"]:
        """Return the bias plus the weighted sum of the dense inputs."""
        # The caller adds the weights of ids, which are columns of its tables.
        return cast(Tensor, self.dense(dense)).squeeze(1)


def common_width(model: str, dims: Mapping[str, int], min_width: int = 1) -> int:
    """Return the width that all features have. Raises MesetaError if they differ or are below `min_width`."""
    widest = max(dims, key=lambda feature: dims[feature])
    width = dims[widest]
    for feature, dim in dims.items():
        if dim != width or dim < min_width:
            other = f" and {widest!r} {width}" if dim != width else ""
            raise MesetaError(
                f"{model}: feature {feature!r} has embedding_dim {dim}{other}, but all must have the same width, at "
                f"least {min_width}; set embedding_dim={max(width, min_width)} for all tables"
            )
    return width


def split_weights(
    pooled: Float[Tensor, "B sum_of_D"], num_sparse: int
) -> tuple[Float[Tensor, "B num_sparse D"], Float[Tensor, "B num_sparse"]]:
    """Split pooled rows of width D + 1 into (vectors, first-order weights). The weight is the last column."""
    # Vector and weight share a row, so that one lookup reads them and one update writes them.
    rows = pooled.unflatten(1, (num_sparse, -1))
    return rows[..., :-1], rows[..., -1]


@dataclass(frozen=True)
class ModelBuildArgs:
    """Arguments of a model of this package besides its config section."""

    embeddings: nn.Module
    num_dense: int
    num_tasks: int
    """Number of labels to predict."""
    seed: int
    """Seed of the initial weights."""
    options: MLPOptions


@dataclass(frozen=True)
class DenseActivations:
    """Activations of a model's dense inputs, which `score` accepts in place of the dense inputs."""

    value: Any
    """Result of `ScoringModel.encode_dense`."""


class ScoringModel(nn.Module, ABC):
    """Model that looks up embeddings and computes logits from pooled embeddings and dense inputs.

    `forward` does both. A pipeline looks up itself, with `forward_dense` while embeddings are exchanged, and `score`
    when they have arrived.
    """

    def __init__(self, embeddings: nn.Module, num_dense: int) -> None:
        """Create a model on `embeddings`, a module with `tables` and `features`, and `num_dense` dense inputs.

        A call of `embeddings` must return an object with `pooled.values` of shape [B, sum of D_f]. Raises MesetaError
        if a feature is not pooled.
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
        """Return the logits of the click probability. `sparse` may be a `BatchContext` from `meseta.ahead`."""
        # `score` casts dense inputs to the type of the embeddings.
        return self.score(dense, select_score_input(self, self.embeddings(sparse)))

    def forward_dense(self, dense: Float[Tensor, "B num_dense"]) -> DenseActivations:
        """Compute the activations that need no embeddings. `score` accepts the result in place of the dense inputs.

        Raises MesetaError if the number of dense inputs is wrong.
        """
        check_dense(type(self).__name__, dense, self.num_dense)
        return DenseActivations(self.encode_dense(dense.to(self._pooled_dtype)))

    def score(
        self, dense: Float[Tensor, "B num_dense"] | DenseActivations, pooled: Float[Tensor, "B sum_of_D"]
    ) -> Float[Tensor, " B *T"]:
        """Compute logits from pooled embeddings. The shape is [B], or [B, T] for a model with several tasks.

        `dense` has the dense inputs, or the result of `forward_dense`. Raises MesetaError if a width is wrong.
        """
        return self.logits(self.resolve_dense(dense, pooled), pooled)

    def resolve_dense(
        self, dense: Float[Tensor, "B num_dense"] | DenseActivations, pooled: Float[Tensor, "B sum_of_D"]
    ) -> Any:
        """Return the first argument of `logits` for either type of `dense`. Raises MesetaError if a width is wrong."""
        check_pooled(type(self).__name__, pooled, self.pooled_width)
        if isinstance(dense, DenseActivations):
            return dense.value
        check_dense(type(self).__name__, dense, self.num_dense)
        return self.encode_dense(dense.to(pooled.dtype))

    @property
    def has_dense_layers(self) -> bool:
        """Whether the model has layers that read only dense inputs."""
        return self.num_dense > 0 and type(self).encode_dense is not ScoringModel.encode_dense

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Any:
        """Apply the layers that read only dense inputs, given in the type of the embeddings. By default there are
        none."""
        return dense

    @property
    def batch_slice(self) -> BatchSlice | None:
        """Position of the last looked-up samples in the global batch, for dropout and batch norm. `None` if unknown."""
        return cast("BatchSlice | None", getattr(self.embeddings, "batch_slice", None))

    @abstractmethod
    def logits(self, x: Any, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B *T"]:
        """Compute the logits from `x`, the result of `encode_dense`, and pooled embeddings."""


FORMER_MEMBERS = {"before": "forward_dense", "reads_dense_alone": "has_dense_layers"}
"""Current name of each former member of a model. A model that defines a former name is refused, because it would
silently lose the overlap of its dense part, or silently gain one that it disables."""


def find_dense_forward(model: Any) -> Callable[[Tensor], Any] | None:
    """Return the method `forward_dense` of a model, whose result replaces the dense inputs in calls of `score`.

    Returns `None` if the model has no such method, if it has no dense layers, or if a subclass overrides only `score`.
    Raises MesetaError if the model defines a member of `FORMER_MEMBERS` under its former name.
    """
    order = type(model).__mro__

    def depth(name: str) -> int | None:
        return next((index for index, cls in enumerate(order) if name in vars(cls)), None)

    # Ignored, a former member would silently cost the overlap of the dense part with the exchange.
    for former, current in FORMER_MEMBERS.items():
        former_depth, current_depth = depth(former), depth(current)
        if former_depth is not None and (current_depth is None or former_depth < current_depth):
            raise MesetaError(f"{order[former_depth].__name__} has {former}, which is now called {current}; rename it")
    if not getattr(model, "has_dense_layers", True):
        return None
    dense_depth, score_depth = depth("forward_dense"), depth("score")
    # A `score` that overrides that of the class with `forward_dense` expects the dense inputs.
    if dense_depth is None or (score_depth is not None and score_depth < dense_depth):
        return None
    method: Callable[[Tensor], Any] = model.forward_dense
    return method


def select_score_input(model: Any, embeddings: Any) -> Any:
    """Return the input of `score`: pooled embeddings [B, sum of D_f], or all if the model has `reads_embeddings`."""
    return embeddings if getattr(model, "reads_embeddings", False) else embeddings.pooled.values


def check_reads_pooled(what: str, model: Any) -> None:
    """Raise MesetaError if the model has `reads_embeddings`. `what` names the unsupported operation."""
    if getattr(model, "reads_embeddings", False):
        raise MesetaError(
            f"{what}: {type(model).__name__} has reads_embeddings, but only pooled embeddings are supported; define "
            "score(dense, pooled) for pooled embeddings"
        )


GLOBAL_LOSS_HOOKS = ("global_loss_terms", "global_losses(logits, label, weight)")
"""Attribute with the names of loss terms of the global batch, and the method that computes them."""


def loss_term_names(
    model: Any, attribute: str = "loss_terms", method: str = "score_with_losses(dense, pooled, label)"
) -> tuple[str, ...]:
    """Return the names of the terms that a model adds to the cross-entropy, from its `attribute`.

    Raises MesetaError if the names are invalid or the model lacks the method that computes the terms.
    """
    names, who = getattr(model, attribute, ()), type(model).__name__
    if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
        raise MesetaError(f"{who}.{attribute} must be a tuple of names such as ('block',), got {names!r}")
    if len(set(names)) < len(names):
        raise MesetaError(f"{who}.{attribute} must not contain duplicates, got {', '.join(names)}")
    if names and not callable(getattr(model, method.partition("(")[0], None)):
        raise MesetaError(
            f"{who} has {attribute}, but no method {method} that computes them; define it, or remove {attribute}"
        )
    return names
