"""World `pairs`: independent columns, and inner products of latent vectors between two of them."""

from __future__ import annotations

from meseta.data.synth.columns import MIDDLE
from meseta.data.synth.worlds.world import PlantedProduct, SynthWorld


class PairWorld(SynthWorld):
    """20 inner products of latent vectors of 4 numbers, each of ten features of middling size in four of them."""

    name = "pairs"
    latent_dim = 4
    centred_by_law = False
    planted = tuple(
        PlantedProduct((MIDDLE[i], MIDDLE[(i + step) % len(MIDDLE)]), sign)
        for step, sign in ((1, 1), (3, -1))
        for i in range(len(MIDDLE))
    )
