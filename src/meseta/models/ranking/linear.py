"""Logistic regression, the baseline for models with interactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from meseta.config.models.classic import LogisticRegressionConfig, WideDeepConfig
from meseta.models.columns import ColumnAxes, InputColumns, reading
from meseta.models.layers import (
    MLP,
    FirstOrderTerm,
    MLPOptions,
    ModelBuildArgs,
    ScoringModel,
    SkipInitLinear,
    check_widths,
    common_width,
    fill_glorot,
    split_weights,
)
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

    def column_axes(self, columns: InputColumns) -> ColumnAxes:
        """Return axes indexed by inputs."""
        return ColumnAxes({"linear.weight": (None, reading(columns.dense_labels()))}, zero_row_columns=slice(None))


def make_logistic_regression(config: LogisticRegressionConfig, request: ModelBuildArgs) -> LogisticRegression:
    """Build logistic regression from its config."""
    return LogisticRegression(
        request.embeddings,
        num_dense=request.num_dense,
    )


class WideDeep(ScoringModel):
    """Wide & Deep learning (arXiv 1606.07792, sections 3.1 to 3.3).

        logit = w_0 + sum_i w_i x_i + MLP(concat(dense, e_1, ..., e_F))

    The wide part has a weight for each dense input and each id. Crosses are ordinary features of the dataset. The row
    of an id is (e_1, ..., e_D, w), so tables have D + 1 columns. Both parts share one row optimizer, while the paper
    uses FTRL and AdaGrad.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        deep_mlp: Sequence[int],
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model on `embeddings`, whose tables must all have width D + 1 >= 2. See `ScoringModel`.

        `deep_mlp` has the hidden widths of the MLP, (1024, 512, 256) in the paper.

        Raises MesetaError if a width is invalid.
        """
        super().__init__(embeddings, num_dense)
        check_widths("WideDeep", "deep_mlp", deep_mlp)
        width = common_width("WideDeep", self.dims, min_width=2) - 1
        self.first_order = FirstOrderTerm(num_dense)
        self.deep_mlp = MLP(
            [num_dense + len(self.dims) * width, *deep_mlp, 1], relu_last=False, options=options, name="deep_mlp"
        )
        # Weights from N(0, 2 / (inputs + outputs)), biases with zeros.
        fill_glorot(self.deep_mlp, seed)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> tuple[Tensor, Tensor]:
        """Return (weighted sum of the dense inputs, dense inputs)."""
        return self.first_order(dense), dense

    def logits(self, x: tuple[Tensor, Tensor], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        vectors, weights = split_weights(pooled, len(self.dims))
        weighted, dense = x
        # Only the MLP computes in the type of `options`.
        deep = torch.cat([dense, vectors.flatten(1)], dim=1)
        return weighted + weights.sum(dim=1) + self.deep_mlp(deep, self.batch_slice).squeeze(1)

    def column_axes(self, columns: InputColumns) -> ColumnAxes:
        """Return axes indexed by inputs."""
        dense = columns.dense_labels()
        return ColumnAxes(
            {
                "first_order.dense.weight": (None, reading(dense)),
                "deep_mlp.0.weight": (None, reading([*dense, *columns.sparse_labels(num_weights=1)])),
            },
            zero_row_columns=slice(-1, None),
        )


def make_wide_deep(config: WideDeepConfig, request: ModelBuildArgs) -> WideDeep:
    """Build Wide & Deep from its config."""
    return request.build(
        WideDeep,
        deep_mlp=config.deep_mlp,
    )
