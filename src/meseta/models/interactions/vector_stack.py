"""Base class of Wukong and DHEN: stacked layers over vectors of equal width, and an MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from meseta.models.base import ScoringModel
from meseta.models.fields import DenseVector, common_width
from meseta.models.layers import MLP, MLPOptions, fill_linear
from meseta.sparse.shapes import Float


class VectorStack(ScoringModel):
    """Stack of layers that map vectors of width d to vectors of width d.

    X_0 = MLP(dense), e_1, ..., e_F          no MLP without dense inputs
    X_{i+1} = layer_i(X_i)
    logit = MLP(concat of the last layer's vectors)
    """

    def __init__(
        self, embeddings: nn.Module, *, num_dense: int, bottom_mlp: Sequence[int], options: MLPOptions | None
    ) -> None:
        """Create the part below the layers. `bottom_mlp` has the hidden widths of the MLP over dense inputs."""
        super().__init__(embeddings, num_dense)
        self.width = common_width(type(self).__name__, self.dims)
        self.bottom = DenseVector(num_dense, bottom_mlp, self.width, options, "bottom")
        # Number of vectors that the first layer reads.
        self.num_vectors = self.bottom.num_vectors + len(self.dims)

    def set_layers(
        self,
        num_layers: int,
        make_layer: Callable[[int, int], Any],
        *,
        top_mlp: Sequence[int],
        options: MLPOptions | None,
        seed: int,
    ) -> None:
        """Create the layers and the top MLP, and initialize all weights.

        `make_layer(index, num_vectors)` creates a layer that reads `num_vectors` vectors: a module with `num_outputs`,
        called with vectors [B, N, d] and the `BatchSlice` of the samples.
        """
        layers, num_vectors = [], self.num_vectors
        for index in range(num_layers):
            layers.append(make_layer(index, num_vectors))
            num_vectors = layers[-1].num_outputs
        self.layers = nn.ModuleList(layers)
        self.top_mlp = MLP([num_vectors * self.width, *top_mlp, 1], relu_last=False, options=options, name="top_mlp")
        # Weights from N(0, 2 / (inputs + outputs)), biases with zeros.
        fill_linear(self, seed)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Tensor:
        return cast(Tensor, self.bottom(dense, self.batch_slice))

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        fields = torch.cat([x, pooled.unflatten(1, (-1, self.width))], dim=1)
        for layer in self.layers:
            fields = layer(fields, self.batch_slice)
        return cast(Tensor, self.top_mlp(fields.flatten(1), self.batch_slice)).squeeze(1)
