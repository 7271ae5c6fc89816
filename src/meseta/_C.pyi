"""Types of the compiled core.

Functions that take addresses as integers raise ValueError if sizes or bounds do not match. `wide` means 64-bit ids.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def hash_categories(
    data: NDArray[np.uint8], offsets: NDArray[np.int32] | NDArray[np.int64], seed: int, out: NDArray[np.uint64]
) -> None:
    """Write the XXH64 hash of each string data[offsets[i]:offsets[i + 1]] to out[i].

    Raises ValueError if an offset is out of range.
    """

def hash_categories_to_rows(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int32] | NDArray[np.int64],
    seed: int,
    num_rows: int,
    out: NDArray[np.int32] | NDArray[np.int64],
) -> None:
    """Map each string to a row in 0..num_rows-1, the high 64 bits of hash * num_rows. See `hash_categories`."""

def scan_whole_numbers(data: NDArray[np.uint8], offsets: NDArray[np.int32] | NDArray[np.int64]) -> tuple[int, int]:
    """Return (number of strings that `respell_whole_numbers` changes, number of strings that are not integers)."""

def respell_whole_numbers(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int32] | NDArray[np.int64],
    out: NDArray[np.uint8],
    out_offsets: NDArray[np.int64],
) -> int:
    """Write all strings to `out` and `out_offsets` [n + 1], with integers in canonical form. Return the bytes written.

    A changed string needs at most 21 bytes.
    """

def parse_tsv(
    raw: NDArray[np.uint8],
    label: NDArray[np.float32],
    dense: NDArray[np.float64],
    offsets: NDArray[np.int32],
    data: NDArray[np.uint8],
    firsts: NDArray[np.int64],
) -> bool:
    """Parse n lines with 1 label, 13 dense numbers and 26 strings. Returns False for a line with another format.

    Writes label [n] and dense [13, n], with missing and negative numbers as 0. The strings are written to data
    [len(raw)], where those of feature k start at firsts[k] and have offsets[k] [n + 1].
    """

def random_bits(key: int, first_row: int, first_column: int, out: NDArray[np.int64], num_threads: int) -> None:
    """Fill out [rows, columns] with the Philox4x32-10 words of its elements."""

def uniform_rows_at(
    key: int,
    rows: NDArray[np.int64],
    first_column: int,
    scale: float,
    out: NDArray[np.float32] | NDArray[np.float64],
    num_threads: int,
) -> None:
    """Fill out [len(rows), columns] with the values of `uniform_rows` for the given rows."""

def start_heartbeat(descriptor: int, offset: int, interval_s: float) -> None:
    """Start a thread that writes (monotonic time, processor time) in ns to 16 bytes of an open file."""

def stop_heartbeat() -> None:
    """Stop the heartbeat thread, if it is running."""

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
    """Sum gradients by row. Writes the U distinct rows to rows[:U] and their sums to sums[:U], and returns U."""

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
    """Sum float64 gradients by row, as `coalesce_float32`."""

def gather_limit(
    tables: list[int],
    ids: NDArray[np.int64],
    bounds: list[int],
    level: int,
    distance: int,
    burst: int,
    num_threads: int,
) -> tuple[int, float]:
    """Read all rows, and return (sum of their words modulo 2^32, seconds).

    `tables` has (address, bytes per row, number of rows) for each table. Raises ValueError if bounds or ids are out of
    range.
    """

def radix_sort(entries: NDArray[np.uint64], first_bit: int, last_bit: int) -> None:
    """Sort stably in place by bits first_bit..last_bit-1. Only tests of radix.h use this function."""

def count_outside(
    ids: int, num_ids: int, wide: bool, bounds: list[int], num_rows: list[int], counts: int, num_threads: int
) -> None:
    """Add the number of ids[bounds[f]:bounds[f + 1]] that are outside 0..num_rows[f]-1 to counts[f]."""

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
    """Apply the id policies. Returns the number of remaining ids.

    Writes ids, lengths, positions of the remaining ids, and (feature, sample, id) of the first rejected id.
    """

def row_lookup(
    tables: list[int], kind: int, ids: int, num_ids: int, wide: bool, bounds: list[int], num_threads: int
) -> None:
    """Copy the rows of each feature. `tables` has (address, rows, columns, output address) for each feature."""

def weight_gradient(
    tables: list[int], kind: int, ids: list[int], offsets: list[int], gradient: int, out: int, num_threads: int
) -> None:
    """Write the gradient of the weight of each id of weighted features.

    `tables` has (address, rows, columns, flags) for each feature, `ids` is (address, count, wide), and `offsets` is
    (address, number of bags per feature).
    """

def bucketize(cuts: list[int], sizes: list[int], inputs: list[int], outputs: list[int], num_threads: int) -> None:
    """Distribute ids to shards.

    `inputs` is (address of ids, address of lengths, number of ids, bags per feature, wide ids, wide lengths), and
    `outputs` has the addresses of local ids, lengths, order and totals.
    """

def hash_ids(
    ids: int, count: int, wide: bool, num_rows: int, seed: int, xxh: bool, rows: int, num_threads: int
) -> None:
    """Hash each id to a row."""

def unique(ids: int, num_ids: int, wide: bool, bounds: list[int], outputs: list[int], num_threads: int) -> int:
    """Write rows, inverse, counts and bounds of the distinct ids of each group. Returns the number of distinct ids."""

def permute_keys(arrays: list[int], bounds: list[int], order: list[int], num_threads: int) -> None:
    """Reorder the features of arrays. `arrays` has (address, bytes per element, elements, output address) for each."""

def place_columns(
    out: list[int], sources: list[int], moves: list[int], scale: float, wide: bool, num_threads: int
) -> None:
    """Copy or add columns of float32 matrices, or float64 if `wide` is set.

    `out` is (address, rows, columns, row stride), `sources` has the same without rows, and `moves` has (source, first
    column, first column of `out`, columns, whether to add).
    """

def encode_columns(
    out: list[int],
    sources: list[int],
    moves: list[int],
    layout: list[int],
    scale: float,
    random: list[int],
    counted: list[int],
    num_threads: int,
) -> None:
    """Place columns as `place_columns`, and encode them.

    `out` is (address, rows, bytes per row). `layout` has the codec, the exponent, the number of pieces and their
    widths. `random` has keys, first columns and the first row, or is empty. `counted` has the addresses of the number
    of rows and of the count of values that are too large, or 0.
    """

def decode_columns(
    out: list[int], sources: list[int], moves: list[int], layout: list[int], scale: float, num_threads: int
) -> None:
    """Decode columns of `encode_columns`. `out` is (address, rows, columns, row stride), `sources` has addresses."""

def lengths_to_offsets(lengths: int, count: int, wide: bool, offsets: int, num_threads: int) -> None:
    """Write the count + 1 offsets of `count` lengths."""

def quantize_rows(
    rows: int, kind: int, shape: list[int], format: int, adaptive: bool, origin: list[int], codes: int, num_threads: int
) -> None:
    """Quantize rows. `origin` has the key, first row and first column of the random bits, or is empty."""

def dequantize_rows(codes: int, shape: list[int], format: int, rows: int, num_threads: int) -> None:
    """Restore rows from the codes of `quantize_rows`."""

def uniform_rows(
    key: int,
    first_row: int,
    first_column: int,
    scale: float,
    out: NDArray[np.float32] | NDArray[np.float64],
    num_threads: int,
) -> None:
    """Fill out [rows, columns] with scale * (2 u - 1), where u is made of the 24 high bits of `random_bits`."""

def pooled_lookup(
    tables: list[int],
    kind: int,
    ids: int,
    num_ids: int,
    wide_ids: bool,
    offsets: int,
    num_bags: int,
    weights: int,
    out: int,
    out_stride: int,
    num_threads: int,
) -> None:
    """Write the pooled embeddings of all features to adjacent columns of `out`.

    `tables` has (address, rows, columns, flags) for each feature. `num_bags` is the number of bags per feature.
    """

def row_update(
    tables: list[int],
    states: list[int],
    kind: int,
    state_is_row: list[bool],
    code: int,
    num_instructions: int,
    uniforms: int,
    num_uniforms: int,
    features: list[int],
    matrices: list[int],
    ids: int,
    num_ids: int,
    wide_ids: bool,
    offsets: int,
    num_offsets: int,
    num_bags: int,
    weights: int,
    step: int,
    num_threads: int,
) -> None:
    """Update the rows that a batch touched. See read_tables and add_features in row_update/cpu.cpp for the lists."""

def row_apply(
    tables: list[int],
    states: list[int],
    kind: int,
    state_is_row: list[bool],
    code: int,
    num_instructions: int,
    uniforms: int,
    num_uniforms: int,
    num_stats: int,
    num_sums: int,
    rows: int,
    gradient: int,
    num_rows: int,
    stats: int,
    summands: int,
    step: int,
    num_threads: int,
) -> None:
    """Update the given rows of one table, or write the block sums of a stage if `summands` is not 0."""

def dot_interaction(
    num_samples: int, num_features: int, dim: int, bfloat: bool, x: int, pooled: int, out: int, num_threads: int
) -> None:
    """Write x and the dot products of all pairs to `out`. If `bfloat` is set, x and `out` are bfloat16."""

def dot_interaction_backward(
    num_samples: int,
    num_features: int,
    dim: int,
    bfloat: bool,
    gradient: int,
    x: int,
    pooled: int,
    x_gradient: int,
    pooled_gradient: int,
    num_threads: int,
) -> None:
    """Write the gradients of x and `pooled`. If `bfloat` is set, x and the output gradient are bfloat16."""

def relu_backward(
    num_samples: int,
    width: int,
    bfloat: bool,
    gradient: int,
    output: int,
    masked: int,
    transposed: int,
    bias_gradient: int,
    num_threads: int,
) -> None:
    """Write the gradient of the ReLU input, its transpose and its sum over samples. Address 0 skips an output."""

def product(
    kind: int,
    shape: Sequence[int],
    addresses: Sequence[int],
    a_strides: Sequence[int],
    b_strides: Sequence[int],
    num_threads: int,
) -> None:
    """Write the matrix product a b + bias.

    `shape` is (batch, rows, columns, terms), and `addresses` has a, b, bias (0 for none) and the result.
    """

def allocate(bytes: int, keep: bool) -> Any:
    """Allocate a block on 2 MB pages for torch.from_dlpack. With `keep`, it is reused after it is freed."""

def release_idle_memory() -> None:
    """Return freed blocks that were kept to the system."""

def keep_freed_memory() -> None:
    """Make glibc keep freed memory."""

def slot_map(capacity: int, wide: bool) -> object:
    """Create a map from 64-bit keys to slots. Slots are at most 2**32 - 2, or 2**63 - 2 if `wide` is set."""

def slot_map_find(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> None:
    """Write the slot of each key, or -1 if the key is not in the map."""

def slot_map_insert(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> int:
    """Insert keys with their slots. Returns the number of new keys."""

def slot_map_remove(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> None:
    """Remove keys and write their former slots."""

def slot_map_items(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64]) -> int:
    """Write all keys and slots. Returns their number."""

def slot_map_size(directory: object) -> int: ...
def slot_map_bytes(directory: object) -> int: ...
def eviction(num_slots: int, num_ghosts: int, half_lives: list[int]) -> object:
    """Create the scores of cached rows and evicted rows.

    `half_lives` are in lookups. The first one is used until trials favor another one.
    """

def eviction_touch(policy: object, slots: NDArray[np.int64], rows: NDArray[np.int64], num_lookups: int) -> None:
    """Update the scores of the requested rows in `slots`."""

def eviction_admit(policy: object, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Restore the ghost scores of rows that were fetched into `slots`."""

