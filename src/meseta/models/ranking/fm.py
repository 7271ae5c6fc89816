"""Factorization machine of degree 2 (Rendle, "Factorization Machines", ICDM 2010), and DeepFM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from meseta.config.models.classic import DeepFMConfig, FMConfig
from meseta.models.columns import ColumnAxes, InputColumns, initial, reading
from meseta.models.layers import (
    MLP,
    FieldVectors,
    FirstOrderTerm,
    MLPOptions,
    ModelBuildArgs,
    ScoringModel,
    check_widths,
    common_width,
    fill_glorot,
    split_weights,
)
from meseta.sparse.shapes import Float


def sum_over_pairs(vectors: Float[Tensor, "B M D"]) -> Float[Tensor, " B"]:
    """Sum the dot products of all pairs i < j in linear time: 1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2). Rendle
    2010, lemma 3.1."""
    return 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)


class FM(ScoringModel):
    """Factorization machine of degree 2 over dense inputs and features (Rendle, ICDM 2010, section III, equation 1).

        logit = w_0 + sum_i w_i x_i + sum_{i < j} <v_i, v_j> x_i x_j

    The row of an id is (v_1, ..., v_D, w), so tables have D + 1 columns. A feature with several ids contributes the
    pooled vector and weight of its bag. Pairs are formed between features, not between ids of one bag.
    """

    def __init__(self, embeddings: nn.Module, *, num_dense: int, seed: int = 0) -> None:
        """Create the model. Raises MesetaError unless all tables have the same width D + 1 >= 2. See `ScoringModel`."""
        super().__init__(embeddings, num_dense)
        width = common_width("FM", self.dims, min_width=2) - 1
        # For dense inputs, v is initialized from N(0, 0.1 squared), and w with zeros.
        self.fields = FieldVectors(num_dense, len(self.dims), width, seed)
        self.first_order = FirstOrderTerm(num_dense)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> tuple[Tensor, Tensor]:
        """Return (weighted sum of the dense inputs, their vectors)."""
        return self.first_order(dense), self.fields(dense)

    def logits(self, x: tuple[Tensor, Tensor], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        vectors, weights = split_weights(pooled, len(self.dims))
        weighted, of_dense = x
        return weighted + weights.sum(dim=1) + sum_over_pairs(torch.cat([of_dense, vectors], dim=1))

    def column_axes(self, columns: InputColumns) -> ColumnAxes:
        """Return axes indexed by inputs."""
        dense = reading(columns.dense_labels())
        parameters = {"first_order.dense.weight": (None, dense), "fields.dense_vectors": (dense, None)}
        return ColumnAxes(parameters, zero_row_columns=slice(None))


class DeepFM(FM):
    """DeepFM: sum of a factorization machine and an MLP on the same vectors (arXiv 1703.04247, section 2.1).

        logit = FM(x, v, w) + MLP(concat(x_1 v_1, ..., x_M v_M))

    Tables have D + 1 columns as for `FM`.
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

        `deep_mlp` has the hidden widths of the MLP, such as (400, 400, 400).

        Raises MesetaError if a width is invalid.
        """
        super().__init__(embeddings, num_dense=num_dense, seed=seed)
        check_widths("DeepFM", "deep_mlp", deep_mlp)
        widths = [self.fields.num_fields * self.fields.width, *deep_mlp, 1]
        self.deep_mlp = MLP(widths, relu_last=False, options=options, name="deep_mlp")
        # Weights from N(0, 2 / (inputs + outputs)), biases with zeros.
        fill_glorot(self.deep_mlp, seed)

    def logits(self, x: tuple[Tensor, Tensor], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        vectors, weights = split_weights(pooled, len(self.dims))
        weighted, of_dense = x
        # Only the MLP computes in the type of `options`.
        fields = torch.cat([of_dense, vectors], dim=1)
        shallow = weighted + weights.sum(dim=1) + sum_over_pairs(fields)
        return shallow + self.deep_mlp(fields.flatten(1), self.batch_slice).squeeze(1)

    def column_axes(self, columns: InputColumns) -> ColumnAxes:
        """Return axes indexed by inputs."""
        axes = super().column_axes(columns)
        # New vectors are zero because of the factorization machine, so the weights that read them must not be.
        fields = initial([*columns.dense_labels(self.fields.width), *columns.sparse_labels(num_weights=1)])
        return replace(axes, parameters={**axes.parameters, "deep_mlp.0.weight": (None, fields)})


def make_fm(config: FMConfig, request: ModelBuildArgs) -> FM:
    """Build FM from its config."""
    return FM(
        request.embeddings,
        num_dense=request.num_dense,
        seed=request.seed,
    )


def make_deepfm(config: DeepFMConfig, request: ModelBuildArgs) -> DeepFM:
    """Build DeepFM from its config."""
    return request.build(
        DeepFM,
        deep_mlp=config.deep_mlp,
    )
