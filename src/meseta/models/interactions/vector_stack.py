"""Layers over vectors of one width, one on the other, and an MLP: what Wukong and DHEN have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from meseta.jagged.shapes import Float
from meseta.models.base import ScoringModel
from meseta.models.fields import DenseVector, common_width
from meseta.models.layers import MLP, MLPOptions, fill_linear


class VectorStack(ScoringModel):
    """Layers that make vectors of vectors, all of one width d.

        X_0 = MLP(dense), e_1, ..., e_F          no MLP where there are no dense inputs
        X_{i+1} = layer_i(X_i)
        logit = MLP(vectors of the last layer side by side)

    Matrices with n inputs and m outputs start from N(0, 2 / (m + n)), biases at zero.
    """

    def __init__(
        self, embeddings: nn.Module, *, num_dense: int, bottom_mlp: Sequence[int], options: MLPOptions | None
    ) -> None:
        """All below the layers, which `set_layers` puts on it; for the arguments see the models."""
        super().__init__(embeddings, num_dense)
        self.width = common_width(type(self).__name__, self.dims)
        self.bottom = DenseVector(num_dense, bottom_mlp, self.width, options, "bottom")
        self.num_vectors = self.bottom.num_vectors + len(self.dims)
        """That the first layer reads."""

    def set_layers(
        self,
        num_layers: int,
        make_layer: Callable[[int, int], Any],
        *,
        top_mlp: Sequence[int],
        options: MLPOptions | None,
        seed: int,
    ) -> None:
        """`make_layer` makes a layer of its number and of how many vectors it reads: a module with `num_outputs`,
        called with vectors [B, N, d] and with where the samples lie."""
        layers, num_vectors = [], self.num_vectors
        for index in range(num_layers):
            layers.append(make_layer(index, num_vectors))
            num_vectors = layers[-1].num_outputs
        self.layers = nn.ModuleList(layers)
        self.top_mlp = MLP([num_vectors * self.width, *top_mlp, 1], relu_last=False, options=options, name="top_mlp")
        fill_linear(self, seed)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Tensor:
        """Their vector."""
        return cast(Tensor, self.bottom(dense, self.batch_slice))

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        """The logits above."""
        fields = torch.cat([x, pooled.unflatten(1, (-1, self.width))], dim=1)
        for layer in self.layers:
            fields = layer(fields, self.batch_slice)
        return cast(Tensor, self.top_mlp(fields.flatten(1), self.batch_slice)).squeeze(1)
