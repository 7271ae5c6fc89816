"""World `pairs`: independent columns, and inner products of the latent vectors of two columns."""

from __future__ import annotations

from meseta.data.synth.columns import MEDIUM_FEATURES
from meseta.data.synth.worlds.world import PlantedProduct, SynthWorld


class PairWorld(SynthWorld):
    """World with 20 inner products of latent vectors of width 4. Each of ten medium-size features is in four of
    them."""

    name = "pairs"
    latent_dim = 4
    is_centered_by_distribution = False
    planted = tuple(
        PlantedProduct((MEDIUM_FEATURES[i], MEDIUM_FEATURES[(i + step) % len(MEDIUM_FEATURES)]), sign)
        for step, sign in ((1, 1), (3, -1))
        for i in range(len(MEDIUM_FEATURES))
    )
