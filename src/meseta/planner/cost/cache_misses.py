"""Rows of a batch that do not lie near, from how often rows come again, where `meseta.ops.eviction` tells which do."""

from __future__ import annotations

import numpy as np

from meseta.planner.cost.reuse import Floats, RowClasses

MIN_LONG_HALF_LIFE_SLOTS, SHORT_HALF_LIFE, LONG_HALF_LIFE = 8192, 4.0, 16.0
"""Of a cache with fewer slots than that, requests count half after so many lookups for each slot; larger ones try
several, of which rows that stay as popular as they are take the longest."""
MAX_RARE_COUNT = 4.0
"""Of rows that come no oftener in a window, a histogram says little: each of many may come again or not."""
NUM_TAIL_CLASSES = 24
"""Classes that these are cut into."""
MIN_EXPONENT, MAX_EXPONENT = 0.2, 3.0
_NUM_BISECTIONS = 40
_TINY = 1e-300


def request_rates(classes: RowClasses) -> tuple[Floats, Floats]:
    """(rows, requests of a row for each lookup of its table), both [n, K + NUM_TAIL_CLASSES], those of most requests
    first.

    Rows that came RARE times or less in a window, or never, are taken to be the tail of a power law whose exponent the
    more frequent ones show (G. K. Zipf), cut into classes of geometrically growing size. Where nothing shows one, all
    of them are alike. Where no row came so rarely, those that never came are taken never to come.
    """
    n, each = len(classes.num_seen_rows), np.arange(len(classes.num_seen_rows))
    extents, shares, counts = classes.num_rows, classes.lookup_shares, classes.lookups_per_row
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
    """Exponent of each table [n]: rows by rank come rank ** -exponent as often. 0 where fewer than two classes tell."""
    found = np.zeros(len(rows))
    for table, (count, number) in enumerate(zip(counts, rows, strict=True)):
        used = np.flatnonzero(number > 0.0)
        if used.size < 2:
            continue
        ends = np.cumsum(number[used])
        ranks = np.sqrt(np.maximum(ends - number[used], 1.0) * ends)
        weights = np.sqrt(number[used])  # of classes with more rows more is known
        x, y = np.log(ranks), np.log(count[used])
        x, y = x - np.average(x, weights=weights), y - np.average(y, weights=weights)
        spread = (weights * x * x).sum()
        if spread > 0.0:
            found[table] = np.clip(-(weights * x * y).sum() / spread, MIN_EXPONENT, MAX_EXPONENT)
    return found


def cache_misses(rows: Floats, requests: Floats, cache_rows: Floats, lookups: Floats) -> Floats:
    """Distinct rows of a batch that do not lie near [n].

    A row's score is the sum over its requests of (1/2)^(their age in half-lives), and rows of the highest scores lie
    near. Where requests come at random that sum is shot noise with mean m and variance m / 2 in units of the time
    constant, whose law is close to a gamma distribution of shape 2 m; the threshold is that above which as many rows
    lie as there is room for (as H. Che et al., "Hierarchical web caching systems", 2002, find it for LRU).

    Args:
        rows: of each class [n, K].
        requests: of a row of the class in a batch, on average [n, K].
        cache_rows: slots [n].
        lookups: of a batch [n].
    """
    found = np.zeros(len(cache_rows))
    wants = np.flatnonzero((cache_rows < rows.sum(axis=1)) & (lookups > 0.0))
    rows, requests, cache_rows, lookups = (part[wants] for part in (rows, requests, cache_rows, lookups))
    chance = -np.expm1(-requests)
    half_life = (
        np.where(cache_rows < MIN_LONG_HALF_LIFE_SLOTS, SHORT_HALF_LIFE, LONG_HALF_LIFE)
        * np.maximum(cache_rows, 1.0)
        / lookups
    )  # in batches
    shape = 2.0 * chance * (half_life / np.log(2.0))[:, None]
    low, high = np.full(len(wants), -600.0), np.full(len(wants), 30.0)
    for _ in range(_NUM_BISECTIONS):
        middle = 0.5 * (low + high)
        fits = (rows * (1.0 - gamma_cdf(shape, 2.0 * np.exp(middle)[:, None]))).sum(axis=1) <= cache_rows
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    found[wants] = (rows * chance * gamma_cdf(shape, 2.0 * np.exp(high)[:, None])).sum(axis=1)
    return found


def gamma_cdf(shape: Floats, x: Floats) -> Floats:
    """Probability that a gamma variable of this shape is below x; of shape 0 it is 0.

    By P(a, x) = P(a + 2, x) + x^a e^-x / Gamma(a + 1) (1 + x / (a + 1)), and for a + 2 by the normal law of the cube
    root (E. B. Wilson and M. M. Hilferty, 1931); right to 0.004.
    """
    more = shape + 2.0
    z = 3.0 * np.sqrt(more) * (np.cbrt(x / more) - 1.0 + 1.0 / (9.0 * more))
    first = np.exp(shape * np.log(np.maximum(x, _TINY)) - x - _log_gamma(shape + 1.0)) * (1.0 + x / (shape + 1.0))
    return np.where(shape <= 0.0, 1.0, np.clip(_normal_cdf(z) + first, 0.0, 1.0))


def _log_gamma(x: Floats) -> Floats:
    """By J. Stirling's series at x + 4."""
    up = x + 4.0
    shifted = np.log(x * (x + 1.0) * (x + 2.0) * (x + 3.0)) if np.max(x, initial=0.0) < 1e70 else 4.0 * np.log(x)
    found: Floats = (up - 0.5) * np.log(up) - up + 0.5 * np.log(2.0 * np.pi) + 1.0 / (12.0 * up) - shifted
    return found


def _normal_cdf(z: Floats) -> Floats:
    """Of the standard normal law, by M. Abramowitz and I. A. Stegun, 26.2.17."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    tail = np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi) * t * (
        0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    )  # fmt: skip
    return np.where(z > 0.0, 1.0 - tail, tail)
