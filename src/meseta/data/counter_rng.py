"""Counter-based random numbers that are identical on every machine and for every numpy version.

A number is a function of a key and a counter. The mixer is the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast
splittable pseudorandom number generators", OOPSLA 2014). It is a bijection of 64-bit words, so distinct counters have
distinct words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def random_words(counters: NDArray[np.integer], *key: int) -> NDArray[np.uint64]:
    """Return one uint64 per counter. Distinct counters give distinct words. `key` is any tuple of integers."""
    base = 0
    for part in key:
        base = int(_splitmix64(np.array([(base ^ (part & _MASK)) + _GOLDEN_GAMMA & _MASK], np.uint64))[0])
    return _splitmix64(counters.astype(np.uint64) * np.uint64(_GOLDEN_GAMMA) + np.uint64(base))


def permutation(size: int, *key: int) -> NDArray[np.int64]:
    """Return a random order of 0..size-1, int64 [size]."""
    # The words are distinct, so there are no ties.
    return np.argsort(random_words(np.arange(size), *key))


def _splitmix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
