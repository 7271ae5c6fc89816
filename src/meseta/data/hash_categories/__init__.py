"""Hashes of strings as 64-bit integers or table rows: seeded XXH64, identical on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.hash_categories.string_buffers import string_buffers
from meseta.ops.core import baseline_core
from meseta.spec import MesetaError

__all__ = ["feature_seed", "hash_categories", "hash_to_rows"]


def hash_categories(strings: pa.Array, seed: int = 0) -> NDArray[np.uint64]:
    """Return the XXH64 of each string, uint64 [n].

    `strings` is an Arrow string or binary array (or their large forms). A null hashes like the empty string. `seed` is
    in 0..2**64-1. Raises MesetaError if the type is unsupported or the compiled core is missing.
    """
    data, offsets = string_buffers(strings)
    out = np.empty(len(strings), np.uint64)
    baseline_core().hash_categories(data, offsets, seed, out)
    return out


def hash_to_rows(strings: pa.Array, num_rows: int, seed: int = 0) -> NDArray[np.int32] | NDArray[np.int64]:
    """Return a row in 0..num_rows-1 for each string: the high 64 bits of XXH64 * num_rows.

    The result is int32 [n] if num_rows is at most 2**31, otherwise int64. Raises MesetaError as `hash_categories` does,
    or if num_rows is not in 1..2**63.
    """
    if not 1 <= num_rows <= 2**63:
        raise MesetaError(f"hash_to_rows: num_rows must be in 1..2**63, got {num_rows}")
    data, offsets = string_buffers(strings)
    out: Any = np.empty(len(strings), np.int32 if num_rows <= 2**31 else np.int64)
    baseline_core().hash_categories_to_rows(data, offsets, seed, num_rows, out)
    return out


def feature_seed(feature: str, seed: int) -> int:
    """Return the hash seed of a feature: the XXH64 of its name with the run's seed."""
    # Different seeds make the collisions of features independent.
    return int(hash_categories(pa.array([feature]), seed)[0])
