"""Strings to 64-bit hashes or to table rows: XXH64 with a seed, the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.string_buffers import string_buffers
from meseta.ops.core import baseline_core
from meseta.spec import MesetaError

__all__ = ["feature_seed", "hash_categories", "hash_to_rows"]


def hash_categories(strings: pa.Array, seed: int = 0) -> NDArray[np.uint64]:
    """XXH64 of each of n strings, uint64 [n].

    `strings` is an Arrow string or binary array (or their large forms); a null hashes like the empty string.
    `seed` is in 0..2**64-1. Raises MesetaError for another type or where the compiled core is missing.
    """
    data, offsets = string_buffers(strings)
    out = np.empty(len(strings), np.uint64)
    baseline_core().hash_categories(data, offsets, seed, out)
    return out


def hash_to_rows(strings: pa.Array, num_rows: int, seed: int = 0) -> NDArray[np.int32] | NDArray[np.int64]:
    """The row 0..num_rows-1 of each of n strings: the high 64 bits of XXH64 * num_rows.

    int32 [n] where num_rows is at most 2**31, else int64. Raises MesetaError as `hash_categories` does, and for
    num_rows outside 1..2**63.
    """
    if not 1 <= num_rows <= 2**63:
        raise MesetaError(f"hash_to_rows: num_rows must be in 1..2**63, got {num_rows}")
    data, offsets = string_buffers(strings)
    out: Any = np.empty(len(strings), np.int32 if num_rows <= 2**31 else np.int64)
    baseline_core().hash_categories_to_rows(data, offsets, seed, num_rows, out)
    return out


def feature_seed(feature: str, seed: int) -> int:
    """The hash seed of one feature: XXH64 of its name with the run's seed, so that features collide independently."""
    return int(hash_categories(pa.array([feature]), seed)[0])
