"""FinalNet: layers that multiply two linear functions of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import BatchSlice
from meseta.config.models.interactions import FinalNetConfig, Residual
from meseta.models.layers import (
    DenseActivations,
    FieldMixer,
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
from meseta.ops.common import add_product
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError

MUTUAL_LOSS_TERMS = ("first_block", "second_block")


@dataclass(frozen=True, kw_only=True)
class FinalShape:
    """Shape of a FinalNet, without the widths of its blocks."""

    residual: Residual = "concat"
    """Combination of a layer's linear function a and its product a * g: concatenated halves, or a sum."""
    relu: bool = True
    """Whether layers end with ReLU, as in the authors' experiments."""
    field_gate: bool = True
    """Whether the first block reads gated fields in addition to the fields."""
    mutual_loss: bool = True
    """Whether each of two blocks also learns the prediction of both together."""


class FinalBlock(HiddenLayers):
    """Factorized interaction layers. Each layer doubles the degree."""

    def __init__(
        self, num_inputs: int, widths: Sequence[int], *, shape: FinalShape, options: MLPOptions, name: str
    ) -> None:
        """Create the layers with output widths `widths`, which must be even for residual 'concat'."""
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(
            SkipInitLinear(before, width if shape.residual == "concat" else 2 * width)
            for before, width in zip([num_inputs, *widths], widths, strict=False)
        )
        self.head = SkipInitLinear(widths[-1], 1)
        self.set_hidden_layers(widths, options, name)

    def extra_repr(self) -> str:
        return f"residual={self.shape.residual}, relu={self.shape.relu}"

    def forward(self, x: Float[Tensor, "B N"], batch: BatchSlice | None) -> Float[Tensor, " B"]:
        """Return the logit of the block, w . (output of the last layer) + b."""
        placed = self.resolve_batch_slice(batch, x)
        for index, layer in enumerate(self.layers):
            # a = W_1 x + b_1, g = W_2 x + b_2. Batch norm, optional ReLU and dropout follow.
            a, g = layer(x).chunk(2, dim=1)
            x = torch.cat([a, a * g], dim=1) if self.shape.residual == "concat" else add_product(a, a, g)
            x = self.normalize(index, x, placed)
            x = self.apply_dropout(index, functional.relu(x) if self.shape.relu else x, placed)
        return cast(Tensor, self.head(x.to(self.head.weight.dtype))).squeeze(1)


class FieldGate(nn.Module):
    """Concatenates the vectors e_m with e_m * g_m, where g = W e + b over fields, element by element of the vectors."""

    def __init__(self, num_fields: int) -> None:
        super().__init__()
        self.gates = FieldMixer(num_fields, num_fields, bias=True)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B two_M D"]:
        return torch.cat([fields, fields * self.gates(fields)], dim=1)

    @torch.no_grad()
    def init_weights(self) -> None:
        # Gates of 1: W = 0, b = 1.
        self.gates.linear.weight.zero_()
        self.gates.linear.bias.fill_(1.0)


class FinalNet(ScoringModel):
    """FinalNet (Zhu et al., "FINAL: Factorized Interaction Layer for CTR Prediction", SIGIR 2023).

        e = x_m v_m for dense inputs, pooled rows for features, each of width D
        one block      logit = block_1(e, or its gated fields)
        two blocks     logit = (block_1(e, or its gated fields) + block_2(e)) / 2

    With two blocks, the loss of a sample is L(y, p) + L(p, p_1) + L(p, p_2), the mutual loss. L is the cross-entropy,
    p_b the prediction of block b, and p that of both blocks, through which the last two terms have no gradient.
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
        """Create the model on `embeddings`, see `ScoringModel`. `blocks` has the layer widths of one or two blocks.

        Raises MesetaError if tables have different widths, there are not one or two blocks, a block has no layers, or a
        width is below 1 or odd with residual 'concat'.
        """
        super().__init__(embeddings, num_dense)
        if len(blocks) not in (1, 2) or not all(blocks):
            raise MesetaError(
                f"FinalNet: blocks must have the layer widths of one or two blocks, got {[list(b) for b in blocks]}"
            )
        for widths in blocks:
            check_widths("FinalNet", "blocks", widths)
            for width in widths:
                if shape.residual == "concat" and width % 2:
                    raise MesetaError(
                        f"FinalNet: layer widths must be even for residual 'concat', got {width} in blocks "
                        f"{[list(b) for b in blocks]}; change the width, or choose residual 'sum'"
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
        # Matrices from N(0, 2 / (inputs + outputs)), biases with zeros.
        fill_linear(self, seed)
        if self.field_gate is not None:
            self.field_gate.init_weights()

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Tensor:
        return cast(Tensor, self.fields(dense))

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        return self.block_logits(x, pooled).mean(dim=1)

    def score_with_losses(
        self, dense: Float[Tensor, "B num_dense"] | DenseActivations, pooled: Float[Tensor, "B sum_of_D"], label: Tensor
    ) -> tuple[Float[Tensor, " B"], dict[str, Float[Tensor, " B"]]]:
        """Return (result of `score`, terms of the mutual loss by name). The label is not used."""
        of_blocks = self.block_logits(self.resolve_dense(dense, pooled), pooled)
        logits = of_blocks.mean(dim=1)
        together = logits.detach().sigmoid()
        return logits, {
            term: functional.binary_cross_entropy_with_logits(said, together, reduction="none")
            for term, said in zip(self.loss_terms, of_blocks.unbind(dim=1), strict=False)
        }

    def block_logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, "B blocks"]:
        """Return the logit of each block. `x` is the result of `encode_dense`."""
        fields = self.options.cast(self.fields.concat_sparse(x, pooled))
        inputs = [fields if self.field_gate is None else self.field_gate(fields), fields]
        return torch.stack(
            [block(e.flatten(1), self.batch_slice) for block, e in zip(self.blocks, inputs, strict=False)], dim=1
        )


def make_final(config: FinalNetConfig, request: ModelBuildArgs) -> FinalNet:
    """Build FinalNet from its config."""
    return request.build(
        FinalNet,
        blocks=[block for block in (config.first_block, config.second_block) if block],
        shape=FinalShape(
            residual=config.residual,
            relu=config.block_relu,
            field_gate=config.field_gate,
            mutual_loss=config.mutual_loss,
        ),
    )
