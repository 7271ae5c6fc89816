"""Hashed logistic regression: the baseline that a model with interactions has to beat."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meseta.jagged import KeyedJaggedTensor
from meseta.jagged.shapes import Float
from meseta.models.layers import BlankLinear, check_inputs, pooled_dims
from meseta.spec import MesetaError


class LogisticRegression(nn.Module):
    """One weight per id (a table with embedding_dim 1), one per dense input and a bias, all added up.

    The dense weights start at zero; the loss is convex, so a random start would help nothing.
    """

    def __init__(self, embeddings: nn.Module, *, num_dense: int) -> None:
        """Build on `embeddings`, a module with `tables` and `features`; all other parameters are dense.

        Raises MesetaError for a table whose embedding_dim is not 1.
        """
        super().__init__()
        dims = pooled_dims("LogisticRegression", embeddings)
        for feature, dim in dims.items():
            if dim != 1:
                raise MesetaError(
                    f"LogisticRegression: feature {feature!r} has embedding_dim {dim}, but the model has one "
                    "weight per id; set embedding_dim=1"
                )
        self.embeddings = embeddings
        self.num_dense = num_dense
        self.pooled_width = len(dims)
        self.linear = BlankLinear(num_dense, 1)
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.zero_()

    def forward(self, dense: Float[Tensor, "B num_dense"], sparse: KeyedJaggedTensor) -> Float[Tensor, " B"]:
        """Logits of the click probability; dense inputs are cast to the type of the embeddings."""
        return self.score(dense, self.embeddings(sparse).pooled.values)

    def score(
        self, dense: Float[Tensor, "B num_dense"], pooled: Float[Tensor, "B num_features"]
    ) -> Float[Tensor, " B"]:
        """Logits from embeddings that were looked up before; the part of forward that a pipeline calls by itself."""
        check_inputs("LogisticRegression", dense, pooled, self.num_dense, self.pooled_width)
        return self.linear(dense.to(pooled.dtype)).squeeze(1) + pooled.sum(dim=1)
