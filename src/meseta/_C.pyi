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

def gather_limit(
    tables: list[int], ids: NDArray[np.int64], bounds: list[int], level: int, distance: int, num_threads: int
) -> tuple[int, float]:
    """Sum modulo 2^32 of the words of all rows read, and the seconds it took; `tables` has (address, bytes of a row,
    rows) of each table. ValueError for bounds or ids outside."""

def radix_sort(entries: NDArray[np.uint64], first_bit: int, last_bit: int) -> None:
    """Sort by bits first_bit..last_bit-1 in place, keeping the order of equal ones (for tests of radix.h)."""

def count_outside(
    ids: int, num_ids: int, wide: bool, bounds: list[int], num_rows: list[int], counts: int, num_threads: int
) -> None:
    """Add to counts [F] how many ids[bounds[f]:bounds[f + 1]] are outside 0..num_rows[f]-1. ids and counts are
    addresses, here and below; `wide`: 64-bit ids. ValueError for sizes that do not fit, here and below."""

def fix_ids(
    ids: int,
    num_ids: int,
    wide: bool,
    lengths: int,
    first_bags: list[int],
    num_rows: list[int],
    policies: list[int],
    outputs: list[int],
) -> int:
    """Write ids, lengths, kept positions and (feature, sample, id) of the first refused one; return how many ids are
    left."""

def row_lookup(
    tables: list[int], kind: int, ids: int, num_ids: int, wide: bool, bounds: list[int], num_threads: int
) -> None:
    """Write the rows of each feature; `tables` has (address, rows, columns, address of the output) of each."""

def weight_gradient(
    tables: list[int], kind: int, ids: list[int], offsets: list[int], gradient: int, out: int, num_threads: int
) -> None:
    """Write a float for each id of a weighted feature; `tables` has (address, rows, columns, flags) of each, `ids`
    (address, count, wide), `offsets` (address, bags of a feature)."""

def bucketize(cuts: list[int], sizes: list[int], inputs: list[int], outputs: list[int], num_threads: int) -> None:
    """inputs: addresses of ids and lengths, ids, bags of a feature, whether ids and lengths are wide; outputs:
    addresses of local ids, lengths, order and totals."""

def hash_ids(
    ids: int, count: int, wide: bool, num_rows: int, seed: int, xxh: bool, rows: int, num_threads: int
) -> None:
    """Write a row for each id."""

def unique(ids: int, num_ids: int, wide: bool, bounds: list[int], outputs: list[int], num_threads: int) -> int:
    """Write rows, inverse, counts and bounds of the distinct ids of each group; return how many there are."""

def permute_keys(arrays: list[int], bounds: list[int], order: list[int], num_threads: int) -> None:
    """`arrays`: (address, bytes of an element, elements, address of the output) of each."""

def lengths_to_offsets(lengths: int, count: int, wide: bool, offsets: int, num_threads: int) -> None:
    """Write count + 1 offsets."""

def quantize_rows(
    rows: int, kind: int, shape: list[int], format: int, origin: list[int], codes: int, num_threads: int
) -> None:
    """Write the bytes of rows; `origin`: key, first row and first column of the random bits, or nothing."""

def dequantize_rows(codes: int, shape: list[int], format: int, rows: int, num_threads: int) -> None:
    """Write the floats of rows."""
