"""DCN-V2: cross layers with matrices of full rank, of low rank, or mixtures of them, and an MLP (arXiv 2008.13535)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meseta.config.models.interactions import DCNv2Config, Structure
from meseta.models.base import ModelBuildArgs
from meseta.models.cross import CrossShape, MixtureCross, make_cross
from meseta.models.interactions.deep_cross import DeepCrossModel
from meseta.models.layers import MLPOptions


class DCNv2(DeepCrossModel):
    """DCN-V2, arXiv 2008.13535, section 3.

        x_0 = dense, e_1, ..., e_F side by side
        x_{l+1} = x_0 * (W_l x_l + b_l) + x_l                  or of low rank, or a mixture of experts, see `CrossShape`
        logit = MLP(x_L), or w . (x_L, MLP(x_0)) + b           stacked, and parallel

    Matrices with n inputs and m outputs start from N(0, 2 / (m + n)), biases at zero.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        cross: CrossShape,
        structure: Structure = "stacked",
        deep_mlp: Sequence[int],
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Build on `embeddings`, a module with `tables` and `features`; widths of tables may differ.

        Args:
            embeddings: called with the sparse inputs, returns an object whose `pooled.values` is [B, sum of D_f].
            num_dense: number of dense inputs.
            cross: the cross network.
            structure: the MLP on the cross network, or beside it.
            deep_mlp: hidden widths of the MLP, for example (768, 768); stacked, the layer with the one output is added.
            options: of the MLP; cross layers compute in the type of its activations.
            seed: key of the initial weights.

        Raises MesetaError for a width below 1, no MLP to stand beside, or a feature without pooling.
        """
        cross.check("DCNv2")
        super().__init__(
            embeddings,
            num_dense=num_dense,
            make_cross=lambda num_inputs: make_cross(num_inputs, cross),
            structure=structure,
            deep_mlp=deep_mlp,
            options=options,
            seed=seed,
        )
        if isinstance(self.cross, MixtureCross):
            self.cross.fill_inner(seed, "cross")


def make_dcnv2(config: DCNv2Config, request: ModelBuildArgs) -> DCNv2:
    """The model of a config."""
    cross = CrossShape(
        kind=config.cross,
        num_layers=config.cross_layers,
        low_rank=config.cross_low_rank,
        num_experts=config.cross_experts,
        activation=config.cross_activation,
    )
    return DCNv2(
        request.embeddings,
        num_dense=request.num_dense,
        cross=cross,
        structure=config.structure,
        deep_mlp=config.deep_mlp,
        options=request.options,
        seed=request.seed,
    )
