"""Hashed logistic regression: the baseline that a model with interactions has to beat."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from meseta.config.models.classic import LogisticRegressionConfig
from meseta.jagged.shapes import Float
from meseta.models.base import ModelBuildArgs, ScoringModel
from meseta.models.layers import SkipInitLinear
from meseta.spec import MesetaError


class LogisticRegression(ScoringModel):
    """One weight per id (a table with embedding_dim 1), one per dense input and a bias, all added up.

    The dense weights start at zero; the loss is convex, so a random start would help nothing.
    """

    def __init__(self, embeddings: nn.Module, *, num_dense: int) -> None:
        """Build on `embeddings`, a module with `tables` and `features`; all other parameters are dense.

        Raises MesetaError for a table whose embedding_dim is not 1.
        """
        super().__init__(embeddings, num_dense)
        for feature, dim in self.dims.items():
            if dim != 1:
                raise MesetaError(
                    f"LogisticRegression: feature {feature!r} has embedding_dim {dim}, but the model has one "
                    "weight per id; set embedding_dim=1"
                )
        self.linear = SkipInitLinear(num_dense, 1)
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.zero_()

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Float[Tensor, "B 1"]:
        """Their weighted sum, and the bias."""
        return cast(Tensor, self.linear(dense))

    def logits(self, x: Float[Tensor, "B 1"], pooled: Float[Tensor, "B num_features"]) -> Float[Tensor, " B"]:
        """The sum of all weights."""
        return x.squeeze(1) + pooled.sum(dim=1)


def make_logistic_regression(config: LogisticRegressionConfig, request: ModelBuildArgs) -> LogisticRegression:
    """The model of a config."""
    return LogisticRegression(
        request.embeddings,
        num_dense=request.num_dense,
    )
