"""FinalNet: layers that multiply two linear functions of their inputs (Zhu et al., SIGIR 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import BatchSlice
from meseta.config.models.interactions import FinalNetConfig, Residual
from meseta.jagged.shapes import Float
from meseta.models.base import DenseActivations, ModelBuildArgs, ScoringModel
from meseta.models.fields import FieldMixer, FieldVectors, common_width
from meseta.models.layers import HiddenLayers, MLPOptions, SkipInitLinear, check_widths, fill_linear
from meseta.ops.sums import add_product
from meseta.spec import MesetaError

MUTUAL_LOSS_TERMS = ("first_block", "second_block")
"""Names of the terms of the mutual loss."""


@dataclass(frozen=True, kw_only=True)
class FinalShape:
    """What a FinalNet is made of, beside the widths of its blocks."""

    residual: Residual = "concat"
    """How a layer's linear function and its product stand together: halves side by side, or added."""
    relu: bool = True
    """Whether a layer ends with ReLU, as in the authors' runs."""
    field_gate: bool = True
    """Whether the first block reads gated fields beside the fields."""
    mutual_loss: bool = True
    """Whether each of two blocks also learns what both say together."""


class FinalBlock(HiddenLayers):
    """Factorized interaction layers: of a = W_1 x + b_1 and g = W_2 x + b_2 the outputs a and a * g, side by side
    ('concat') or added ('sum'); then batch norm, ReLU if asked for, and dropout. Each layer doubles the degree."""

    def __init__(
        self, num_inputs: int, widths: Sequence[int], *, shape: FinalShape, options: MLPOptions, name: str
    ) -> None:
        """`widths` are the outputs of the layers, even for 'concat'."""
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(
            SkipInitLinear(before, width if shape.residual == "concat" else 2 * width)
            for before, width in zip([num_inputs, *widths], widths, strict=False)
        )
        self.head = SkipInitLinear(widths[-1], 1)
        self.set_hidden_layers(widths, options, name)

    def extra_repr(self) -> str:
        """Shown with the module."""
        return f"residual={self.shape.residual}, relu={self.shape.relu}"

    def forward(self, x: Float[Tensor, "B N"], batch: BatchSlice | None) -> Float[Tensor, " B"]:
        """The block's logit, w . (outputs of the last layer) + b."""
        placed = self.resolve_batch_slice(batch, x)
        for index, layer in enumerate(self.layers):
            a, g = layer(x).chunk(2, dim=1)
            x = torch.cat([a, a * g], dim=1) if self.shape.residual == "concat" else add_product(a, a, g)
            x = self.normalize(index, x, placed)
            x = self.apply_dropout(index, functional.relu(x) if self.shape.relu else x, placed)
        return cast(Tensor, self.head(x.to(self.head.weight.dtype))).squeeze(1)


