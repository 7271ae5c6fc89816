"""Types of the compiled core."""

from collections.abc import Sequence
from typing import Any

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

def scan_whole_numbers(data: NDArray[np.uint8], offsets: NDArray[np.int32] | NDArray[np.int64]) -> tuple[int, int]:
    """Return how many strings `respell_whole_numbers` changes, and how many are no whole numbers."""

def respell_whole_numbers(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int32] | NDArray[np.int64],
    out: NDArray[np.uint8],
    out_offsets: NDArray[np.int64],
) -> int:
    """Write n strings, whole numbers in their usual spelling, to out by out_offsets [n + 1]. Return the bytes written;
    a changed string needs room for 21."""

def parse_tsv(
    raw: NDArray[np.uint8],
    label: NDArray[np.float32],
    dense: NDArray[np.float64],
    offsets: NDArray[np.int32],
    data: NDArray[np.uint8],
    firsts: NDArray[np.int64],
) -> bool:
    """Cut lines of 1 + 13 + 26 fields into label [n], dense [13, n] with missing and negative numbers as 0, and strings
    in data [len(raw)], those of feature k from firsts[k] on by offsets [26, n + 1]; False for an unusual line."""

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
    """As `uniform_rows`, of any rows."""

def start_heartbeat(descriptor: int, offset: int, interval_s: float) -> None:
    """Begin a thread that writes (monotonic time, processor time) in ns to 16 bytes of an open file."""

def stop_heartbeat() -> None:
    """End it, if there is one."""

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
    tables: list[int],
    ids: NDArray[np.int64],
    bounds: list[int],
    level: int,
    distance: int,
    burst: int,
    num_threads: int,
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

def place_columns(
    out: list[int], sources: list[int], moves: list[int], scale: float, wide: bool, num_threads: int
) -> None:
    """Copy or add columns; `out` is (address, rows, columns, numbers from row to row), `sources` the same without rows,
    `moves` (source, first column, first column of `out`, columns, whether to add) of each. `wide`: float64."""

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
    """Place columns and encode them; `out` is (address, rows, bytes of a row), `layout` codec, exponent, and the number
    of pieces and their widths, `random` keys, first columns and the first row, or nothing, `counted` the addresses of
    the numbers of rows and of the count of numbers that are too large, or 0."""

def decode_columns(
    out: list[int], sources: list[int], moves: list[int], layout: list[int], scale: float, num_threads: int
) -> None:
    """The way back; `out` is (address, rows, columns, numbers from row to row), `sources` addresses."""

def lengths_to_offsets(lengths: int, count: int, wide: bool, offsets: int, num_threads: int) -> None:
    """Write count + 1 offsets."""

def quantize_rows(
    rows: int, kind: int, shape: list[int], format: int, adaptive: bool, origin: list[int], codes: int, num_threads: int
) -> None:
    """Write the bytes of rows; `origin`: key, first row and first column of the random bits, or nothing."""

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
    """Fill out [rows, columns] with scale * (2 u - 1), u the 24 high bits of the cell's word of `random_bits`."""

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
    """Write the bags of each feature side by side; `tables` has (address, rows, columns, flags) of each, and num_bags
    counts those of one feature."""

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
    """Step the rows that the batch touched; see read_tables and add_features in row_update/cpu.cpp for the lists."""

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
    """Step the given rows of one table, or write the block sums of a stage where `summands` is not 0."""

def dot_interaction(
    num_samples: int, num_features: int, dim: int, bfloat: bool, x: int, pooled: int, out: int, num_threads: int
) -> None:
    """Write x and the products of pairs; `bfloat`: x and out are bfloat16, here and below."""

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
    """Write the gradient before the ReLU, its transpose and its sum over samples; 0 for what is not wanted."""

def product(
    kind: int,
    shape: Sequence[int],
    addresses: Sequence[int],
    a_strides: Sequence[int],
    b_strides: Sequence[int],
    num_threads: int,
) -> None:
    """Write a b + bias; shape is (batch, rows, columns, terms), addresses are those of a, b, bias (0: none), result."""

def allocate(bytes: int, keep: bool) -> Any:
    """A block on 2 MB pages, for torch.from_dlpack; `keep`: a freed one serves the next request."""

def release_idle_memory() -> None:
    """Freed blocks that were kept go to the system."""

def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed."""

def slot_map(capacity: int, wide: bool) -> object:
    """A map from 64-bit keys to slots; slots reach 2**32 - 2, `wide` 2**63 - 2."""

def slot_map_find(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> None:
    """Write the slot of each key, -1 where it is absent."""

def slot_map_insert(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> int:
    """Put keys; how many are new."""

def slot_map_remove(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> None:
    """Take keys out, and write the slot that each had."""

def slot_map_items(directory: object, keys: NDArray[np.int64], slots: NDArray[np.int64]) -> int:
    """Write all keys and slots; how many there are."""

def slot_map_size(directory: object) -> int: ...
def slot_map_bytes(directory: object) -> int: ...
def eviction(num_slots: int, num_ghosts: int, half_lives: list[int]) -> object:
    """Scores of a cache and of rows that left it; half-lives in lookups, the first one until trials tell another."""

def eviction_touch(policy: object, slots: NDArray[np.int64], rows: NDArray[np.int64], num_lookups: int) -> None:
    """Rows in slots were asked for."""

def eviction_admit(policy: object, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Give slots the scores that were kept of rows."""

