"""Predicted misses of row caches, for the eviction policy of `meseta.ops.eviction`."""

from __future__ import annotations

import numpy as np

from meseta.planner.cost.reuse import Floats, RowClasses

# Small caches use a fixed half-life. Caches with at least `MIN_LONG_HALF_LIFE_SLOTS` slots try several, of which the
# longest suits rows with stable popularity. A half-life is a number of lookups per slot.
MIN_LONG_HALF_LIFE_SLOTS, SHORT_HALF_LIFE, LONG_HALF_LIFE = 8192, 4.0, 16.0
# The histogram says little about rare rows: each of them may be requested again or not.
MAX_RARE_COUNT = 4.0
"""Maximum number of lookups per window of a row that counts as rare."""
NUM_TAIL_CLASSES = 24
"""Number of classes that the rare rows of a table are divided into."""
MIN_EXPONENT, MAX_EXPONENT = 0.2, 3.0
_NUM_BISECTIONS = 40
_TINY = 1e-300


def request_rates(classes: RowClasses) -> tuple[Floats, Floats]:
    """Return (rows, rates): the number of rows of each class, and the requests of one row per lookup of its table.

    Both arrays have shape [n, K + NUM_TAIL_CLASSES], with the most requested class first.
    """
    n, each = len(classes.num_seen_rows), np.arange(len(classes.num_seen_rows))
    extents, shares, counts = classes.num_rows, classes.lookup_shares, classes.lookups_per_row
    # Rare rows, and rows that were never looked up, are taken as the tail of a power law (Zipf), whose exponent follows
    # from the more frequent rows. If there are too few of these, all rare rows are equally likely. If no row is rare,
    # rows that were never looked up have no requests.
    is_rare = (counts <= MAX_RARE_COUNT) | (extents <= 0.0)
    rows = np.where(is_rare, 0.0, extents)
    rows[each, classes.coldest_index] = np.where(is_rare[each, classes.coldest_index], 0.0, classes.num_seen_rows)
    first, whole = rows.sum(axis=1), extents.sum(axis=1)
    power = _zipf_exponents(np.where(is_rare, 0.0, counts), rows)
    ratio = np.maximum(whole, 1.0) / np.maximum(first, 1.0)
    bounds = np.maximum(first, 1.0)[:, None] * ratio[:, None] ** (np.arange(NUM_TAIL_CLASSES + 1) / NUM_TAIL_CLASSES)
    bounds[:, 0], bounds[:, -1] = first, whole
    tail_rows = np.maximum(np.diff(bounds, axis=1), 0.0)
    middle = np.sqrt(np.maximum(bounds[:, :-1], 0.5) * np.maximum(bounds[:, 1:], 1.0))
    weights = middle ** -power[:, None]
    mass = (tail_rows * weights).sum(axis=1)
    tail_share = np.where(is_rare, shares, 0.0).sum(axis=1)
    tail = weights * (tail_share / np.maximum(mass, _TINY))[:, None]
    head = np.where(rows > 0.0, shares / np.maximum(rows, _TINY), 0.0)
    return np.concatenate([rows, tail_rows], axis=1), np.concatenate([head, tail], axis=1).reshape(n, -1)


def _zipf_exponents(counts: Floats, rows: Floats) -> Floats:
    """Return the exponent of the power law of each table [n], or 0 if fewer than two classes have rows."""
    exponents = np.zeros(len(rows))
    # The row of rank r is requested in proportion to r ** -exponent.
    for table, (count, number) in enumerate(zip(counts, rows, strict=True)):
        used = np.flatnonzero(number > 0.0)
        if used.size < 2:
            continue
        ends = np.cumsum(number[used])
        ranks = np.sqrt(np.maximum(ends - number[used], 1.0) * ends)
        weights = np.sqrt(number[used])  # Frequencies of large classes are known more precisely.
        x, y = np.log(ranks), np.log(count[used])
        x, y = x - np.average(x, weights=weights), y - np.average(y, weights=weights)
        spread = (weights * x * x).sum()
        if spread > 0.0:
            exponents[table] = np.clip(-(weights * x * y).sum() / spread, MIN_EXPONENT, MAX_EXPONENT)
    return exponents


