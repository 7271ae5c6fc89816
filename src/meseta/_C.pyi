"""Types of the compiled core."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def hash_categories(
    data: NDArray[np.uint8], offsets: NDArray[np.int32] | NDArray[np.int64], seed: int, out: NDArray[np.uint64]
) -> None:
    """Write XXH64 of string i, data[offsets[i]:offsets[i + 1]], to out[i]. Raises ValueError if offsets exceed data."""

def hash_categories_to_rows(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int32] | NDArray[np.int64],
    seed: int,
    num_rows: int,
    out: NDArray[np.int32] | NDArray[np.int64],
) -> None:
    """Write the upper 64 bits of hash * num_rows for each string, a row in 0..num_rows-1. See `hash_categories`."""

def scan_whole_numbers(data: NDArray[np.uint8], offsets: NDArray[np.int32] | NDArray[np.int64]) -> tuple[int, int]:
    """Return (number of strings that `respell_whole_numbers` changes, number of strings that are not whole numbers)."""

def respell_whole_numbers(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int32] | NDArray[np.int64],
    out: NDArray[np.uint8],
    out_offsets: NDArray[np.int64],
) -> int:
    """Write n strings, with whole numbers in their canonical spelling, to out and out_offsets [n + 1].

    Returns the number of bytes. `out` must have 21 bytes for each changed string.
    """

def parse_tsv(
    raw: NDArray[np.uint8],
    label: NDArray[np.float32],
    dense: NDArray[np.float64],
    offsets: NDArray[np.int32],
    data: NDArray[np.uint8],
    firsts: NDArray[np.int64],
) -> bool:
    """Parse lines of 1 + 13 + 26 fields. Returns whether all lines have the usual form.

    Writes label [n], dense [13, n] (negative and missing numbers are 0), and strings to data [len(raw)]. Those of
    feature k start at firsts[k], with offsets [26, n + 1].
    """

def random_bits(key: int, first_row: int, first_column: int, out: NDArray[np.int64], num_threads: int) -> None:
    """Fill out [rows, columns] with the Philox4x32-10 words of its cells."""

def uniform_rows_at(
    key: int,
    rows: NDArray[np.int64],
    first_column: int,
    scale: float,
    out: NDArray[np.float32] | NDArray[np.float64],
    num_threads: int,
) -> None:
    """Fill out as `uniform_rows`, for arbitrary rows."""

def start_heartbeat(descriptor: int, offset: int, interval_s: float) -> None:
    """Start a thread that writes (monotonic time, CPU time) in ns to 16 bytes of an open file."""

def stop_heartbeat() -> None:
    """Stop the thread, if there is one."""

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
    """Write touched rows and their sums to the first U entries of rows [nnz] and sums [nnz, D]. Returns U."""

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
    """Sum float64 gradients as `coalesce_float32`."""

def gather_limit(
    tables: list[int],
    ids: NDArray[np.int64],
    bounds: list[int],
    level: int,
    distance: int,
    burst: int,
    num_threads: int,
) -> tuple[int, float]:
    """Return (sum modulo 2^32 of the words of all rows, seconds). `tables` has (address, bytes per row, rows) of each.

    Raises ValueError if bounds or ids are out of range.
    """

def radix_sort(entries: NDArray[np.uint64], first_bit: int, last_bit: int) -> None:
    """Sort by bits first_bit..last_bit-1 in place. Equal entries keep their order. Exists for tests of radix.h."""

def count_outside(
    ids: int, num_ids: int, wide: bool, bounds: list[int], num_rows: list[int], counts: int, num_threads: int
) -> None:
    """Add to counts [F] how many of ids[bounds[f]:bounds[f + 1]] are outside 0..num_rows[f]-1.

    Here and below, tensors are addresses, `wide` means int64, and ValueError is raised if sizes do not match.
    """

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
    """Write ids, lengths, kept positions and (feature, sample, id) of the first error. Returns the number of ids."""

def row_lookup(
    tables: list[int], kind: int, ids: int, num_ids: int, wide: bool, bounds: list[int], num_threads: int
) -> None:
    """Write the rows of each feature. `tables` has (address, rows, columns, address of the output) of each."""

def weight_gradient(
    tables: list[int], kind: int, ids: list[int], offsets: list[int], gradient: int, out: int, num_threads: int
) -> None:
    """Write a float for each id of a weighted feature. `tables` has (address, rows, columns, flags) of each.

    `ids` is (address, count, wide). `offsets` is (address, bags per feature).
    """

def bucketize(cuts: list[int], sizes: list[int], inputs: list[int], outputs: list[int], num_threads: int) -> None:
    """Group ids by owner. `inputs` is (ids, lengths, number of ids, bags per feature, wide ids, wide lengths).

    `outputs` has the addresses of local ids, lengths, order and totals.
    """

def hash_ids(
    ids: int, count: int, wide: bool, num_rows: int, seed: int, xxh: bool, rows: int, num_threads: int
) -> None:
    """Write a row for each id."""

def unique(ids: int, num_ids: int, wide: bool, bounds: list[int], outputs: list[int], num_threads: int) -> int:
    """Write rows, inverse, counts and bounds of the distinct ids of each group. Returns the number of distinct ids."""

def permute_keys(arrays: list[int], bounds: list[int], order: list[int], num_threads: int) -> None:
    """Permute keys. `arrays` has (address, element size, elements, address of the output) of each."""

def place_columns(
    out: list[int], sources: list[int], moves: list[int], scale: float, wide: bool, num_threads: int
) -> None:
    """Copy or add columns. `out` is (address, rows, columns, row stride). `wide` means float64.

    `sources` has (address, columns, row stride) of each. `moves` has (source, first column, first column of `out`,
    columns, whether to add) of each.
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
    """Encode columns. `out` is (address, rows, bytes per row).

    `layout` has codec, exponent, numbers and widths of pieces. `random` has keys, first columns and the first row, or
    is empty. `counted` has the addresses of row numbers and of the count of clamped numbers, or 0.
    """

