"""Base class of worlds: the correlation of categories within a row, and the planted products of latents."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from meseta.data.synth.columns import MEDIUM_FEATURES, split_draw
from meseta.errors import check_choice


@dataclass(frozen=True)
class PlantedProduct:
    """Term of the logit: sign * sum over k of the product of z_f(id_f)[k] over all `features` f."""

    features: tuple[int, ...]
    """Distinct sparse features. Feature f is column cat_f of a prepared dataset."""
    sign: int


class SynthWorld(ABC):
    """Stateless distribution of clicks: logit = bias + dense part + sum of main effects + strength * planted part.

    All parts except the planted one are the same in all worlds (see `meseta.data.synth.teacher`). The planted part is
    the sum of `planted`, centered and scaled to a standard deviation of `PLANTED_STD`.
    """

    name: ClassVar[str]
    planted: ClassVar[tuple[PlantedProduct, ...]]
    latent_dim: ClassVar[int]
    is_centered_by_distribution: ClassVar[bool]
    """Whether latents have mean 0 and variance 1 over the distribution of ids. Otherwise over a calibration sample."""

    def correlate(self, uniforms: NDArray[np.float64], stream: np.random.Philox) -> NDArray[np.float64]:
        """Return correlated uniforms [26, n], which determine the categories of rows. Each is uniform in [0, 1).

        Args:
            uniforms: Independent uniforms [26, n].
            stream: Random stream of the chunk. All draws common to all worlds have been made.
        """
        return uniforms

    @property
    def planted_features(self) -> tuple[int, ...]:
        """Distinct features of all planted products, in ascending order."""
        return tuple(sorted({feature for product in self.planted for feature in product.features}))


def planted_sum(products: Sequence[PlantedProduct], latents: Mapping[int, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the sum of planted products [n]. `latents` are latent vectors [latent_dim, n] by feature."""
    total = np.zeros(next(iter(latents.values())).shape[1], np.float32)
    for product in products:
        for factors in zip(*(latents[feature] for feature in product.features), strict=True):
            term = np.float32(product.sign) * factors[0]
            for factor in factors[1:]:
                term = term * factor
            total += term
    return total


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


# Worlds by name. To add one, add a module to this folder, a line here, and its formula to docs/data_synth.md.
WORLDS: dict[str, SynthWorld] = {world.name: world for world in (PairWorld(), HigherOrderWorld())}


def find_world(name: str) -> SynthWorld:
    """Return the world called `name`. Raises MesetaError if there is none, and suggests the closest name."""
    check_choice("data synth", "world", name, WORLDS)
    return WORLDS[name]
