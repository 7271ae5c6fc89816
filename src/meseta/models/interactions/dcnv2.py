"""DCN-V2: cross layers with full-rank or low-rank matrices or mixtures of experts, and an MLP."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meseta.config.models.interactions import DCNv2Config, Structure
from meseta.models.base import ModelBuildArgs
from meseta.models.cross import CrossShape, MixtureCross, make_cross
from meseta.models.interactions.deep_cross import DeepCrossModel
from meseta.models.layers import MLPOptions


class DCNv2(DeepCrossModel):
    """DCN-V2 (arXiv 2008.13535, section 3): a `DeepCrossModel` whose cross network has one of the kinds of
    `CrossShape`."""

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
        """Create the model.

        Args:
            embeddings: See `ScoringModel`.
            num_dense: Number of dense inputs.
            cross: Shape of the cross network.
            structure: `stacked` runs the MLP on the output of the cross network, `parallel` runs both on the input.
            deep_mlp: Hidden widths of the MLP, such as (768, 768). A stacked MLP also has an output layer of width 1.
            options: Options of the MLP. Cross layers compute in the type of its activations.
            seed: Seed of the initial weights.

        Raises MesetaError if a width is below 1 or the MLP of structure 'parallel' has no layers.
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
    """Build DCN-V2 from its config."""
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
