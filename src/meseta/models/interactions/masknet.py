"""MaskNet: hidden layers whose inputs are multiplied by masks that the sample's vectors make (arXiv 2102.07619)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import BatchSlice
from meseta.config.models.interactions import MaskNetConfig, MaskStructure
from meseta.jagged.shapes import Float
from meseta.models.base import ModelBuildArgs, ScoringModel
from meseta.models.fields import FieldVectors, common_width
from meseta.models.global_layers import LayerNorm
from meseta.models.layers import MLP, HiddenLayers, MLPOptions, SkipInitLinear, check_widths, fill_linear
from meseta.ops.mlp import mlp
from meseta.spec import MesetaError


@dataclass(frozen=True, kw_only=True)
class MaskShape:
    """What the MaskBlocks of a MaskNet are."""

    structure: MaskStructure = "serial"
    """One on the other, or side by side under an MLP."""
    widths: Sequence[int]
    """Outputs of each."""
    reduction: float = 2.0
    """Width of a mask's inner layer over that of the mask."""


class MaskBlock(nn.Module):
    """A masked hidden layer, arXiv 2102.07619, sections 3.3 and 3.4.

    mask = W_d2 ReLU(W_d1 v + b_d1) + b_d2           the instance-guided mask, of all vectors v of the sample
    block(v, x) = ReLU(LN(W (mask * x)))
    """

    def __init__(self, num_vectors: int, num_inputs: int, num_outputs: int, reduction: float) -> None:
        """v has `num_vectors` numbers, x has `num_inputs`; W_d1 has `reduction` times the latter, at least 1."""
        super().__init__()
        self.aggregation = SkipInitLinear(num_vectors, max(1, round(reduction * num_inputs)))
        self.projection = SkipInitLinear(self.aggregation.out_features, num_inputs)
        self.hidden = SkipInitLinear(num_inputs, num_outputs, bias=False)
        self.norm = LayerNorm(num_outputs)

    def forward(self, v: Float[Tensor, "B M_D"], x: Float[Tensor, "B N"]) -> Float[Tensor, "B outputs"]:
        guides = (self.aggregation, self.projection)
        mask = mlp(v, [guide.weight for guide in guides], [guide.bias for guide in guides], relu_last=False)
        return functional.relu(self.norm(self.hidden(mask * x)))


class MaskBlocks(HiddenLayers):
    """MaskBlocks one on the other, or side by side; in training, dropout behind each."""

    def __init__(self, num_vectors: int, shape: MaskShape, options: MLPOptions) -> None:
        super().__init__()
        widths, serial = shape.widths, shape.structure == "serial"
        inputs = [num_vectors, *widths[:-1]] if serial else [num_vectors] * len(widths)
        self.is_serial = serial
        self.blocks = nn.ModuleList(
            MaskBlock(num_vectors, num_inputs, width, shape.reduction)
            for num_inputs, width in zip(inputs, widths, strict=True)
        )
        self.set_hidden_layers(widths, replace(options, batch_norm=False), "blocks")
        self.num_outputs = widths[-1] if serial else sum(widths)

    def forward(
        self, v: Float[Tensor, "B M_D"], x: Float[Tensor, "B M_D"], batch: BatchSlice | None
    ) -> Float[Tensor, "B outputs"]:
        """`v` are the vectors of a sample side by side, x the same normalised."""
        placed = self.resolve_batch_slice(batch, x)
        outputs = []
        for index, block in enumerate(self.blocks):
            outputs.append(self.apply_dropout(index, block(v, x), placed))
            if self.is_serial:
                x = outputs[-1]
        return x if self.is_serial else torch.cat(outputs, dim=1)


class MaskNet(ScoringModel):
    """MaskNet, arXiv 2102.07619, section 3.

        v = x_m v_m of dense inputs, pooled rows of features, side by side; each of width D
        x = LN of every vector, with weights of its own
        serial      logit = w . block_L(v, ... block_2(v, block_1(v, x))) + b
        parallel    logit = MLP(block_1(v, x), ..., block_L(v, x) side by side)

    Matrices with n inputs and m outputs start from N(0, 2 / (m + n)), biases at zero, vectors of dense inputs from
    N(0, 0.1 squared).
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        shape: MaskShape,
        deep_mlp: Sequence[int] = (),
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Build on `embeddings`, a module with `tables` of one width and `features`.

        Args:
            embeddings: called with the sparse inputs, returns an object whose `pooled.values` is [B, F * D].
            num_dense: number of dense inputs.
            shape: of the MaskBlocks.
            deep_mlp: parallel: hidden widths of the MLP; the layer with the one output is added.
            options: dropout behind blocks and in the MLP, batch norm in the MLP alone; all compute in its type.
            seed: key of the initial weights.

        Raises MesetaError for tables of several widths, a width below 1, no block, layers on serial blocks, batch
        norm without layers for it, or a feature without pooling.
        """
        super().__init__(embeddings, num_dense)
        check_widths("MaskNet", "blocks and deep_mlp", [*shape.widths, *deep_mlp])
        if not shape.widths:
            raise MesetaError("MaskNet: blocks are empty; give the width of at least one MaskBlock")
        if shape.structure == "serial" and deep_mlp:
            raise MesetaError(
                f"MaskNet: deep_mlp {list(deep_mlp)} stands on parallel blocks alone; leave it empty, or take "
                "structure 'parallel'"
            )
        self.options = options or MLPOptions()
        if self.options.batch_norm and not deep_mlp:
            raise MesetaError(
                "MaskNet: batch_norm is for hidden layers of the MLP on parallel blocks; there are none, so that it "
                "would change nothing; MaskBlocks have layer norms: leave it out"
            )
        width = common_width("MaskNet", self.dims)
        self.fields = FieldVectors(num_dense, len(self.dims), width, seed)
        num_fields = self.fields.num_fields
        self.norm = LayerNorm(num_fields, width)
        self.blocks = MaskBlocks(num_fields * width, shape, self.options)
        widths = [self.blocks.num_outputs, *deep_mlp, 1]
        self.deep_mlp = MLP(widths, relu_last=False, options=self.options, name="deep_mlp")
        fill_linear(self, seed)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Tensor:
        """Their vectors."""
        return cast(Tensor, self.fields(dense))

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        """The logits above."""
        vectors = self.options.cast(self.fields.concat_sparse(x, pooled))
        hidden = self.blocks(vectors.flatten(1), self.norm(vectors).flatten(1), self.batch_slice)
        return cast(Tensor, self.deep_mlp(hidden, self.batch_slice)).squeeze(1)


def make_masknet(config: MaskNetConfig, request: ModelBuildArgs) -> MaskNet:
    """The model of a config."""
    return MaskNet(
        request.embeddings,
        num_dense=request.num_dense,
        shape=MaskShape(structure=config.structure, widths=config.mask_blocks, reduction=config.mask_reduction),
        deep_mlp=config.deep_mlp,
        options=request.options,
        seed=request.seed,
    )
