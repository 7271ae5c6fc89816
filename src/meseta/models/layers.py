"""Fields: dense inputs and sparse features as vectors of equal width, and their first-order weights."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import BatchSlice
from meseta.embedding.batch_context import BatchContext
from meseta.models.global_layers import SyncBatchNorm, dropout
from meseta.ops.common import repeat, softmax
from meseta.ops.concat import concat
from meseta.ops.mlp import mlp
from meseta.ops.product import batched_product
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Float
from meseta.spec import FeatureSpec, InitSpec, MesetaError, TableSpec, suggest
from meseta.spec.tables import DenseDtype

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


Model = TypeVar("Model", bound=nn.Module)


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

    def build(self, model: Callable[..., Model], **parts: Any) -> Model:
        """Create a model with these arguments, except for `num_tasks`, and the `parts` that its config specifies."""
        return model(self.embeddings, num_dense=self.num_dense, options=self.options, seed=self.seed, **parts)


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
        """Compute the activations that need no embeddings, which `score` accepts in place of dense inputs. Raises
        MesetaError if the number of inputs is wrong."""
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


def _make_generator(seed: int, name: str) -> torch.Generator:
    # Draws on the CPU, so that runs on a GPU start from the same bits.
    # With a stream per name, weights do not depend on the order of parameters, the rank or global random state.
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def fill_normal(parameter: Float[Tensor, " *shape"], std: float, seed: int, name: str) -> None:
    """Fill with draws from N(0, std squared), made in float64 and rounded. Skips a parameter on the meta device."""
    if not parameter.is_meta:
        draws = torch.randn(parameter.shape, dtype=torch.float64, generator=_make_generator(seed, name))
        parameter.copy_(draws.mul_(std))


@torch.no_grad()
def fill_uniform(parameter: Float[Tensor, " *shape"], bound: float, seed: int, name: str) -> None:
    """Fill with draws from [-bound, bound), made in float64 and rounded. Skips a parameter on the meta device."""
    if not parameter.is_meta:
        draws = torch.rand(parameter.shape, dtype=torch.float64, generator=_make_generator(seed, name))
        parameter.copy_(draws.mul_(2.0).sub_(1.0).mul_(bound))


@torch.no_grad()
def fill_by_pattern(model: nn.Module, inits: Mapping[str, InitSpec], seed: int) -> None:
    """Fill the parameters whose names match a pattern of `inits`, with case-sensitive fnmatch. The last match wins.

    Each `InitSpec` must have a `scale`. The numbers depend only on seed, name, shape, kind and scale. Raises
    MesetaError if a pattern matches no parameter.
    """
    parameters = dict(model.named_parameters())
    chosen: dict[str, InitSpec] = {}
    for pattern, init in inits.items():
        targets = [name for name in parameters if fnmatchcase(name, pattern)]
        if not targets:
            raise MesetaError(f"config: dense.init {pattern!r} matches no parameter; {suggest(pattern, parameters)}")
        chosen |= dict.fromkeys(targets, init)
    for name, init in chosen.items():
        assert init.scale is not None
        if init.kind == "normal":
            fill_normal(parameters[name], init.scale, seed, name)
        elif init.kind == "uniform":
            fill_uniform(parameters[name], init.scale, seed, name)
        else:
            parameters[name].fill_(init.scale)


# torch's initialization would draw from the global random state. With `meseta.ops.mlp`, results do not depend on the
# number of threads.
class SkipInitLinear(nn.Linear):
    """Linear layer whose initial weights the model sets. It computes in the type of its input."""

    def reset_parameters(self) -> None:
        pass  # The model initializes the weights.

    def forward(self, x: Float[Tensor, "B N"]) -> Float[Tensor, "B outputs"]:
        return mlp(x, [self.weight], [self.bias], relu_last=False)


@dataclass(frozen=True, kw_only=True)
class MLPOptions:
    """Options of all MLPs of a model."""

    dtype: DenseDtype = "float32"
    """Data type of the activations. With bfloat16, parameters and logits remain float32."""
    dropout: float = 0.0
    """Share of the outputs of hidden layers dropped in training after ReLU, at least 0 and below 1."""
    batch_norm: bool = False
    """Whether to normalize the outputs of hidden layers before ReLU."""
    seed: int = 0
    """Seed of the dropout masks."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise MesetaError(f"MLPOptions: dropout must be at least 0 and below 1, got {self.dropout}")

    def cast(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Cast `x` to the data type of the activations."""
        return x.to(torch.bfloat16) if self.dtype == "bfloat16" else x

    def concat(self, a: Float[Tensor, "B N"], b: Float[Tensor, "B M"]) -> Float[Tensor, "B N_plus_M"]:
        """Concatenate columns and cast them to the data type of the activations."""
        dtype = torch.promote_types(a.dtype, b.dtype)
        return concat(a, b, torch.bfloat16 if self.dtype == "bfloat16" else dtype)


class HiddenLayers(nn.Module):
    """Base class of layer stacks, which applies dropout and batch norm to hidden layers."""

    def set_hidden_layers(self, widths: Sequence[int], options: MLPOptions | None, name: str) -> None:
        """Set the output widths of the hidden layers. `name`, the path of the stack in its model, seeds the dropout
        masks."""
        self.options = options or MLPOptions()
        self.name = name
        self.num_hidden = len(widths)
        if self.options.batch_norm:
            self.norms = nn.ModuleList(SyncBatchNorm(width) for width in widths)

    def normalize(self, index: int, x: Float[Tensor, "B N"], batch: BatchSlice | None) -> Float[Tensor, "B N"]:
        """Apply batch norm to hidden layer `index` if enabled. `batch` is the result of `resolve_batch_slice`."""
        return cast(SyncBatchNorm, self.norms[index])(x, batch) if self.options.batch_norm else x

    def apply_dropout(self, index: int, x: Float[Tensor, "B N"], batch: BatchSlice | None) -> Float[Tensor, "B N"]:
        """Apply dropout to hidden layer `index` if enabled. `batch` is the result of `resolve_batch_slice`."""
        if not self.options.dropout or batch is None:
            return x
        return dropout(x, self.options.dropout, self.options.seed, f"{self.name}.{index}", batch)

    def resolve_batch_slice(self, batch: BatchSlice | None, x: Float[Tensor, "B N"]) -> BatchSlice | None:
        """Return `batch` if dropout or batch norm need the position of the samples in training, otherwise `None`.

        Raises MesetaError if they need it, but `batch` is missing or has another number of samples.
        """
        if not self.training or not (self.options.dropout or self.options.batch_norm):
            return None
        if batch is None or batch.batch_size_per_rank[batch.world.rank] != len(x):
            known = "nothing" if batch is None else f"{batch.batch_size_per_rank[batch.world.rank]} samples"
            raise MesetaError(
                f"{self.name}: dropout and batch norm need the position of the {len(x)} samples in the global batch, "
                f"but got that of {known}; look up their embeddings and pass embeddings.batch_slice, or call eval()"
            )
        return batch


class MLP(HiddenLayers, nn.Sequential):
    """Linear layers `widths[0] -> widths[1] -> ...` with ReLU between them, and on request after the last one.

    It computes in the type of its input, or in bfloat16 if the options request it. Without `relu_last`, the last layer
    of a bfloat16 MLP computes in float32. In a hidden layer, batch norm precedes ReLU and dropout follows it.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        relu_last: bool,
        last_is_hidden: bool = False,
        options: MLPOptions | None = None,
        name: str = "mlp",
    ) -> None:
        """Create the layers.

        Args:
            widths: Widths of the input and of each layer's output.
            relu_last: Whether ReLU follows the last layer.
            last_is_hidden: Whether the last layer is hidden too, which requires `relu_last`.
            options: Options of the hidden layers.
            name: Path of the MLP in its model, which seeds the dropout masks.
        """
        options = options or MLPOptions()
        # The last layer counts as hidden if another layer follows in the model.
        num_hidden = len(widths) - 1 if last_is_hidden else len(widths) - 2
        layers: list[nn.Module] = []
        for index, (num_inputs, num_outputs) in enumerate(pairwise(widths)):
            # Batch norm cancels a bias. Its gradient would be rounding errors, which Adam turns into steps.
            has_bias = index == num_hidden or not options.batch_norm
            layers += [SkipInitLinear(num_inputs, num_outputs, bias=has_bias), nn.ReLU()]
        super().__init__(*(layers if relu_last else layers[:-1]))
        self.relu_last = relu_last
        self.set_hidden_layers(widths[1 : num_hidden + 1], options, name)

    def forward(self, x: Float[Tensor, "B N"], batch: BatchSlice | None = None) -> Float[Tensor, "B outputs"]:
        """Return the outputs. In training, batch norm is collective. Raises MesetaError if `batch` is missing."""
        x = self.options.cast(x)
        layers = [layer for layer in self if isinstance(layer, nn.Linear)]
        if self.options.batch_norm or (self.options.dropout and self.training):
            placed = self.resolve_batch_slice(batch, x)
            for index in range(self.num_hidden):
                layer = layers.pop(0)
                x = mlp(x, [layer.weight], [layer.bias], relu_last=not self.options.batch_norm)
                if self.options.batch_norm:
                    x = functional.relu(self.normalize(index, x, placed))
                x = self.apply_dropout(index, x, placed)
        # The last layer of a bfloat16 MLP computes in float32, and the others in bfloat16.
        head = layers.pop() if x.dtype == torch.bfloat16 and not self.relu_last else None
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if head is None:
            return mlp(x, weights, biases, relu_last=self.relu_last)
        return cast(Tensor, head(mlp(x, weights, biases, relu_last=True).to(head.weight.dtype)))


