"""World `orders`: columns that correlate within blocks, and products of three and four latents, one per block."""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from meseta.data.synth.columns import split_draw
from meseta.data.synth.worlds.world import PlantedProduct, SynthWorld

# Blocks of the 26 sparse features. Different blocks are independent.
BLOCKS = (tuple(range(7)), tuple(range(7, 13)), tuple(range(13, 18)), tuple(range(18, 26)))
# Probability that the shared cause of a block determines the category of a column, instead of an independent draw.
SHARED_CAUSE_SHARE = 0.75
# Features of the products of three. Each product leaves out one block, and each block is left out once.
TRIPLES = ((0, 9, 17), (6, 12, 23), (0, 13, 18), (9, 17, 23))
QUADRUPLES = ((6, 9, 13, 18), (0, 12, 17, 23))


class HigherOrderWorld(SynthWorld):
    """World with products of three and of four scalar latents, each from features of different blocks.

    Different blocks are independent, and a latent has mean 0 over the distribution of its ids. So the mean of a product
    is 0 given any columns that exclude one of its blocks. Main effects and pairs carry no information about a product,
    and neither do triples about a product of four.
    """

    name = "orders"
    latent_dim = 1
    is_centered_by_distribution = True
    planted = tuple(
        PlantedProduct(features, (-1) ** k) for k, features in enumerate(chain[tuple[int, ...]](TRIPLES, QUADRUPLES))
    )

    def correlate(self, uniforms: NDArray[np.float64], stream: np.random.Philox) -> NDArray[np.float64]:
        """Return uniforms that share a cause within a block. With probability `SHARED_CAUSE_SHARE` per row and column,
        the uniform of a column is replaced by the uniform cause of its block."""
        # The popularity of ids does not change, because u_f is uniform too. The uniforms of two columns of a block have
        # a correlation of SHARED_CAUSE_SHARE ** 2.
        num_rows: int = uniforms.shape[1]
        coupled = uniforms.copy()
        for block in BLOCKS:
            cause, _ = split_draw(stream.random_raw(num_rows), 0.0)
            for feature in block:
                _, caused = split_draw(stream.random_raw(num_rows), SHARED_CAUSE_SHARE)
                coupled[feature][caused] = cause[caused]
        return coupled