def eviction_choose(policy: object, rows: NDArray[np.int64], pins: NDArray[np.int32], out: NDArray[np.int64]) -> bool:
    """Write the unpinned slots with the lowest scores, and keep ghost scores. Returns False if there are too few."""

def eviction_bytes(policy: object) -> int: ...
def eviction_half_life(policy: object) -> int: ...
def io_uring_error() -> int:
    """Return 0 if io_uring is available, its error number otherwise, or -1 if the core was built without io_uring."""

def open_row_engine(io_uring: bool, depth: int, max_reads_per_s: float) -> object:
    """Create an I/O engine with at most `depth` reads in flight. A `max_reads_per_s` of 0 means no limit."""

def limit_row_engine(engine: object, max_reads_per_s: float) -> None:
    """Change the maximum number of reads per second of an engine."""

def row_engine_latencies(engine: object) -> list[int]:
    """Return a histogram of read latencies, with eight bins per power of two of nanoseconds, from 8 ns."""

def row_engine_bytes(engine: object) -> int:
    """Return the size of an engine's buffers in bytes."""

def open_row_log(engine: object, descriptor: int, rows: int, sizes: Sequence[int], salt: int) -> object:
    """Create an empty row file in an open file.

    `sizes` has the bytes of a record, the bytes of a block and the minimum bytes of a segment.
    """

