"""GDCN: gated cross layers and an MLP."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meseta.config.models.interactions import GDCNConfig, Structure
from meseta.models.base import ModelBuildArgs
from meseta.models.cross import GatedCross
from meseta.models.interactions.deep_cross import DeepCrossModel
from meseta.models.layers import MLPOptions, check_widths


class GDCN(DeepCrossModel):
    """Gated deep and cross network (arXiv 2311.04635, section 3): a `DeepCrossModel` with a `GatedCross`.

    Structure 'stacked' is the paper's GDCN-S, and 'parallel' its GDCN-P.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        cross_layers: int,
        structure: Structure = "parallel",
        deep_mlp: Sequence[int],
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model with the arguments of `DCNv2`, except for the cross network.

        `cross_layers` is the number of gated cross layers. In the paper, `deep_mlp` is (400, 400, 400).

        Raises MesetaError if a width is below 1 or the MLP of structure 'parallel' has no layers.
        """
        check_widths("GDCN", "cross_layers", [cross_layers])
        super().__init__(
            embeddings,
            num_dense=num_dense,
            make_cross=lambda num_inputs: GatedCross(num_inputs, cross_layers),
            structure=structure,
            deep_mlp=deep_mlp,
            options=options,
            seed=seed,
        )


def make_gdcn(config: GDCNConfig, request: ModelBuildArgs) -> GDCN:
    """Build GDCN from its config."""
    return GDCN(
        request.embeddings,
        num_dense=request.num_dense,
        cross_layers=config.cross_layers,
        structure=config.structure,
        deep_mlp=config.deep_mlp,
        options=request.options,
        seed=request.seed,
    )