def decode_columns(
    out: list[int], sources: list[int], moves: list[int], layout: list[int], scale: float, num_threads: int
) -> None:
    """Decode columns. `out` is (address, rows, columns, row stride). `sources` has addresses."""

def lengths_to_offsets(lengths: int, count: int, wide: bool, offsets: int, num_threads: int) -> None:
    """Write count + 1 offsets."""

def quantize_rows(
    rows: int, kind: int, shape: list[int], format: int, adaptive: bool, origin: list[int], codes: int, num_threads: int
) -> None:
    """Write the bytes of rows. `origin` has key, first row and first column of the random bits, or is empty."""

def dequantize_rows(codes: int, shape: list[int], format: int, rows: int, num_threads: int) -> None:
    """Write the floats of rows."""

def uniform_rows(
    key: int,
    first_row: int,
    first_column: int,
    scale: float,
    out: NDArray[np.float32] | NDArray[np.float64],
    num_threads: int,
) -> None:
    """Fill out [rows, columns] with scale * (2 u - 1). u has the upper 24 bits of the cell's word of `random_bits`."""

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
    """Write the pooled bags of all features. `tables` has (address, rows, columns, flags) of each.

    `num_bags` is the number of bags per feature.
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
    """Update the rows that the batch touched. See read_tables and add_features in row_update/cpu.cpp for the lists."""

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
    """Write x and the products of pairs. Here and below, `bfloat` means that x and out are bfloat16."""

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
    """Write the gradients of x and of pooled."""

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
    """Write the gradient before the ReLU, its transpose and its sum over samples. Address 0 skips an output."""

def product(
    kind: int,
    shape: Sequence[int],
    addresses: Sequence[int],
    a_strides: Sequence[int],
    b_strides: Sequence[int],
    num_threads: int,
) -> None:
    """Write a b + bias. `shape` is (batch, rows, columns, terms), `addresses` those of a, b, bias or 0, result."""

def allocate(bytes: int, keep: bool) -> Any:
    """Allocate a block on 2 MB pages, for torch.from_dlpack. With `keep`, a freed block serves the next request."""

def release_idle_memory() -> None:
    """Return freed blocks to the operating system."""

def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory."""

def slot_map(capacity: int, wide: bool) -> object:
    """Create a map from 64-bit keys to slots up to 2**32 - 2, or 2**63 - 2 if `wide`."""