def cache_misses(rows: Floats, requests: Floats, cache_rows: Floats, lookups: Floats) -> Floats:
    """Return the expected number of distinct rows of a batch that are not in the cache, per table [n].

    Args:
        rows: Number of rows of each class [n, K].
        requests: Mean number of requests per batch of one row of the class [n, K].
        cache_rows: Number of cache slots [n].
        lookups: Number of lookups per batch [n].
    """
    misses = np.zeros(len(cache_rows))
    indices = np.flatnonzero((cache_rows < rows.sum(axis=1)) & (lookups > 0.0))
    rows, requests, cache_rows, lookups = (part[indices] for part in (rows, requests, cache_rows, lookups))
    # The score of a row is the sum of (1/2)^(age in half-lives) over its requests, and the rows with the highest scores
    # are cached. For random requests, the score is shot noise with mean m and variance m / 2 in units of the time
    # constant. Its distribution is close to a gamma distribution of shape 2 m. The bisection finds the score threshold
    # above which as many rows are expected as there are slots, as H. Che et al. do for LRU ("Hierarchical web caching
    # systems", 2002).
    chance = -np.expm1(-requests)
    half_life = (
        np.where(cache_rows < MIN_LONG_HALF_LIFE_SLOTS, SHORT_HALF_LIFE, LONG_HALF_LIFE)
        * np.maximum(cache_rows, 1.0)
        / lookups
    )  # in batches
    shape = 2.0 * chance * (half_life / np.log(2.0))[:, None]
    low, high = np.full(len(indices), -600.0), np.full(len(indices), 30.0)
    for _ in range(_NUM_BISECTIONS):
        middle = 0.5 * (low + high)
        fits = (rows * (1.0 - gamma_cdf(shape, 2.0 * np.exp(middle)[:, None]))).sum(axis=1) <= cache_rows
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    misses[indices] = (rows * chance * gamma_cdf(shape, 2.0 * np.exp(high)[:, None])).sum(axis=1)
    return misses


def gamma_cdf(shape: Floats, x: Floats) -> Floats:
    """Return the probability that a gamma variable of the given shape is below `x`, with an error of at most 0.004."""
    # P(a, x) = P(a + 2, x) + x^a e^-x / Gamma(a + 1) (1 + x / (a + 1)). The first term is the normal approximation of
    # the cube root (E. B. Wilson and M. M. Hilferty, 1931).
    more = shape + 2.0
    z = 3.0 * np.sqrt(more) * (np.cbrt(x / more) - 1.0 + 1.0 / (9.0 * more))
    first = np.exp(shape * np.log(np.maximum(x, _TINY)) - x - _log_gamma(shape + 1.0)) * (1.0 + x / (shape + 1.0))
    # A variable of shape 0 is always 0.
    return np.where(shape <= 0.0, 1.0, np.clip(_normal_cdf(z) + first, 0.0, 1.0))


def _log_gamma(x: Floats) -> Floats:
    # Stirling's series, evaluated at x + 4.
    up = x + 4.0
    shifted = np.log(x * (x + 1.0) * (x + 2.0) * (x + 3.0)) if np.max(x, initial=0.0) < 1e70 else 4.0 * np.log(x)
    log_gamma: Floats = (up - 0.5) * np.log(up) - up + 0.5 * np.log(2.0 * np.pi) + 1.0 / (12.0 * up) - shifted
    return log_gamma


def _normal_cdf(z: Floats) -> Floats:
    # M. Abramowitz and I. A. Stegun, formula 26.2.17.
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    tail = np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi) * t * (
        0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    )  # fmt: skip
    return np.where(z > 0.0, 1.0 - tail, tail)
