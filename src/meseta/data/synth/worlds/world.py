"""What a world says of itself: how the categories of a row hang together, and which products of latents are planted."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PlantedProduct:
    """sign * sum over k of the product, over `features`, of z_f(id_f)[k]."""

    features: tuple[int, ...]
    """Sparse features, each once: f is the column cat_f of a prepared dataset."""
    sign: int
    """+1 or -1."""


class SynthWorld(ABC):
    """The law of a log: logit = bias + dense part + sum of main effects + strength * planted part.

    The first parts are the same in every world (meseta.data.synth.teacher). The planted part is the sum of `planted`,
    centred and scaled to a standard deviation of PLANTED_STD. A world has no state of its own.
    """

    name: ClassVar[str]
    planted: ClassVar[tuple[PlantedProduct, ...]]
    latent_dim: ClassVar[int]
    """Width of the latent vector z_f(id)."""
    is_centered_by_distribution: ClassVar[bool]
    """Whether latents have mean 0 and variance 1 under the law of the ids, or over a calibration sample of it."""

    def correlate(self, uniforms: NDArray[np.float64], stream: np.random.Philox) -> NDArray[np.float64]:
        """What decides the categories of rows: uniforms [26, n], each of them uniform in [0, 1) alone.

        Args:
            uniforms: [26, n], all independent.
            stream: what the chunk draws from, after all that every world draws.
        """
        return uniforms

    @property
    def planted_features(self) -> tuple[int, ...]:
        """Features that a planted product reads, in order."""
        return tuple(sorted({feature for product in self.planted for feature in product.features}))


def planted_sum(products: Sequence[PlantedProduct], latents: Mapping[int, NDArray[np.float32]]) -> NDArray[np.float32]:
    """[n] the sum of planted products of latent vectors, which are [latent_dim, n] by feature."""
    total = np.zeros(next(iter(latents.values())).shape[1], np.float32)
    for product in products:
        for factors in zip(*(latents[feature] for feature in product.features), strict=True):
            term = np.float32(product.sign) * factors[0]
            for factor in factors[1:]:
                term = term * factor
            total += term
    return total
