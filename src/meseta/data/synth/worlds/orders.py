"""World `orders`: columns that correlate inside blocks, and products of three and of four, one per block."""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from meseta.data.synth.columns import split_draw
from meseta.data.synth.worlds.world import PlantedProduct, SynthWorld

BLOCKS = (tuple(range(7)), tuple(range(7, 13)), tuple(range(13, 18)), tuple(range(18, 26)))
"""The 26 sparse features, cut into blocks that are independent of each other."""
SHARED_CAUSE_SHARE = 0.75
"""Probability that the category of a column is decided by the cause of its block, and not by a draw of its own."""
TRIPLES = ((0, 9, 17), (6, 12, 23), (0, 13, 18), (9, 17, 23))
"""Each block is left out by one of them."""
QUADRUPLES = ((6, 9, 13, 18), (0, 12, 17, 23))


class HigherOrderWorld(SynthWorld):
    """Products of three and of four scalar latents, one feature per block in each.

    Features of different blocks are independent, and a latent has mean 0 under the law of its ids. So the mean of a
    product, given any columns that leave one of its blocks out, is 0: no main effect, no pair, and of a product of four
    no triple tells anything of it.
    """

    name = "orders"
    latent_dim = 1
    is_centered_by_distribution = True
    planted = tuple(
        PlantedProduct(features, (-1) ** k) for k, features in enumerate(chain[tuple[int, ...]](TRIPLES, QUADRUPLES))
    )

    def correlate(self, uniforms: NDArray[np.float64], stream: np.random.Philox) -> NDArray[np.float64]:
        """u_f = c_b with probability SHARED_CAUSE_SHARE, by a draw per row and column, and else the column's own
        uniform.

        c_b, the cause of block b in this row, is uniform, and so is u_f: the popularity of ids stays what it is. The
        uniforms of two columns of a block have a correlation of SHARED_CAUSE_SHARE ** 2; those of different blocks are
        independent.
        """
        num_rows: int = uniforms.shape[1]
        coupled = uniforms.copy()
        for block in BLOCKS:
            cause, _ = split_draw(stream.random_raw(num_rows), 0.0)
            for feature in block:
                _, caused = split_draw(stream.random_raw(num_rows), SHARED_CAUSE_SHARE)
                coupled[feature][caused] = cause[caused]
        return coupled