def fill_glorot(stack: MLP, seed: int) -> None:
    """Initialize an MLP as `fill_linear` does."""
    fill_linear(stack, seed, stack.name)


@torch.no_grad()
def fill_linear(module: nn.Module, seed: int, name: str = "") -> None:
    """Initialize all SkipInitLinear layers: weights from N(0, 2 / (inputs + outputs)), biases with zeros.

    The weights follow Glorot and Bengio (AISTATS 2010, equation 12). `name` is the path of `module` in its model.
    """
    # Each weight has its own random stream, by its path.
    for path, layer in module.named_modules(prefix=name):
        if isinstance(layer, SkipInitLinear):
            fill_normal(layer.weight, math.sqrt(2.0 / sum(layer.weight.shape)), seed, f"{path}.weight")
            if layer.bias is not None:
                layer.bias.zero_()


def pooled_dims(model: str, embeddings: nn.Module) -> dict[str, int]:
    """Return the width of each pooled feature, as in `embeddings.features`. Raises MesetaError if one has pooling
    'none' or its own batch size."""
    tables = cast(Sequence[TableSpec], embeddings.tables)
    features = cast(Sequence[FeatureSpec], embeddings.features)
    width = {table.name: table.embedding_dim for table in tables}
    # The models need one vector per sample.
    for feature in features:
        if feature.pooling == "none":
            raise MesetaError(
                f"{model}: feature {feature.name!r} has pooling 'none', but the model needs one vector per sample; "
                "use pooling 'sum' or 'mean'"
            )
        if feature.batch:
            raise MesetaError(
                f"{model}: feature {feature.name!r} has batch {feature.batch!r}, but the model needs one vector per "
                "sample; remove `batch`, or use a custom model"
            )
    return {feature.name: width[feature.table] for feature in features}


