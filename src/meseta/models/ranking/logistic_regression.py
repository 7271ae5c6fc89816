"""Logistic regression, the baseline for models with interactions."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from meseta.config.models.classic import LogisticRegressionConfig
from meseta.models.base import ModelBuildArgs, ScoringModel
from meseta.models.layers import SkipInitLinear
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError


class LogisticRegression(ScoringModel):
    """Sum of one weight per id (a table with embedding_dim 1), one weight per dense input, and a bias."""

    def __init__(self, embeddings: nn.Module, *, num_dense: int) -> None:
        """Create the model on `embeddings`, see `ScoringModel`. Raises MesetaError if a table has an embedding_dim
        other than 1."""
        super().__init__(embeddings, num_dense)
        for feature, dim in self.dims.items():
            if dim != 1:
                raise MesetaError(
                    f"LogisticRegression: feature {feature!r} has embedding_dim {dim}, but the model has one "
                    "weight per id; set embedding_dim=1"
                )
        self.linear = SkipInitLinear(num_dense, 1)
        # The loss is convex, so random initial weights would not help.
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.zero_()

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Float[Tensor, "B 1"]:
        return cast(Tensor, self.linear(dense))

    def logits(self, x: Float[Tensor, "B 1"], pooled: Float[Tensor, "B num_features"]) -> Float[Tensor, " B"]:
        return x.squeeze(1) + pooled.sum(dim=1)


def make_logistic_regression(config: LogisticRegressionConfig, request: ModelBuildArgs) -> LogisticRegression:
    """Build logistic regression from its config."""
    return LogisticRegression(
        request.embeddings,
        num_dense=request.num_dense,
    )
