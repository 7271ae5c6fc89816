"""Teacher of a synthetic click log: true click probabilities, and the best possible AUC and NE."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meseta.data.synth.effects import IdEffects, feature_keys, hashed_uniforms, splitmix64
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


def sigmoid(logit: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(-logit)) in float64."""
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(logit, np.float64))))


PROBABILITIES: NDArray[np.float64] = sigmoid((np.arange(NUM_BINS) - NUM_BINS // 2) * LOGIT_STEP)
"""True click probability of each logit bin [NUM_BINS]."""


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
        drifts: bool = False,
    ) -> None:
        """Calibrate on `dense` [num_dense, n] and `ids` [num_sparse, n], which are popularity ranks or -1 (missing)."""
        self.world = world
        num_sparse, num_dense = len(ids), len(dense)
        coefficients = hashed_uniforms(
            splitmix64(np.arange(num_dense, dtype=np.uint64) ^ np.uint64(~seed & (2**64 - 1)))
        )
        self._linear, self._quadratic = coefficients[0], coefficients[1]
        self._dense_mean = np.zeros(num_dense, np.float32)
        self._dense_scale = np.ones(num_dense, np.float32)
        for j in range(num_dense):
            logs = _log_counts(dense[j])
            self._dense_mean[j], self._dense_scale[j] = logs.mean(), 1.0 / max(float(logs.std()), 1e-3)
        keys = feature_keys(seed, num_sparse)
        self._effects = IdEffects(keys, world, cardinalities, ids)
        # Drift turns the effects of an id in the plane of two independent vectors.
        self._turned_effects = IdEffects(splitmix64(keys), world, cardinalities, ids) if drifts else None
        parts = self._parts(dense, ids)
        self._gains = [std / max(float(part.std()), 1e-6) for std, part in zip(_PART_STDS, parts, strict=True)]
        self._gains[-1] *= strength
        self._means = [float(part.mean()) for part in parts]
        self.bias = 0.0
        self.bias = _solve_bias(self._logits(dense, ids), CLICK_RATE)

    def bins(
        self, dense: NDArray[np.int32], ids: NDArray[np.int64], angles: NDArray[np.float64] | float = 0.0
    ) -> NDArray[np.int32]:
        """Return the bin of the logit of each sample [n]. The click probability is `PROBABILITIES[bin]`.

        `angles` [n] are those by which effects have rotated, in radians.
        """
        logits = np.clip(self._logits(dense, ids, angles), -MAX_LOGIT, MAX_LOGIT)
        return np.rint(logits / LOGIT_STEP).astype(np.int32) + NUM_BINS // 2

    def _logits(
        self, dense: NDArray[np.int32], ids: NDArray[np.int64], angles: NDArray[np.float64] | float = 0.0
    ) -> NDArray[np.float32]:
        logits = np.full(dense.shape[1], self.bias, np.float32)
        for gain, mean, part in zip(self._gains, self._means, self._parts(dense, ids, angles), strict=True):
            logits += np.float32(gain) * (part - np.float32(mean))
        return logits

    def _parts(
        self, dense: NDArray[np.int32], ids: NDArray[np.int64], angles: NDArray[np.float64] | float = 0.0
    ) -> tuple[NDArray[np.float32], ...]:
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
            effects = self._effects(f, column)
            if self._turned_effects is not None:
                turned = self._turned_effects(f, column)
                effects = np.cos(angles).astype(np.float32) * effects + np.sin(angles).astype(np.float32) * turned
            main_part += effects[0]
            if f in self.world.planted_features:
                latents[f] = effects[1:]
        return dense_part, main_part, planted_sum(self.world.planted, latents)


_PART_STDS = (DENSE_STD, MAIN_STD, PLANTED_STD)


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
