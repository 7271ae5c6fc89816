"""Factorization machine of degree 2 (Rendle, "Factorization Machines", ICDM 2010), and DeepFM (arXiv 1703.04247)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meseta.config.models.classic import DeepFMConfig, FMConfig
from meseta.jagged.shapes import Float
from meseta.models.base import ModelBuildArgs, ScoringModel
from meseta.models.fields import FieldVectors, FirstOrderTerm, common_width, split_weights
from meseta.models.layers import MLP, MLPOptions, check_widths, fill_glorot


def sum_over_pairs(vectors: Float[Tensor, "B M D"]) -> Float[Tensor, " B"]:
    """The dot products of all pairs i < j, added up in linear time: 1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2).

    Rendle 2010, lemma 3.1.
    """
    return 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)


class FM(ScoringModel):
    """Factorization machine of degree 2, Rendle, ICDM 2010, section III, equation 1.

        logit = w_0 + sum_i w_i x_i + sum_{i < j} <v_i, v_j> x_i x_j

    over dense inputs and features. The row of an id is (v_1, ..., v_D, w): tables have D + 1 columns. A feature with
    several ids enters with the pooled vector and the pooled weight of its bag, so that pairs are pairs of features; two
    ids of one bag form none. The w of dense inputs start at zero, their v from N(0, 0.1 squared).
    """

    def __init__(self, embeddings: nn.Module, *, num_dense: int, seed: int = 0) -> None:
        """Build on `embeddings`, a module with `tables` of one width D + 1 >= 2 and `features`.

        Raises MesetaError for tables of other widths and for a feature without pooling.
        """
        super().__init__(embeddings, num_dense)
        width = common_width("FM", self.dims, min_width=2) - 1
        self.fields = FieldVectors(num_dense, len(self.dims), width, seed)
        self.first_order = FirstOrderTerm(num_dense)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> tuple[Tensor, Tensor]:
        """Their weighted sum, and their vectors."""
        return self.first_order(dense), self.fields(dense)

    def logits(self, x: tuple[Tensor, Tensor], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        """The sum above."""
        vectors, weights = split_weights(pooled, len(self.dims))
        weighted, of_dense = x
        return weighted + weights.sum(dim=1) + sum_over_pairs(torch.cat([of_dense, vectors], dim=1))


class DeepFM(FM):
    """DeepFM, arXiv 1703.04247, section 2.1: a factorization machine and an MLP on the same vectors, added up.

        logit = FM(x, v, w) + MLP(x_1 v_1, ..., x_M v_M side by side)

    Tables have D + 1 columns as for FM. Weights of an MLP's layer start from N(0, 2 / (inputs + outputs)), its biases
    at zero; the rest as in FM.
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
        """Build on `embeddings`, a module with `tables` of one width D + 1 >= 2 and `features`.

        `deep_mlp` are the hidden widths, for example (400, 400, 400); the layer with the one output is added. Raises
        MesetaError for tables of other widths, a feature without pooling, or a width below 1.
        """
        super().__init__(embeddings, num_dense=num_dense, seed=seed)
        check_widths("DeepFM", "deep_mlp", deep_mlp)
        widths = [self.fields.num_fields * self.fields.width, *deep_mlp, 1]
        self.deep_mlp = MLP(widths, relu_last=False, options=options, name="deep_mlp")
        fill_glorot(self.deep_mlp, seed)

    def logits(self, x: tuple[Tensor, Tensor], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        """The sum above; the MLP in the type of `options`, the rest in that of the embeddings."""
        vectors, weights = split_weights(pooled, len(self.dims))
        weighted, of_dense = x
        fields = torch.cat([of_dense, vectors], dim=1)
        shallow = weighted + weights.sum(dim=1) + sum_over_pairs(fields)
        return shallow + self.deep_mlp(fields.flatten(1), self.batch_slice).squeeze(1)


def make_fm(config: FMConfig, request: ModelBuildArgs) -> FM:
    """The model of a config."""
    return FM(
        request.embeddings,
        num_dense=request.num_dense,
        seed=request.seed,
    )


def make_deepfm(config: DeepFMConfig, request: ModelBuildArgs) -> DeepFM:
    """The model of a config."""
    return DeepFM(
        request.embeddings,
        num_dense=request.num_dense,
        deep_mlp=config.deep_mlp,
        options=request.options,
        seed=request.seed,
    )