def eviction_choose(policy: object, rows: NDArray[np.int64], pins: NDArray[np.int32], out: NDArray[np.int64]) -> bool:
    """Write slots of least score and keep their scores; whether as many have no pin."""

def eviction_bytes(policy: object) -> int: ...
def eviction_half_life(policy: object) -> int: ...
def io_uring_error() -> int:
    """0 where the system makes a ring for io_uring, else its error; -1 where the core was built without."""

def open_row_engine(io_uring: bool, depth: int, max_reads_per_s: float) -> object:
    """An engine with that many reads in flight at most; 0 reads a second are no limit."""

def limit_row_engine(engine: object, max_reads_per_s: float) -> None:
    """Change the limit of an engine."""

def row_engine_latencies(engine: object) -> list[int]:
    """Reads by what they took: eight steps for each power of two of nanoseconds, from 8 on."""

def row_engine_bytes(engine: object) -> int:
    """Memory of its buffers."""

def open_row_log(engine: object, descriptor: int, rows: int, sizes: Sequence[int], salt: int) -> object:
    """Rows in an open file, none so far; `sizes` are bytes of a record, of a block and, at least, of a segment."""

def write_rows(log: object, rows: NDArray[np.int64], values: Sequence[NDArray[np.uint8]]) -> list[int]:
    """Put rows with their values, [n, bytes] each, which side by side are their records; a failure (see `wait_rows`),
    and how many were taken."""

def read_rows(log: object, rows: NDArray[np.int64], out: NDArray[np.uint8], is_written: NDArray[np.bool_]) -> object:
    """Begin to read rows into `out` and `is_written`."""

def read_snapshot_rows(
    snapshot: object,
    first: int,
    listed: NDArray[np.int64] | None,
    values: Sequence[NDArray[np.uint8]],
    is_written: NDArray[np.bool_],
) -> object:
    """Begin to read as many frozen rows as `is_written` has: from `first` on, or those that are listed; their values as
    `write_rows` takes them."""

def wait_rows(reading: object) -> list[int]:
    """Wait for a read; its failure: kind, 0 for none, error of the system, row, byte of the file, whether written."""

def rows_are_read(reading: object) -> bool:
    """Whether waiting would take no time."""

def snapshot_rows(log: object) -> object:
    """The rows as they are, until this dies."""

def flush_rows(log: object) -> list[int]:
    """Send all to disk and wait; a failure as of `wait_rows`."""

def close_row_log(log: object) -> None:
    """Wait for what is in flight; the file may be closed then."""

def row_log_numbers(log: object) -> list[int]:
    """Memory, bytes of the file, rows, and the counters."""

def row_layout(record_bytes: int, block_bytes: int, segment_bytes: int) -> list[int]:
    """Bytes of an entry and a group, entries of a group, bytes and entries of a segment, and the sum of the bytes that
    are read for each entry of a segment alone."""

def crc32c(data: NDArray[np.uint8], begin: int, by_table: bool) -> int:
    """The checksum of bytes, begun with another; `by_table`: without the processor's instruction."""

def file_backing_store(log: object) -> object:
    """A file of rows as the far side of a cache."""

def memory_backing_store(records: NDArray[np.uint8], is_written: NDArray[np.bool_]) -> object:
    """Memory of the caller as one."""

def open_row_cache(
    rows: NDArray[np.int64],
    num_slots: int,
    num_ghosts: int,
    half_lives: list[int],
    backing_store: object,
    fields: list[tuple[int, int, int]],
) -> object:
    """A cache; `rows` are those of its slots and of slots to read. Fields: address, bytes of a row, rows."""

def pin_rows(
    caches: list[object],
    rows: NDArray[np.int64],
    bounds: list[int],
    cache_indices: list[int],
    slots: NDArray[np.int64],
    read_only: bool,
    num_threads: int,
) -> tuple[object | None, list[int]]:
    """Pin segments of rows, each in one cache. Or why not: cache, rows, missing ones, those of others; or cache and
    failure (see `wait_rows`)."""

def wait_for_rows(
    pinned: object, num_threads: int
) -> tuple[list[int], list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]]:
    """Cache and failure of the first that failed; caches, rows and slots of rows that were never written."""

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
    """Of a cache without fields: rows and slots that leave, those that come, records, which were ever written."""

def num_pinned_rows(pinned: object, index: int) -> tuple[int, int]:
    """Distinct rows of a cache, and those that were missing."""

def unpin_rows(pinned: object) -> None: ...
def find_in_cache(cache: object, rows: NDArray[np.int64], slots: NDArray[np.int64], num_threads: int) -> None: ...
def dirty_slots(cache: object) -> NDArray[np.int64]: ...
def write_back_slots(cache: object, slots: NDArray[np.int64]) -> list[int]: ...
def clean_slots(cache: object, slots: NDArray[np.int64]) -> None: ...
def row_cache_numbers(cache: object) -> list[int]:
    """Bytes, slots that are pinned, and the numbers of CacheCounters."""
