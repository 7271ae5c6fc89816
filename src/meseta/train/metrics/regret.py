"""Distance of predictions from the true probabilities of synthetic data, without the noise of sampled labels."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from meseta.spec import MesetaError


def regret(logits: ArrayLike, probabilities: ArrayLike) -> float:
    """Return the mean KL divergence in nats from the true probabilities [n] to the predictions of [n] logits.

    This is the expected excess of the log loss over that of the true probabilities. Gneiting and Raftery (JASA 102,
    2007) call it the divergence of the logarithmic score. It is 0 for perfect predictions, and nan without samples. The
    sum is exact, so it does not depend on the order.
    Raises MesetaError if the lengths differ, a probability is not strictly between 0 and 1, or a logit is not finite.
    """
    z, p = np.asarray(logits, np.float64).ravel(), np.asarray(probabilities, np.float64).ravel()
    if len(z) != len(p):
        raise MesetaError(f"regret: got {len(z)} logits and {len(p)} probabilities; pass one probability per logit")
    if not len(z):
        return math.nan
    if not ((p > 0) & (p < 1)).all():
        raise MesetaError("regret: true probabilities must be strictly between 0 and 1; clip them first")
    if not np.isfinite(z).all():
        raise MesetaError("regret: logits must be finite; look for invalid values in the dense features")
    of_ones = p * (np.log(p) + np.logaddexp(0.0, -z))
    of_zeros = (1 - p) * (np.log1p(-p) + np.logaddexp(0.0, z))
    return max(math.fsum(of_ones + of_zeros) / len(z), 0.0)
