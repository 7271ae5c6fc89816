"""Effects of the ids of a synthetic log, and the ids that replace others from day to day."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meseta.data.synth.columns import id_probabilities
from meseta.data.synth.worlds import SynthWorld

# Popularity rank at which the effect of an id is halved. It is proportional to 1 / (1 + rank / HEAD_IDS).
HEAD_IDS = 20.0

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def splitmix64(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each key."""
    # The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    x = keys + np.uint64(_GOLDEN_GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashed_uniforms(hashed: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return 8 uniforms with mean 0 and variance 1 per 64-bit hash [8, n], one from each byte."""
    parts = hashed.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8).T.astype(np.float32)
    return np.asarray((parts - np.float32(127.5)) * np.float32(3**0.5 / 128), np.float32)


def feature_keys(seed: int, num_sparse: int) -> NDArray[np.uint64]:
    """Return the key of each sparse feature [num_sparse]."""
    return splitmix64(np.arange(num_sparse, dtype=np.uint64) + np.uint64(seed) * np.uint64(1_000_003))


def replace_ids(
    ranks: NDArray[np.int64],
    num_replaced: NDArray[np.float64] | float,
    keys: NDArray[np.uint64],
    cardinalities: tuple[int, ...],
) -> NDArray[np.int64]:
    """Return the ids [num_sparse, n] at popularity `ranks` [num_sparse, n] after `num_replaced` [n] ids per rank.

    An id is rank + cardinality * number of earlier ids at this rank. If `num_replaced` is a fraction, this share of
    ranks has one more. The missing rank -1 is never replaced.
    """
    if not np.any(num_replaced):
        return ranks
    ids = []
    for column, key, num_ids in zip(ranks, keys, cardinalities, strict=True):
        # Ages are multiples of the golden ratio modulo 1, and therefore evenly spaced: any share of ages belongs to
        # this share of all ranks, and to about this share of consecutive ranks.
        hashed = column.view(np.uint64) * np.uint64(_GOLDEN_GAMMA) + key
        ages = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
        earlier = np.floor(ages + num_replaced).astype(np.int64)
        ids.append(np.where(column < 0, column, column + num_ids * earlier))
    return np.stack(ids)


class IdEffects:
    """Main effect and latent vector of each id, hashed from the key of its feature, so that they take no memory.

    Effects are centered and scaled by a sample of the ids of day 0. Effects of later ids have mean 0 and the same
    variance in expectation.
    """

    def __init__(
        self, keys: NDArray[np.uint64], world: SynthWorld, cardinalities: tuple[int, ...], ids: NDArray[np.int64]
    ) -> None:
        """Calibrate on `ids` [num_sparse, n], which are popularity ranks or -1 (missing)."""
        self._keys, self._cardinalities = keys, cardinalities
        self._num_effects = 1 + world.latent_dim
        num_sparse = len(ids)
        # One row per effect: the main effect, then the latent columns.
        self._offsets = np.zeros((num_sparse, self._num_effects), np.float32)
        self._scales = np.ones((num_sparse, self._num_effects), np.float32)
        self._later_scales = np.ones(num_sparse, np.float32)
        for f in range(num_sparse):
            raw = self._hashed(f, ids[f])
            variance = raw.var(axis=1)
            variance[1:] = variance[1:].mean()  # The latent vector has one scale.
            self._offsets[f] = raw.mean(axis=1)
            self._scales[f] = 1.0 / np.sqrt(np.maximum(variance, 1e-4))
            self._later_scales[f] = 1.0 / np.sqrt((_sizes(np.maximum(ids[f], 0)) ** 2).mean())
        if world.is_centered_by_distribution:
            for f in world.planted_features:
                self._center_by_distribution(f, cardinalities[f])

    def __call__(self, feature: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the main effect and latent vector of each id [1 + latent_dim, n]."""
        effects = (self._hashed(feature, ids) - self._offsets[feature][:, None]) * self._scales[feature][:, None]
        later = ids >= self._cardinalities[feature]
        if later.any():
            effects[:, later] = self._hashed(feature, ids[later]) * self._later_scales[feature]
        return effects

    def _center_by_distribution(self, feature: int, cardinality: int) -> None:
        # The latents get mean 0 and variance 1, weighted by the probabilities of all ids.
        every_id, probabilities = id_probabilities(feature, cardinality)
        latents = self._hashed(feature, every_id)[1:].astype(np.float64)
        means = latents @ probabilities
        variance = ((latents - means[:, None]) ** 2 @ probabilities).mean()
        self._offsets[feature, 1:] = means
        self._scales[feature, 1:] = 1.0 / np.sqrt(max(variance, 1e-4))

    def _hashed(self, feature: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        # The missing id -1 has effects like any other id.
        hashed = splitmix64(ids.view(np.uint64) * np.uint64(_GOLDEN_GAMMA) + self._keys[feature])
        effects = hashed_uniforms(hashed)[: self._num_effects]
        effects *= _sizes(np.maximum(ids, 0) % self._cardinalities[feature])
        return effects


def _sizes(ranks: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.float32(1.0) / (np.float32(1.0) + ranks.astype(np.float32) / np.float32(HEAD_IDS))
