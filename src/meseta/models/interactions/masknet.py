"""MaskNet: hidden layers whose inputs are multiplied by masks computed from the sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import BatchSlice
from meseta.config.models.interactions import MaskNetConfig, MaskStructure
from meseta.models.global_layers import LayerNorm
from meseta.models.layers import (
    MLP,
    FieldVectors,
    HiddenLayers,
    MLPOptions,
    ModelBuildArgs,
    ScoringModel,
    SkipInitLinear,
    check_widths,
    common_width,
    fill_linear,
)
from meseta.ops.mlp import mlp
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError


@dataclass(frozen=True, kw_only=True)
class MaskShape:
    """Shape of the MaskBlocks of a MaskNet."""

    structure: MaskStructure = "serial"
    """`serial` chains the blocks. `parallel` runs all on the input, followed by an MLP."""
    widths: Sequence[int]
    """Output width of each block."""
    reduction: float = 2.0
    """Ratio of the width of a mask's hidden layer to that of the mask."""


class MaskBlock(nn.Module):
    """Masked hidden layer ReLU(LN(W (mask(v) * x))), arXiv 2102.07619, sections 3.3 and 3.4."""

    def __init__(self, num_vectors: int, num_inputs: int, num_outputs: int, reduction: float) -> None:
        """Create the layers. v has the length `num_vectors` and x the length `num_inputs`."""
        super().__init__()
        # The hidden layer of the mask has `reduction` times the width of x.
        self.aggregation = SkipInitLinear(num_vectors, max(1, round(reduction * num_inputs)))
        self.projection = SkipInitLinear(self.aggregation.out_features, num_inputs)
        self.hidden = SkipInitLinear(num_inputs, num_outputs, bias=False)
        self.norm = LayerNorm(num_outputs)

    def forward(self, v: Float[Tensor, "B M_D"], x: Float[Tensor, "B N"]) -> Float[Tensor, "B outputs"]:
        # Instance-guided mask from all vectors v of the sample: W_d2 ReLU(W_d1 v + b_d1) + b_d2.
        guides = (self.aggregation, self.projection)
        mask = mlp(v, [guide.weight for guide in guides], [guide.bias for guide in guides], relu_last=False)
        return functional.relu(self.norm(self.hidden(mask * x)))


class MaskBlocks(HiddenLayers):
    """Serial or parallel MaskBlocks. In training, dropout follows each."""

    def __init__(self, num_vectors: int, shape: MaskShape, options: MLPOptions) -> None:
        super().__init__()
        widths, serial = shape.widths, shape.structure == "serial"
        inputs = [num_vectors, *widths[:-1]] if serial else [num_vectors] * len(widths)
        self.is_serial = serial
        self.blocks = nn.ModuleList(
            MaskBlock(num_vectors, num_inputs, width, shape.reduction)
            for num_inputs, width in zip(inputs, widths, strict=True)
        )
        # Blocks have layer norms, so batch norm applies only to the MLP.
        self.set_hidden_layers(widths, replace(options, batch_norm=False), "blocks")
        self.num_outputs = widths[-1] if serial else sum(widths)

    def forward(
        self, v: Float[Tensor, "B M_D"], x: Float[Tensor, "B M_D"], batch: BatchSlice | None
    ) -> Float[Tensor, "B outputs"]:
        """Apply all blocks. `v` has the concatenated vectors of each sample, and `x` the input of the blocks."""
        placed = self.resolve_batch_slice(batch, x)
        outputs = []
        for index, block in enumerate(self.blocks):
            outputs.append(self.apply_dropout(index, block(v, x), placed))
            if self.is_serial:
                x = outputs[-1]
        return x if self.is_serial else torch.cat(outputs, dim=1)


class MaskNet(ScoringModel):
    """MaskNet (arXiv 2102.07619, section 3).

    v = concat(x_m v_m for dense inputs, pooled rows for features), each of width D
    x = LN of every vector, with separate weights; x = v without embedding_layer_norm
    serial      logit = w . block_L(v, ... block_2(v, block_1(v, x))) + b
    parallel    logit = MLP(concat(block_1(v, x), ..., block_L(v, x)))
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        shape: MaskShape,
        deep_mlp: Sequence[int] = (),
        embedding_layer_norm: bool = True,
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model.

        Args:
            embeddings: See `ScoringModel`.
            num_dense: Number of dense inputs.
            shape: Shape of the MaskBlocks.
            deep_mlp: Hidden widths of the MLP on parallel blocks.
            embedding_layer_norm: Whether to normalize each vector before the blocks that read the input.
            options: Options of the MLP. Dropout also applies to the blocks, which compute in the type of the MLP.
            seed: Seed of the initial weights.

        Raises MesetaError if tables have different widths, a width is below 1, there are no blocks, serial blocks have
        an MLP, or batch norm has no layers to apply to.
        """
        super().__init__(embeddings, num_dense)
        check_widths("MaskNet", "blocks and deep_mlp", [*shape.widths, *deep_mlp])
        if not shape.widths:
            raise MesetaError("MaskNet: blocks must not be empty; set the width of at least one MaskBlock")
        if shape.structure == "serial" and deep_mlp:
            raise MesetaError(
                f"MaskNet: deep_mlp {list(deep_mlp)} requires structure 'parallel'; leave deep_mlp empty, or choose "
                "structure 'parallel'"
            )
        self.options = options or MLPOptions()
        if self.options.batch_norm and not deep_mlp:
            raise MesetaError(
                "MaskNet: batch_norm applies only to hidden layers of the MLP on parallel blocks, but there are none; "
                "remove batch_norm (MaskBlocks have layer norms)"
            )
        width = common_width("MaskNet", self.dims)
        self.fields = FieldVectors(num_dense, len(self.dims), width, seed)
        num_fields = self.fields.num_fields
        self.norm = LayerNorm(num_fields, width) if embedding_layer_norm else None
        self.blocks = MaskBlocks(num_fields * width, shape, self.options)
        widths = [self.blocks.num_outputs, *deep_mlp, 1]
        self.deep_mlp = MLP(widths, relu_last=False, options=self.options, name="deep_mlp")
        # Matrices from N(0, 2 / (inputs + outputs)), biases with zeros.
        fill_linear(self, seed)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Tensor:
        return cast(Tensor, self.fields(dense))

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        vectors = self.options.cast(self.fields.concat_sparse(x, pooled))
        x = vectors if self.norm is None else self.norm(vectors)
        hidden = self.blocks(vectors.flatten(1), x.flatten(1), self.batch_slice)
        return cast(Tensor, self.deep_mlp(hidden, self.batch_slice)).squeeze(1)


def make_masknet(config: MaskNetConfig, request: ModelBuildArgs) -> MaskNet:
    """Build MaskNet from its config."""
    return request.build(
        MaskNet,
        shape=MaskShape(structure=config.structure, widths=config.mask_blocks, reduction=config.mask_reduction),
        deep_mlp=config.deep_mlp,
        embedding_layer_norm=config.embedding_layer_norm,
    )
