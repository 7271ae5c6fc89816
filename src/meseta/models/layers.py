"""What the models share: stacks of linear layers, and the widths of the pooled embeddings that they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import BatchSlice
from meseta.jagged.shapes import Float
from meseta.models.global_layers import SyncBatchNorm, dropout
from meseta.models.initialization import fill_normal
from meseta.ops.mlp import mlp
from meseta.spec import FeatureSpec, MesetaError, TableSpec
from meseta.spec.tables import DenseDtype


class SkipInitLinear(nn.Linear):
    """A linear layer whose weights the model sets: torch's own start would draw from the global random state.

    It computes in the type of its input, by meseta.ops.mlp, where the number of threads changes no bit.
    """

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""

    def forward(self, x: Float[Tensor, "B N"]) -> Float[Tensor, "B outputs"]:
        return mlp(x, [self.weight], [self.bias], relu_last=False)


@dataclass(frozen=True, kw_only=True)
class MLPOptions:
    """What all stacks of layers of a model have in common."""

    dtype: DenseDtype = "float32"
    """Type of the activations. 'bfloat16': layers compute in bfloat16 on parameters that stay as they are; logits are
    float32."""
    dropout: float = 0.0
    """Share of the outputs of hidden layers that is dropped in training, after ReLU; at least 0, below 1."""
    batch_norm: bool = False
    """Normalise the outputs of hidden layers, before ReLU."""
    seed: int = 0
    """Key of the dropout masks."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise MesetaError(f"MLPOptions: dropout must be at least 0 and below 1, got {self.dropout}")

    def cast(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """x in the type of the activations."""
        return x.to(torch.bfloat16) if self.dtype == "bfloat16" else x


class HiddenLayers(nn.Module):
    """A stack of layers, and what its options do to the outputs of those that are hidden."""

    def set_hidden_layers(self, widths: Sequence[int], options: MLPOptions | None, name: str) -> None:
        """Hidden layers have `widths` outputs; `name` is the place of the stack in its model, and with the seed the key
        of its dropout masks."""
        self.options = options or MLPOptions()
        self.name = name
        self.num_hidden = len(widths)
        if self.options.batch_norm:
            self.norms = nn.ModuleList(SyncBatchNorm(width) for width in widths)

    def normalize(self, index: int, x: Float[Tensor, "B N"], batch: BatchSlice | None) -> Float[Tensor, "B N"]:
        """Outputs of hidden layer `index` after batch norm, if the options say so; `batch` is what `place` returns."""
        return cast(SyncBatchNorm, self.norms[index])(x, batch) if self.options.batch_norm else x

    def apply_dropout(self, index: int, x: Float[Tensor, "B N"], batch: BatchSlice | None) -> Float[Tensor, "B N"]:
        """Outputs of hidden layer `index` after dropout, if the options say so; `batch` is what `place` returns."""
        if not self.options.dropout or batch is None:
            return x
        return dropout(x, self.options.dropout, self.options.seed, f"{self.name}.{index}", batch)

    def resolve_batch_slice(self, batch: BatchSlice | None, x: Float[Tensor, "B N"]) -> BatchSlice | None:
        """`batch` while training, where dropout and batch norm read where the samples of x lie, and None otherwise.

        Raises MesetaError where they need it and are not told.
        """
        if not self.training or not (self.options.dropout or self.options.batch_norm):
            return None
        if batch is None or batch.batch_size_per_rank[batch.world.rank] != len(x):
            known = "nothing" if batch is None else f"{batch.batch_size_per_rank[batch.world.rank]} samples"
            raise MesetaError(
                f"{self.name}: dropout and batch norm must know where the {len(x)} samples lie in the global batch, "
                f"and are told of {known}; look up their embeddings and give embeddings.batch_slice, or call eval()"
            )
        return batch


class MLP(HiddenLayers, nn.Sequential):
    """Linear layers `widths[0] -> widths[1] -> ...` with ReLU between them, and after the last one if asked for.

    Computes in the type of its input, or in bfloat16 if the options say so. The last layer of a bfloat16 stack without
    ReLU, which gives the logits, is computed in float32. Every layer but the last is hidden, and the last one where
    another stands behind it in the model: linear, batch norm, ReLU, dropout, the second and the last of these only if
    the options say so; a linear layer before batch norm has no bias.
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
        """`name` is the place of the stack in its model, and with the seed the key of its dropout masks;
        `last_is_hidden` goes with `relu_last` alone."""
        options = options or MLPOptions()
        num_hidden = len(widths) - 1 if last_is_hidden else len(widths) - 2
        layers: list[nn.Module] = []
        for index, (num_inputs, num_outputs) in enumerate(pairwise(widths)):
            # Batch norm takes a bias away again: its gradient would be rounding alone, which Adam makes into steps.
            has_bias = index == num_hidden or not options.batch_norm
            layers += [SkipInitLinear(num_inputs, num_outputs, bias=has_bias), nn.ReLU()]
        super().__init__(*(layers if relu_last else layers[:-1]))
        self.relu_last = relu_last
        self.set_hidden_layers(widths[1 : num_hidden + 1], options, name)

    def forward(self, x: Float[Tensor, "B N"], batch: BatchSlice | None = None) -> Float[Tensor, "B outputs"]:
        """The outputs. In training, dropout and batch norm read from `batch` where the samples lie; collective with it.

        Raises MesetaError where they need it and there is none.
        """
        x = self.options.cast(x)
        layers = [layer for layer in self if isinstance(layer, nn.Linear)]
        if self.options.batch_norm or (self.options.dropout and self.training):
            placed = self.resolve_batch_slice(batch, x)
            for index in range(self.num_hidden):
                x = self._hidden_layer(index, x, layers.pop(0), placed)
        head = layers.pop() if x.dtype == torch.bfloat16 and not self.relu_last else None
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if head is None:
            return mlp(x, weights, biases, relu_last=self.relu_last)
        return cast(Tensor, head(mlp(x, weights, biases, relu_last=True).to(head.weight.dtype)))

    def _hidden_layer(self, index: int, x: Tensor, layer: nn.Linear, batch: BatchSlice | None) -> Tensor:
        """One hidden layer."""
        x = mlp(x, [layer.weight], [layer.bias], relu_last=not self.options.batch_norm)
        if self.options.batch_norm:
            x = functional.relu(self.normalize(index, x, batch))
        return self.apply_dropout(index, x, batch)


def fill_glorot(stack: MLP, seed: int) -> None:
    """Initial weights as `fill_linear` has them; the stream of each layer is that of the stack's name."""
    fill_linear(stack, seed, stack.name)


@torch.no_grad()
def fill_linear(module: nn.Module, seed: int, name: str = "") -> None:
    """Initial weights of all SkipInitLinear layers in `module`, which is called `name` in its model: N(0, 2 / (inputs +
    outputs)) (Glorot and Bengio, AISTATS 2010, equation 12), biases zero. The stream of each is that of its name."""
    for path, layer in module.named_modules(prefix=name):
        if isinstance(layer, SkipInitLinear):
            fill_normal(layer.weight, math.sqrt(2.0 / sum(layer.weight.shape)), seed, f"{path}.weight")
            if layer.bias is not None:
                layer.bias.zero_()


def pooled_dims(model: str, embeddings: nn.Module) -> dict[str, int]:
    """Width of each pooled feature, in the order of `embeddings.features`, read from `embeddings.tables`.

    Raises MesetaError for a feature with pooling 'none', whose rows per sample vary, and for one with a batch size of
    its own: these models need one vector of fixed width per sample.
    """
    tables = cast(Sequence[TableSpec], embeddings.tables)
    features = cast(Sequence[FeatureSpec], embeddings.features)
    width = {table.name: table.embedding_dim for table in tables}
    for feature in features:
        if feature.pooling == "none":
            raise MesetaError(
                f"{model}: feature {feature.name!r} has pooling 'none', but the model needs one vector per sample; "
                "use pooling 'sum' or 'mean'"
            )
        if feature.batch:
            raise MesetaError(
                f"{model}: feature {feature.name!r} is of batch {feature.batch!r}, but the model needs one vector per "
                "sample; leave `batch` out, or take the vectors in a model of your own"
            )
    return {feature.name: width[feature.table] for feature in features}


def check_widths(model: str, names: str, widths: Sequence[int]) -> None:
    """Raise MesetaError unless every width is at least 1."""
    for width in widths:
        if width < 1:
            raise MesetaError(f"{model}: widths in {names} must be at least 1, got {list(widths)}")


def check_dense(model: str, dense: Float[Tensor, "B num_dense"], num_dense: int) -> None:
    """Raise MesetaError unless dense inputs have the width that the model was built for."""
    if dense.shape[1] != num_dense:
        raise MesetaError(
            f"{model}: {dense.shape[1]} dense inputs, but the model was built with num_dense={num_dense}; "
            f"give a tensor [B, {num_dense}]"
        )


def check_pooled(model: str, pooled: Float[Tensor, "B sum_of_D"], pooled_width: int) -> None:
    """Raise MesetaError unless embeddings have the width that the model was built for."""
    if pooled.shape[1] != pooled_width:
        raise MesetaError(
            f"{model}: pooled embeddings have {pooled.shape[1]} columns, but the model was built for {pooled_width}; "
            "give the pooled output of the embeddings that the model was built on"
        )