def write_rows(log: object, rows: NDArray[np.int64], values: Sequence[NDArray[np.uint8]]) -> list[int]:
    """Write rows. Their records are the concatenation of `values`, [n, bytes] each.

    Returns the failure, as `wait_rows`, followed by the number of rows that were accepted.
    """

def read_rows(log: object, rows: NDArray[np.int64], out: NDArray[np.uint8], is_written: NDArray[np.bool_]) -> object:
    """Start to read rows into `out` and `is_written`. Wait with `wait_rows`."""

def read_snapshot_rows(
    snapshot: object,
    first: int,
    listed: NDArray[np.int64] | None,
    values: Sequence[NDArray[np.uint8]],
    is_written: NDArray[np.bool_],
) -> object:
    """Start to read the rows of a snapshot, consecutive ones from `first`, or those in `listed`.

    The number of rows is the length of `is_written`. `values` has the layout of `write_rows`.
    """

def wait_rows(reading: object) -> list[int]:
    """Wait for a read. Returns its failure: (kind or 0, system error, row, byte offset in file, whether written)."""

def rows_are_read(reading: object) -> bool:
    """Whether a read has completed, so that `wait_rows` would not block."""

def snapshot_rows(log: object) -> object:
    """Create a snapshot of the current rows. It ends when the object is freed."""

