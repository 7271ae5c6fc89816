"""Wide & Deep: a linear model and an MLP, trained together (arXiv 1606.07792)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meseta.config.models.classic import WideDeepConfig
from meseta.jagged.shapes import Float
from meseta.models.base import ModelBuildArgs, ScoringModel
from meseta.models.fields import FirstOrderTerm, common_width, split_weights
from meseta.models.layers import MLP, MLPOptions, check_widths, fill_glorot


class WideDeep(ScoringModel):
    """Wide & Deep learning, arXiv 1606.07792, sections 3.1 to 3.3.

        logit = w_0 + sum_i w_i x_i + MLP(dense, e_1, ..., e_F side by side)

    The wide part weighs every dense input and every id; crossed columns of the dataset are features like others. The
    row of an id is (e_1, ..., e_D, w): tables have D + 1 columns, and one row optimizer for both parts, where the paper
    has FTRL and AdaGrad. Weights of an MLP's layer start from N(0, 2 / (inputs + outputs)), all biases and the w of
    dense inputs at zero.
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

        `deep_mlp` are the hidden widths, (1024, 512, 256) in the paper; the layer with the one output is added. Raises
        MesetaError for tables of other widths, a feature without pooling, or a width below 1.
        """
        super().__init__(embeddings, num_dense)
        check_widths("WideDeep", "deep_mlp", deep_mlp)
        width = common_width("WideDeep", self.dims, min_width=2) - 1
        self.first_order = FirstOrderTerm(num_dense)
        self.deep_mlp = MLP(
            [num_dense + len(self.dims) * width, *deep_mlp, 1], relu_last=False, options=options, name="deep_mlp"
        )
        fill_glorot(self.deep_mlp, seed)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> tuple[Tensor, Tensor]:
        """Their weighted sum, and they themselves."""
        return self.first_order(dense), dense

    def logits(self, x: tuple[Tensor, Tensor], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        """The sum above; the MLP in the type of `options`, the rest in that of the embeddings."""
        vectors, weights = split_weights(pooled, len(self.dims))
        weighted, dense = x
        deep = torch.cat([dense, vectors.flatten(1)], dim=1)
        return weighted + weights.sum(dim=1) + self.deep_mlp(deep, self.batch_slice).squeeze(1)


def make_wide_deep(config: WideDeepConfig, request: ModelBuildArgs) -> WideDeep:
    """The model of a config."""
    return WideDeep(
        request.embeddings,
        num_dense=request.num_dense,
        deep_mlp=config.deep_mlp,
        options=request.options,
        seed=request.seed,
    )
