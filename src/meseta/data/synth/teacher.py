"""Teacher of a synthetic click log: true click probabilities, and the best possible AUC and NE."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meseta.data.synth.columns import id_probabilities
from meseta.data.synth.worlds import SynthWorld, planted_sum

# Step of true logits. Counting labels per multiple of it gives an exact AUC in bounded memory.
LOGIT_STEP = 2.0**-12
# Largest absolute value of true logits. Larger ones are clipped.
MAX_LOGIT = 16.0
NUM_BINS = int(2 * MAX_LOGIT / LOGIT_STEP) + 1

# Pairs of dense features whose products are part of the logit.
DENSE_PRODUCTS = ((0, 4), (2, 6), (5, 12), (7, 10))

# Standard deviations of the three parts of the logit at strength 1.
DENSE_STD, MAIN_STD, PLANTED_STD = 0.65, 0.85, 1.15
CLICK_RATE = 0.25
# Popularity rank at which the effect of an id is halved. It is proportional to 1 / (1 + rank / HEAD_IDS).
HEAD_IDS = 20.0

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def sigmoid(logit: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(-logit)) in float64."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(logit, np.float64))))


PROBABILITIES: NDArray[np.float64] = sigmoid((np.arange(NUM_BINS) - NUM_BINS // 2) * LOGIT_STEP)
"""True click probability of each logit bin [NUM_BINS]."""


def splitmix64(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each key."""
    # The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    x = keys + np.uint64(_GOLDEN_GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Teacher:
    """Model that computes the true click probabilities.

    The logit is the sum of a bias, a dense part, one main effect per id and `strength` times the products of latent
    vectors of the world. The effects of an id are hashed from (seed, feature, id), so they take no memory.

    A calibration sample determines the mean and scale of each effect, the standard deviations of the three parts and
    the click rate. Effects are centered, so that a product contains no effects of fewer features.
    """

    def __init__(
        self,
        seed: int,
        world: SynthWorld,
        strength: float,
        cardinalities: tuple[int, ...],
        dense: NDArray[np.int32],
        ids: NDArray[np.int64],
    ) -> None:
        """Calibrate on `dense` [num_dense, n] and `ids` [num_sparse, n], which are popularity ranks or -1 (missing)."""
        self.world = world
        num_sparse, num_dense = len(ids), len(dense)
        self._keys = splitmix64(np.arange(num_sparse, dtype=np.uint64) + np.uint64(seed) * np.uint64(1_000_003))
        coefficients = _hashed_uniforms(
            splitmix64(np.arange(num_dense, dtype=np.uint64) ^ np.uint64(~seed & (2**64 - 1)))
        )
        self._linear, self._quadratic = coefficients[0], coefficients[1]
        self._dense_mean = np.zeros(num_dense, np.float32)
        self._dense_scale = np.ones(num_dense, np.float32)
        for j in range(num_dense):
            logs = _log_counts(dense[j])
            self._dense_mean[j], self._dense_scale[j] = logs.mean(), 1.0 / max(float(logs.std()), 1e-3)
        # One row per effect: the main effect, then the latent columns.
        self._offsets = np.zeros((num_sparse, 1 + world.latent_dim), np.float32)
        self._scales = np.ones((num_sparse, 1 + world.latent_dim), np.float32)
        for f in range(num_sparse):
            raw = self._effects(f, ids[f])
            variance = raw.var(axis=1)
            variance[1:] = variance[1:].mean()  # The latent vector has one scale.
            self._offsets[f] = raw.mean(axis=1)
            self._scales[f] = 1.0 / np.sqrt(np.maximum(variance, 1e-4))
        if world.is_centered_by_distribution:
            for f in world.planted_features:
                self._center_by_distribution(f, cardinalities[f])
        parts = self._parts(dense, ids)
        self._gains = [std / max(float(part.std()), 1e-6) for std, part in zip(_PART_STDS, parts, strict=True)]
        self._gains[-1] *= strength
        self._means = [float(part.mean()) for part in parts]
        self.bias = 0.0
        self.bias = _solve_bias(self._logits(dense, ids), CLICK_RATE)

    def _center_by_distribution(self, feature: int, cardinality: int) -> None:
        # The latents get mean 0 and variance 1, weighted by the probabilities of all ids.
        every_id, probabilities = id_probabilities(feature, cardinality)
        latents = self._effects(feature, every_id)[1:].astype(np.float64)
        means = latents @ probabilities
        variance = ((latents - means[:, None]) ** 2 @ probabilities).mean()
        self._offsets[feature, 1:] = means
        self._scales[feature, 1:] = 1.0 / np.sqrt(max(variance, 1e-4))

    def bins(self, dense: NDArray[np.int32], ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the bin of the logit of each sample [n]. The click probability is `PROBABILITIES[bin]`."""
        logits = np.clip(self._logits(dense, ids), -MAX_LOGIT, MAX_LOGIT)
        return np.rint(logits / LOGIT_STEP).astype(np.int32) + NUM_BINS // 2

    def _logits(self, dense: NDArray[np.int32], ids: NDArray[np.int64]) -> NDArray[np.float32]:
        logits = np.full(dense.shape[1], self.bias, np.float32)
        for gain, mean, part in zip(self._gains, self._means, self._parts(dense, ids), strict=True):
            logits += np.float32(gain) * (part - np.float32(mean))
        return logits

    def _parts(self, dense: NDArray[np.int32], ids: NDArray[np.int64]) -> tuple[NDArray[np.float32], ...]:
        """Return the three parts of the logit without gains, each [n]."""
        standard = [
            np.clip((_log_counts(column) - mean) * scale, -2.5, 2.5)
            for column, mean, scale in zip(dense, self._dense_mean, self._dense_scale, strict=True)
        ]
        dense_part = np.zeros(dense.shape[1], np.float32)
        for x, linear, curved in zip(standard, self._linear, self._quadratic, strict=True):
            dense_part += x * (linear + np.float32(0.5) * curved * x)
        for a, b in DENSE_PRODUCTS:
            dense_part += standard[a] * standard[b]
        main_part = np.zeros_like(dense_part)
        latents: dict[int, NDArray[np.float32]] = {}
        for f, column in enumerate(ids):
            effects = (self._effects(f, column) - self._offsets[f][:, None]) * self._scales[f][:, None]
            main_part += effects[0]
            if f in self.world.planted_features:
                latents[f] = effects[1:]
        return dense_part, main_part, planted_sum(self.world.planted, latents)

    def _effects(self, feature: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the main effect and latent vector of each id [1 + latent_dim, n], before centering."""
        # The missing id -1 has effects like any other id.
        hashed = splitmix64(ids.view(np.uint64) * np.uint64(_GOLDEN_GAMMA) + self._keys[feature])
        size = np.float32(1.0) / (np.float32(1.0) + np.maximum(ids, 0).astype(np.float32) / np.float32(HEAD_IDS))
        effects = _hashed_uniforms(hashed)[: 1 + self.world.latent_dim]
        effects *= size
        return effects


_PART_STDS = (DENSE_STD, MAIN_STD, PLANTED_STD)


def _hashed_uniforms(hashed: NDArray[np.uint64]) -> NDArray[np.float32]:
    # Each byte of a hash gives a uniform with mean 0 and variance 1.
    parts = hashed.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8).T.astype(np.float32)
    return np.asarray((parts - np.float32(127.5)) * np.float32(3**0.5 / 128), np.float32)