def flush_rows(log: object) -> list[int]:
    """Write all rows to disk and wait. Returns the failure, as `wait_rows`."""

def close_row_log(log: object) -> None:
    """Wait for all requests in flight. Afterwards the file may be closed."""

def row_log_numbers(log: object) -> list[int]:
    """Return the bytes of memory, the bytes of the file, the number of rows, and the counters."""

def row_layout(record_bytes: int, block_bytes: int, segment_bytes: int) -> list[int]:
    """Return the layout of a row file.

    The result has the bytes of an entry, bytes of a group, entries per group, bytes of a segment, entries per segment,
    and the total bytes read if each entry of a segment is read separately.
    """

def crc32c(data: NDArray[np.uint8], begin: int, by_table: bool) -> int:
    """Continue the CRC-32C checksum `begin` with `data`. `by_table` avoids the processor's CRC instruction."""

def file_backing_store(log: object) -> object:
    """Use a row file as backing store of a cache."""

def memory_backing_store(records: NDArray[np.uint8], is_written: NDArray[np.bool_]) -> object:
    """Use the caller's memory as backing store of a cache."""

def open_row_cache(
    rows: NDArray[np.int64],
    num_slots: int,
    num_ghosts: int,
    half_lives: list[int],
    backing_store: object,
    fields: list[tuple[int, int, int]],
) -> object:
    """Create a cache. `rows` has the rows of its slots, including slots for read-only access.

    `fields` has (address, bytes per row, number of rows) for each field of a record.
    """

def pin_rows(
    caches: list[object],
    rows: NDArray[np.int64],
    bounds: list[int],
    cache_indices: list[int],
    slots: NDArray[np.int64],
    read_only: bool,
    num_threads: int,
) -> tuple[object | None, list[int]]:
    """Pin groups of rows, each in one cache. Returns (pinned rows, empty list), or (`None`, failure).

    The failure is (cache, rows, missing rows, rows pinned by others) if there is too little space. Otherwise it is the
    cache followed by a failure of `wait_rows`.
    """

def wait_for_rows(
    pinned: object, num_threads: int
) -> tuple[list[int], list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]]:
    """Wait for the fetches of pinned rows.

    Returns (cache and failure of the first failed fetch, (cache, rows, slots) of rows that were never written).
    """

def cache_moves(
    pinned: object, index: int
) -> tuple[
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.uint8],
    NDArray[np.bool_],
]:
    """Return the row moves of a cache without fields, for the caller to execute.

    The result is (evicted rows, their slots, fetched rows, their slots, records, whether each was ever written).
    """

def num_pinned_rows(pinned: object, index: int) -> tuple[int, int]:
    """Return (number of distinct rows of a cache, number of misses)."""

def unpin_rows(pinned: object) -> None: ...
def find_in_cache(cache: object, rows: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> None: ...
def dirty_slots(cache: object) -> NDArray[np.int64]: ...
def write_back_slots(cache: object, slots: NDArray[np.int64]) -> list[int]: ...
def clean_slots(cache: object, slots: NDArray[np.int64]) -> None: ...
def row_cache_numbers(cache: object) -> list[int]:
    """Return the bytes of a cache, the number of pinned slots, and the values of `CacheCounters`."""