class FieldGate(nn.Module):
    """The vectors e_m, and beside them e_m * g_m with g = W e + b over fields, element by element of the vectors.

    W starts at zero and b at one.
    """

    def __init__(self, num_fields: int) -> None:
        super().__init__()
        self.gates = FieldMixer(num_fields, num_fields, bias=True)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B two_M D"]:
        return torch.cat([fields, fields * self.gates(fields)], dim=1)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set the initial weights."""
        self.gates.linear.weight.zero_()
        self.gates.linear.bias.fill_(1.0)


class FinalNet(ScoringModel):
    """FinalNet, Zhu et al., "FINAL: Factorized Interaction Layer for CTR Prediction", SIGIR 2023.

        e = x_m v_m of dense inputs, pooled rows of features; each of width D
        one block      logit = block_1(e, or its gated fields)
        two blocks     logit = (block_1(e, or its gated fields) + block_2(e)) / 2

    With two blocks the loss of a sample is L(y, p) + L(p, p_1) + L(p, p_2), the mutual loss: L is the cross-entropy,
    p_b what block b says and p what both say together, without a gradient in the last two. Matrices with n inputs and m
    outputs start from N(0, 2 / (m + n)), biases at zero, vectors of dense inputs from N(0, 0.1 squared).
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        blocks: Sequence[Sequence[int]],
        shape: FinalShape,
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Build on `embeddings`, a module with `tables` of one width and `features`.

        Args:
            embeddings: called with the sparse inputs, returns an object whose `pooled.values` is [B, F * D].
            num_dense: number of dense inputs.
            blocks: widths of the layers of one block, or of two.
            shape: all else.
            options: of the blocks.
            seed: key of the initial weights.

        Raises MesetaError for tables of several widths, another number of blocks, a block without layers, a width
        below 1, or an odd one under 'concat', or a feature without pooling.
        """
        super().__init__(embeddings, num_dense)
        if len(blocks) not in (1, 2) or not all(blocks):
            raise MesetaError(f"FinalNet: blocks {[list(b) for b in blocks]}; give the layers of one block, or of two")
        for widths in blocks:
            check_widths("FinalNet", "blocks", widths)
            for width in widths:
                if shape.residual == "concat" and width % 2:
                    raise MesetaError(
                        f"FinalNet: a layer of {width} outputs in blocks {[list(b) for b in blocks]}; residual "
                        "'concat' puts two halves together: make it even, or take residual 'sum'"
                    )
        self.options = options or MLPOptions()
        width = common_width("FinalNet", self.dims)
        self.fields = FieldVectors(num_dense, len(self.dims), width, seed)
        self.field_gate = FieldGate(self.fields.num_fields) if shape.field_gate else None
        num_inputs = self.fields.num_fields * width
        self.blocks = nn.ModuleList(
            FinalBlock(
                2 * num_inputs if shape.field_gate and index == 0 else num_inputs,
                widths,
                shape=shape,
                options=self.options,
                name=f"blocks.{index}",
            )
            for index, widths in enumerate(blocks)
        )
        self.loss_terms = MUTUAL_LOSS_TERMS if shape.mutual_loss and len(blocks) > 1 else ()
        fill_linear(self, seed)
        if self.field_gate is not None:
            self.field_gate.init_weights()

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Tensor:
        """Their vectors."""
        return cast(Tensor, self.fields(dense))

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        """The mean of what the blocks say."""
        return self.block_logits(x, pooled).mean(dim=1)

    def score_with_losses(
        self, dense: Float[Tensor, "B num_dense"] | DenseActivations, pooled: Float[Tensor, "B sum_of_D"], label: Tensor
    ) -> tuple[Float[Tensor, " B"], dict[str, Float[Tensor, " B"]]]:
        """What `score` returns, and the terms of the mutual loss, which need no label."""
        of_blocks = self.block_logits(self.resolve_dense(dense, pooled), pooled)
        logits = of_blocks.mean(dim=1)
        together = logits.detach().sigmoid()
        return logits, {
            term: functional.binary_cross_entropy_with_logits(said, together, reduction="none")
            for term, said in zip(self.loss_terms, of_blocks.unbind(dim=1), strict=False)
        }

    def block_logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, "B blocks"]:
        """The logit of each block, of what `of_dense` has returned."""
        fields = self.options.cast(self.fields.concat_sparse(x, pooled))
        inputs = [fields if self.field_gate is None else self.field_gate(fields), fields]
        return torch.stack(
            [block(e.flatten(1), self.batch_slice) for block, e in zip(self.blocks, inputs, strict=False)], dim=1
        )


def make_final(config: FinalNetConfig, request: ModelBuildArgs) -> FinalNet:
    """The model of a config."""
    return FinalNet(
        request.embeddings,
        num_dense=request.num_dense,
        blocks=[block for block in (config.first_block, config.second_block) if block],
        shape=FinalShape(
            residual=config.residual,
            relu=config.block_relu,
            field_gate=config.field_gate,
            mutual_loss=config.mutual_loss,
        ),
        options=request.options,
        seed=request.seed,
    )
