"""AutoInt: several layers of self-attention over fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from meseta.config.models.classic import AutoIntConfig
from meseta.models.layers import (
    MLP,
    FieldVectors,
    InteractingLayer,
    MLPOptions,
    ModelBuildArgs,
    ScoringModel,
    SkipInitLinear,
    check_widths,
    common_width,
    fill_glorot,
    fill_normal,
)
from meseta.sparse.shapes import Float


class AutoInt(ScoringModel):
    """AutoInt (arXiv 1810.11921, section 4), or AutoInt+ (section 5.5) if `deep_mlp` has hidden layers.

        fields e_m: x_m v_m for dense inputs, pooled rows for features
        interacting layers, one after the other
        logit = w . concat(fields) + b [+ MLP(e_1, ..., e_M)]

    Attention is computed in the type of the embeddings.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        attention: Sequence[int] = (3, 2, 32),
        deep_mlp: Sequence[int] = (),
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model on `embeddings`, see `ScoringModel`.

        `attention` is (number of layers, heads per layer, width of each head). `deep_mlp` has the hidden widths of the
        MLP. If it is empty, there is no MLP.

        Raises MesetaError if tables have different widths or a width is below 1.
        """
        super().__init__(embeddings, num_dense)
        check_widths("AutoInt", "deep_mlp", deep_mlp)
        check_widths("AutoInt", "attention", attention)
        width = common_width("AutoInt", self.dims)
        num_layers, num_heads, head_width = attention
        self.fields = FieldVectors(num_dense, len(self.dims), width, seed)
        inputs = [width] + [num_heads * head_width] * num_layers
        self.interacting = nn.ModuleList(InteractingLayer(n, num_heads, head_width) for n in inputs[:-1])
        self.head = SkipInitLinear(self.fields.num_fields * inputs[-1], 1)
        widths = [self.fields.num_fields * width, *deep_mlp, 1]
        self.deep_mlp = MLP(widths, relu_last=False, options=options, name="deep_mlp") if deep_mlp else None
        self._set_initial_weights(seed)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Tensor:
        return cast(Tensor, self.fields(dense))

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        fields = attended = torch.cat([x, pooled.view(pooled.shape[0], len(self.dims), self.fields.width)], dim=1)
        for layer in self.interacting:
            attended = layer(attended)
        logits = self.head(attended.flatten(1)).squeeze(1)
        return (
            logits if self.deep_mlp is None else logits + self.deep_mlp(fields.flatten(1), self.batch_slice).squeeze(1)
        )

    @torch.no_grad()
    def _set_initial_weights(self, seed: int) -> None:
        # Matrices from N(0, 2 / (inputs + outputs)), biases with zeros.
        for name, parameter in (*self.interacting.named_parameters(prefix="interacting"), ("head", self.head.weight)):
            fill_normal(parameter, math.sqrt(2.0 / sum(parameter.shape)), seed, name)
        self.head.bias.zero_()
        if self.deep_mlp is not None:
            fill_glorot(self.deep_mlp, seed)


def make_autoint(config: AutoIntConfig, request: ModelBuildArgs) -> AutoInt:
    """Build AutoInt from its config."""
    return request.build(
        AutoInt,
        attention=(config.attention_layers, config.attention_heads, config.attention_dim),
        deep_mlp=config.deep_mlp,
    )
