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

def random_bits(key: int, first_row: int, first_column: int, out: NDArray[np.int64], num_threads: int) -> None:
    """Fill out [rows, columns] with the Philox4x32-10 words of its cells."""

def coalesce_float32(
    ids: NDArray[np.int64],
    source: NDArray[np.int64],
    block: NDArray[np.int64],
    gradient: NDArray[np.float32],
    scale: NDArray[np.float32] | None,
    rows: NDArray[np.int64],
    sums: NDArray[np.float32],
    num_threads: int,
) -> int:
    """Write touched rows and their sums to the first U entries of rows [nnz] and sums [nnz, D]; return U."""

def coalesce_float64(
    ids: NDArray[np.int64],
    source: NDArray[np.int64],
    block: NDArray[np.int64],
    gradient: NDArray[np.float64],
    scale: NDArray[np.float64] | None,
    rows: NDArray[np.int64],
    sums: NDArray[np.float64],
    num_threads: int,
) -> int:
    """As `coalesce_float32`."""

def radix_sort(entries: NDArray[np.uint64], first_bit: int, last_bit: int) -> None:
    """Sort by bits first_bit..last_bit-1 in place, keeping the order of equal ones (for tests of radix.h)."""
