"""Base class of worlds: the correlation of categories within a row, and the planted products of latents."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PlantedProduct:
    """Term of the logit: sign * sum over k of the product of z_f(id_f)[k] over all `features` f."""

    features: tuple[int, ...]
    """Distinct sparse features. Feature f is column cat_f of a prepared dataset."""
    sign: int
    """Sign of the term, +1 or -1."""


class SynthWorld(ABC):
    """Stateless distribution of clicks: logit = bias + dense part + sum of main effects + strength * planted part.

    All parts except the planted one are the same in all worlds (see `meseta.data.synth.teacher`). The planted part is
    the sum of `planted`, centered and scaled to a standard deviation of `PLANTED_STD`.
    """

    name: ClassVar[str]
    planted: ClassVar[tuple[PlantedProduct, ...]]
    latent_dim: ClassVar[int]
    """Width of the latent vector z_f(id)."""
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