def _log_counts(column: NDArray[np.int32]) -> NDArray[np.float32]:
    # Like `meseta prepare`: missing values are the smallest int32, so they count as 0.
    return np.log1p(np.maximum(column, 0).astype(np.float32))


def _solve_bias(logits: NDArray[np.float32], rate: float) -> float:
    # Bisection for the bias with a mean probability of `rate`.
    low, high = -30.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(logits + middle).mean() < rate else (low, middle)
    return low


@dataclass
class Tally:
    """Label counts per logit bin, for the exact AUC, log loss and NE of the true probabilities."""

    negatives: NDArray[np.int64]
    positives: NDArray[np.int64]

    @classmethod
    def empty(cls) -> Tally:
        return cls(np.zeros(NUM_BINS, np.int64), np.zeros(NUM_BINS, np.int64))

    def add(self, bins: NDArray[np.int32], labels: NDArray[np.int8]) -> None:
        """Count samples with the given bins [n] and labels [n] (0 or 1)."""
        counts = np.bincount(bins * 2 + labels, minlength=2 * NUM_BINS).reshape(NUM_BINS, 2)
        self.negatives += counts[:, 0]
        self.positives += counts[:, 1]

    def merge(self, other: Tally) -> None:
        self.negatives += other.negatives
        self.positives += other.positives

    def summary(self) -> dict[str, float | int | None]:
        """Return the metrics of the teacher on these rows, and their expectations over random labels (`expected_*`).
        Undefined metrics are `None`."""
        num_rows = self.negatives + self.positives
        actual = _metrics(self.negatives.astype(np.float64), self.positives.astype(np.float64))
        expected = _metrics(num_rows * (1 - PROBABILITIES), num_rows * PROBABILITIES)
        return {
            "num_rows": int(num_rows.sum()),
            "num_positives": int(self.positives.sum()),
            **actual,
            **{f"expected_{name}": value for name, value in expected.items()},
        }


def _metrics(negatives: NDArray[np.float64], positives: NDArray[np.float64]) -> dict[str, float | None]:
    """Return AUC, log loss and NE from counts per bin."""
    # Ties count half in AUC. NE is the log loss over the entropy of the base rate.
    num_negatives, num_positives = float(negatives.sum()), float(positives.sum())
    num_rows = num_negatives + num_positives
    if num_rows == 0:
        return {"auc": None, "ne": None, "logloss": None}
    logloss = -float(positives @ np.log(PROBABILITIES) + negatives @ np.log1p(-PROBABILITIES)) / num_rows
    if num_negatives == 0 or num_positives == 0:
        return {"auc": None, "ne": None, "logloss": logloss}
    below = np.cumsum(negatives) - negatives
    auc = float(positives @ (below + negatives / 2)) / (num_negatives * num_positives)
    rate = num_positives / num_rows
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    return {"auc": auc, "ne": logloss / float(entropy), "logloss": logloss}
