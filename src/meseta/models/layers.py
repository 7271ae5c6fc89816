"""Initial weights of the dense part. Each parameter name has its own random stream."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import BatchSlice
from meseta.models.global_layers import SyncBatchNorm, dropout
from meseta.ops.mlp import mlp
from meseta.ops.product import batched_product
from meseta.ops.sums import softmax
from meseta.sparse.shapes import Float
from meseta.spec import FeatureSpec, InitSpec, MesetaError, TableSpec, suggest
from meseta.spec.tables import DenseDtype


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
        """Return the outputs. In training, batch norm is collective.

        Raises MesetaError if dropout or batch norm needs `batch` and it is missing.
        """
        x = self.options.cast(x)
        layers = [layer for layer in self if isinstance(layer, nn.Linear)]
        if self.options.batch_norm or (self.options.dropout and self.training):
            placed = self.resolve_batch_slice(batch, x)
            for index in range(self.num_hidden):
                x = self._hidden_layer(index, x, layers.pop(0), placed)
        # The last layer of a bfloat16 MLP computes in float32, and the others in bfloat16.
        head = layers.pop() if x.dtype == torch.bfloat16 and not self.relu_last else None
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if head is None:
            return mlp(x, weights, biases, relu_last=self.relu_last)
        return cast(Tensor, head(mlp(x, weights, biases, relu_last=True).to(head.weight.dtype)))

    def _hidden_layer(self, index: int, x: Tensor, layer: nn.Linear, batch: BatchSlice | None) -> Tensor:
        x = mlp(x, [layer.weight], [layer.bias], relu_last=not self.options.batch_norm)
        if self.options.batch_norm:
            x = functional.relu(self.normalize(index, x, batch))
        return self.apply_dropout(index, x, batch)


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
    """Return the width of each pooled feature, in the order of `embeddings.features`.

    Raises MesetaError if a feature has pooling 'none' or its own batch size.
    """
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