def check_widths(model: str, names: str, widths: Sequence[int]) -> None:
    """Raise MesetaError unless all `widths`, named `names`, are at least 1."""
    for width in widths:
        if width < 1:
            raise MesetaError(f"{model}: widths in {names} must be at least 1, got {list(widths)}")


def check_dense(model: str, dense: Float[Tensor, "B num_dense"], num_dense: int) -> None:
    """Raise MesetaError unless the number of dense inputs is that of the model."""
    if dense.shape[1] != num_dense:
        raise MesetaError(
            f"{model}: {dense.shape[1]} dense inputs, but the model was built with num_dense={num_dense}; "
            f"pass a tensor [B, {num_dense}]"
        )


def check_pooled(model: str, pooled: Float[Tensor, "B sum_of_D"], pooled_width: int) -> None:
    """Raise MesetaError unless the width of the pooled embeddings is that of the model."""
    if pooled.shape[1] != pooled_width:
        raise MesetaError(
            f"{model}: pooled embeddings have {pooled.shape[1]} columns, but the model was built for {pooled_width}; "
            "pass the pooled output of the embeddings that the model was built on"
        )


class InteractingLayer(nn.Module):
    """Multi-head self-attention over fields, without a scale (arXiv 1810.11921, section 4.4, equations 5 to 8)."""

    def __init__(self, num_inputs: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        width = num_heads * head_width
        self.query, self.key, self.value, self.residual = (
            SkipInitLinear(num_inputs, width, bias=False) for _ in range(4)
        )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"

    def forward(self, fields: Float[Tensor, "B M N"]) -> Float[Tensor, "B M width"]:
        num_samples, num_fields, _ = fields.shape
        flat = fields.flatten(0, 1)
        shape = num_samples, num_fields, self.num_heads, self.query.out_features // self.num_heads
        query, key, value = (
            layer(flat).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # [B, heads, M, head_width]
        # In each head: a_mk = softmax over k of <W_Q e_m, W_K e_k>.
        attention = softmax(_batched_matmul(query, key.transpose(2, 3)))
        mixed = _batched_matmul(attention, value).transpose(1, 2).flatten(2)
        # e'_m = ReLU(concat over heads of sum_k a_mk W_V e_k + W_R e_m).
        return functional.relu(mixed + self.residual(flat).view_as(mixed))


def _batched_matmul(a: Float[Tensor, "B heads M K"], b: Float[Tensor, "B heads K N"]) -> Float[Tensor, "B heads M N"]:
    return batched_product(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