def slot_map_find(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> None:
    """Write the slot of each key, -1 for missing keys."""

def slot_map_insert(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> int:
    """Insert keys. Returns the number of new keys."""

def slot_map_remove(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> None:
    """Remove keys, and write the slot that each had."""

def slot_map_items(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64]) -> int:
    """Write all keys and slots. Returns their number."""

def slot_map_size(directory: object) -> int: ...
def slot_map_bytes(directory: object) -> int: ...
def eviction(num_slots: int, num_ghosts: int, half_lives: list[int]) -> object:
    """Create an eviction policy. Half-lives are in lookups. The first one is used until trials select another."""

def eviction_touch(policy: object, slots: NDArray[np.int64], rows: NDArray[np.int64], num_lookups: int) -> None:
    """Record requests of rows in slots."""

def eviction_admit(policy: object, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Restore the ghost scores of rows in slots."""

def eviction_choose(policy: object, rows: NDArray[np.int64], pins: NDArray[np.int32], out: NDArray[np.int64]) -> bool:
    """Write the slots of victims and store their scores. Returns false if fewer slots are unpinned."""

def eviction_bytes(policy: object) -> int: ...
def eviction_half_life(policy: object) -> int: ...
def io_uring_error() -> int:
    """Return 0 if io_uring is available, else the system's error, or -1 if the core was built without it."""

def open_row_engine(io_uring: bool, depth: int, max_reads_per_s: float) -> object:
    """Create an engine. `depth` limits the reads in flight. 0 reads per second means no limit."""

def limit_row_engine(engine: object, max_reads_per_s: float) -> None:
    """Change the limit of an engine."""

def row_engine_latencies(engine: object) -> list[int]:
    """Return the histogram of read latencies: eight bins for each power of two of nanoseconds, starting at 8 ns."""

def row_engine_bytes(engine: object) -> int:
    """Return the memory of the buffers of an engine."""

def open_row_log(engine: object, descriptor: int, rows: int, sizes: Sequence[int], salt: int) -> object:
    """Open an empty row file. `sizes` are bytes of a record, of a block, at least of a segment, and rows of a part."""

def write_rows(log: object, rows: NDArray[np.int64], values: Sequence[NDArray[np.uint8]]) -> list[int]:
    """Write rows. Their records are the concatenated values, [n, bytes] each.

    Returns a failure (see `wait_rows`), followed by the number of rows written.
    """

def read_rows(log: object, rows: NDArray[np.int64], out: NDArray[np.uint8], is_written: NDArray[np.bool_]) -> object:
    """Start to read rows into `out` and `is_written`."""

def read_snapshot_rows(
    snapshot: object,
    first: int,
    listed: NDArray[np.int64] | None,
    values: Sequence[NDArray[np.uint8]],
    is_written: NDArray[np.bool_],
) -> object:
    """Start to read rows of a snapshot: those listed, or as many as `is_written` has from `first` on."""

def wait_rows(reading: object) -> list[int]:
    """Wait for a read. Returns (kind or 0 for success, errno, row, byte of the file, whether it was writing)."""

def rows_are_read(reading: object) -> bool:
    """Whether a read is complete."""

def snapshot_rows(log: object) -> object:
    """Return a snapshot of the rows, which exists until it is garbage-collected."""

def flush_rows(log: object) -> list[int]:
    """Write all rows to the disk and wait. Returns a failure as `wait_rows`."""

def close_row_log(log: object) -> None:
    """Wait for transfers. The file descriptor may be closed afterwards."""

def row_log_numbers(log: object) -> list[int]:
    """Return memory, file size, number of written rows, and the counters."""

def row_layout(record_bytes: int, block_bytes: int, segment_bytes: int) -> list[int]:
    """Return bytes of an entry and a group, entries of a group, bytes and entries of a segment, and a sum of bytes.

    The last number is the sum of bytes read for each entry of a segment alone.
    """

def crc32c(data: NDArray[np.uint8], begin: int, by_table: bool) -> int:
    """Return the checksum of bytes after a previous one. `by_table` avoids the processor's instruction."""

def file_backing_store(log: object) -> object:
    """Return a row file as the backing store of a cache."""

def memory_backing_store(records: NDArray[np.uint8], is_written: NDArray[np.bool_]) -> object:
    """Return memory of the caller as a backing store."""

def open_row_cache(
    rows: NDArray[np.int64],
    num_slots: int,
    num_ghosts: int,
    half_lives: list[int],
    backing_store: object,
    fields: list[tuple[int, int, int]],
) -> object:
    """Open a cache. `rows` has the row of each slot. `fields` are (address, bytes per row, rows)."""

def pin_rows(
    caches: list[object],
    rows: NDArray[np.int64],
    bounds: list[int],
    cache_indices: list[int],
    slots: NDArray[np.int64],
    read_only: bool,
    num_threads: int,
) -> tuple[object | None, list[int]]:
    """Pin segments of rows, each in one cache. Returns the batch, or the reason why nothing was pinned.

    The reason is (cache, rows, missing rows, slots that others need), or a cache and a failure (see `wait_rows`).
    """

def wait_for_rows(
    pinned: object, num_threads: int
) -> tuple[list[int], list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]]:
    """Return cache and failure of the first failed read, and (cache, rows, slots) of unwritten rows."""

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
    """Return (evicted rows, their slots, fetched rows, their slots, records, is_written) of a cache without fields."""

def num_pinned_rows(pinned: object, index: int) -> tuple[int, int]:
    """Return (distinct rows, missing rows) of a cache."""

def unpin_rows(pinned: object) -> None: ...
def find_in_cache(cache: object, rows: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> None: ...
def dirty_slots(cache: object) -> NDArray[np.int64]: ...
def write_back_slots(cache: object, slots: NDArray[np.int64]) -> list[int]: ...
def clean_slots(cache: object, slots: NDArray[np.int64]) -> None: ...
def row_cache_numbers(cache: object) -> list[int]:
    """Return memory, number of pinned slots, and the numbers of CacheCounters."""
