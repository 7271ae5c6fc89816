"""How far predictions are from true probabilities, where these are known: free of the luck of the labels."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from meseta.spec import MesetaError


def regret(logits: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean over [n] samples of KL(true || predicted) in nats: what the logloss is expected to lose to that of the true
    probabilities [n], strictly between 0 and 1, when labels are drawn anew. 0 where all are met; nan without samples.

    Gneiting and Raftery (JASA 102, 2007) call it the divergence of the logarithmic score. Summed without rounding, so
    that it does not depend on the order. Raises MesetaError for probabilities that are none, or a logit that is not
    finite.
    """
    z, p = np.asarray(logits, np.float64).ravel(), np.asarray(probabilities, np.float64).ravel()
    if len(z) != len(p):
        raise MesetaError(f"regret: {len(z)} logits have {len(p)} probabilities; give one for each")
    if not len(z):
        return math.nan
    if not ((p > 0) & (p < 1)).all():
        raise MesetaError("regret: true probabilities must lie strictly between 0 and 1; clip them first")
    if not np.isfinite(z).all():
        raise MesetaError("regret: a logit is not finite; look for broken values in the dense features")
    of_ones = p * (np.log(p) + np.logaddexp(0.0, -z))
    of_zeros = (1 - p) * (np.log1p(-p) + np.logaddexp(0.0, z))
    return max(math.fsum(of_ones + of_zeros) / len(z), 0.0)
