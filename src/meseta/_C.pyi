"""Types of the compiled core."""

import numpy as np
from numpy.typing import NDArray

def hash_categories(
    data: NDArray[np.uint8], offsets: NDArray[np.int32] | NDArray[np.int64], seed: int, out: NDArray[np.uint64]
) -> None:
    """Write XXH64 of string i, data[offsets[i]:offsets[i + 1]], to out[i]; ValueError for offsets outside data."""

def hash_categories_to_rows(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int32] | NDArray[np.int64],
    seed: int,
    num_rows: int,
    out: NDArray[np.int32] | NDArray[np.int64],
) -> None:
    """As `hash_categories`, but write the high 64 bits of hash * num_rows, a row in 0..num_rows-1."""
