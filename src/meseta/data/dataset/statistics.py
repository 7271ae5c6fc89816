"""Statistics of sparse features for the planner: distinct rows, pooling factors and reuse."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset, SourceForm
from meseta.data.dataset.records import DenseFeature, LookupCounts, SparseFeature, SparseStatistics
from meseta.data.dataset.vocabulary import Vocabulary
from meseta.data.formats.format import RawFormat
from meseta.data.schema.layout import RawLayout, SparseColumn
from meseta.errors import error_summary
from meseta.spec import MesetaError, Reuse
from meseta.system.files import MAX_DOCUMENT_BYTES, MAX_DOCUMENT_VALUES, count_json_values

WINDOW_SAMPLES = 65_536
REUSE_EDGES = (0, *(2**i for i in range(16)))
MAX_BITMAP_ROWS = 1 << 30
"""Largest table for which the distinct rows are counted with one bit per row."""


@runtime_checkable  # beartype asks for it where the tests check every call
class WindowCounter(Protocol):
    """Thread-safe counter of the ids of one sparse feature. Windows may be added in any order."""

    def add_window(self, ids: NDArray[np.integer], num_samples: int) -> None:
        """Count the ids [nnz] of `num_samples` consecutive samples."""

    def get_state(self) -> tuple[list[int], bytes]:
        """Return the counts, from which `set_state` of another counter continues."""

    def set_state(self, numbers: Sequence[int], seen: bytes) -> None:
        """Restore the result of `get_state`."""


class FeatureStatistics:
    """Thread-safe statistics of one sparse feature. Windows may be added in any order.

    The memory does not depend on the number of samples: one bit per row of the table, or 8 bytes per distinct row if
    the table has more than 2**30 rows.
    """

    def __init__(self, num_embeddings: int) -> None:
        self._num_embeddings = num_embeddings
        self._seen = _SortedRows() if num_embeddings > MAX_BITMAP_ROWS else _Bitmap(num_embeddings)
        self._num_samples = 0
        self._num_lookups = 0
        self._rows = np.zeros(len(REUSE_EDGES), np.int64)
        self._lookups = np.zeros(len(REUSE_EDGES), np.int64)
        self._lock = threading.Lock()

    def add_window(self, ids: NDArray[np.integer], num_samples: int) -> None:
        """Count the ids [nnz] of at most 65,536 consecutive samples."""
        uniques, counts = _count_ids(ids, self._num_embeddings)
        bins = np.searchsorted(REUSE_EDGES[1:], counts, side="left")
        rows = np.bincount(bins, minlength=len(REUSE_EDGES))
        lookups = np.bincount(bins, weights=counts, minlength=len(REUSE_EDGES)).astype(np.int64)
        # Only the updates need the lock. The sorting above runs in parallel.
        with self._lock:
            self._seen.add(uniques)
            self._num_samples += num_samples
            self._num_lookups += ids.size
            self._rows += rows
            self._lookups += lookups

    def get_state(self) -> tuple[list[int], bytes]:
        """Return (numbers as plain data, state of the distinct rows as bytes). `set_state` continues from both."""
        with self._lock:
            numbers = [self._num_samples, self._num_lookups, *self._rows.tolist(), *self._lookups.tolist()]
            return numbers, self._seen.get_state()

    def set_state(self, numbers: Sequence[int], seen: bytes) -> None:
        self._num_samples, self._num_lookups = numbers[:2]
        self._rows, self._lookups = np.array(numbers[2:], np.int64).reshape(2, len(REUSE_EDGES))
        self._seen.set_state(seen)

    def touched_bits(self) -> NDArray[np.uint8] | None:
        """Return one bit per row of the table, set if the row was looked up. The lowest bit of the first byte is row 0.

        Returns `None` for tables without a bitmap. The result is not a copy.
        """
        return self._seen.bits if isinstance(self._seen, _Bitmap) else None

    def result(self) -> SparseStatistics:
        """Return the statistics of all windows added so far."""
        return SparseStatistics(
            num_rows=self._num_samples,
            num_lookups=self._num_lookups,
            num_uniques=self._seen.count(),
            mean_pooling_factor=self._num_lookups / max(self._num_samples, 1),
            reuse=Reuse(
                window_samples=WINDOW_SAMPLES,
                edges=REUSE_EDGES,
                rows=tuple((self._rows / max(self._rows.sum(), 1)).tolist()),
                lookups=tuple((self._lookups / max(self._num_lookups, 1)).tolist()),
            ),
        )


class _Bitmap:
    def __init__(self, num_rows: int) -> None:
        self.bits = np.zeros(-(-num_rows // 8), np.uint8)
        self._count = 0

    def add(self, rows: NDArray[np.integer]) -> None:
        """Add distinct rows in ascending order."""
        byte = rows >> 3
        # Several rows may share a byte. Combine their bits first, because an indexed assignment keeps only the last
        # write to a byte.
        first = _run_starts(byte)
        if first.size:
            bits = np.left_shift(1, rows & 7).astype(np.uint8)
            before = self.bits[byte[first]]
            after = before | np.bitwise_or.reduceat(bits, first)
            self.bits[byte[first]] = after
            self._count += int(np.unpackbits(before ^ after).sum())

    def count(self) -> int:
        return self._count

    def get_state(self) -> bytes:
        return self.bits.tobytes()

    def set_state(self, state: bytes) -> None:
        self.bits = np.frombuffer(state, np.uint8).copy()
        self._count = int(np.unpackbits(self.bits).sum())


class _SortedRows:
    """Set of distinct rows in sorted runs. Each run is more than twice as long as the next."""

    def __init__(self) -> None:
        self._runs: list[NDArray[np.int64]] = []

    def add(self, rows: NDArray[np.integer]) -> None:
        self._runs.append(rows.astype(np.int64))
        # Each row then takes part in a logarithmic number of merges.
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._runs.append(np.union1d(self._runs.pop(), self._runs.pop()))

    def count(self) -> int:
        while len(self._runs) > 1:
            self._runs.append(np.union1d(self._runs.pop(), self._runs.pop()))
        return len(self._runs[0]) if self._runs else 0

    def get_state(self) -> bytes:
        self.count()
        return self._runs[0].tobytes() if self._runs else b""

    def set_state(self, state: bytes) -> None:
        self._runs = [np.frombuffer(state, np.int64)]


class Moments:
    """Mean and standard deviation of several columns over windows. Source: Chan, Golub, LeVeque, "Algorithms for
    computing the sample variance", 1983."""

    def __init__(self, num_columns: int) -> None:
        self._count = 0
        self._mean = np.zeros(num_columns)
        self._squares = np.zeros(num_columns)

    def add(self, columns: list[NDArray[np.float32]]) -> None:
        """Add a window of samples, one float32 array [n] per column. The order of windows affects the last bits."""
        if not columns or not columns[0].size:
            return
        count = columns[0].size
        mean = np.array([column.mean(dtype=np.float64) for column in columns])
        squares = np.array([np.square(c - m, dtype=np.float64).sum() for c, m in zip(columns, mean, strict=True)])
        total = self._count + count
        shift = mean - self._mean
        self._mean += shift * (count / total)
        self._squares += squares + shift**2 * (self._count * count / total)
        self._count = total

    def get_state(self) -> dict[str, Any]:
        """Return plain data that JSON stores without rounding. `set_state` of another object continues from it."""
        return {"count": self._count, "mean": self._mean.tolist(), "squares": self._squares.tolist()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._count = state["count"]
        self._mean, self._squares = np.array(state["mean"], np.float64), np.array(state["squares"], np.float64)

    @property
    def mean(self) -> NDArray[np.float64]:
        return self._mean

    @property
    def std(self) -> NDArray[np.float64]:
        """Population standard deviation of each column, or 1 if the column is constant."""
        std = np.sqrt(self._squares / max(self._count, 1))
        return np.where(std > 0, std, 1.0)


def _count_ids(ids: NDArray[np.integer], num_embeddings: int) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    if num_embeddings <= 4 * ids.size:  # One counter per row is then cheaper than sorting.
        per_row = np.bincount(ids, minlength=num_embeddings)
        uniques = np.flatnonzero(per_row)
        return uniques, per_row[uniques]
    ordered = np.sort(ids)
    starts = _run_starts(ordered)
    return ordered[starts], np.diff(np.append(starts, ordered.size))


def _run_starts(ordered: NDArray[np.integer]) -> NDArray[np.int64]:
    if not ordered.size:
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


MIN_LOOKUPS = 1_000
"""Minimum number of lookups of a feature in new rows for an error."""
MIN_ERROR_SHARE = 0.99
"""Minimum unseen share of new rows for an error."""
MAX_TEST_SHARE = 0.5
"""Unseen share of the test split at and above which there is no error."""
MIN_WARNING_SHARE = 0.5
"""Unseen share of new rows at and below which there is no warning."""
MIN_WARNING_FACTOR = 2.0
"""Minimum ratio of the unseen share of new rows to that of the test split for a warning."""
CHECK_SPELLING_REMEDY = "check that the files spell values like the training files (encoding, number format, prefixes)"


def count_unseen(ids: NDArray[np.integer], seen: NDArray[np.uint8] | None) -> int:
    """Return the number of ids [nnz] that belong to unseen values.

    `seen` has one bit per row of a hashed table, as `read_touched` returns it. `None` means that the feature has a
    vocabulary, where unseen values have row 0.
    """
    is_seen = ids if seen is None else seen.take(ids >> 3) >> (ids.astype(np.uint8) & 7) & 1
    return ids.size - int(np.count_nonzero(is_seen))


class LookupCounter:
    """Thread-safe counter of the lookups of one feature in the test split, and of the unseen values among them."""

    def __init__(self, training: FeatureStatistics | None, earlier: NDArray[np.uint8] | None = None) -> None:
        """Create an empty counter.

        `training` is the statistics of a hashed feature. It must be complete before the first window is added. `None`
        means that the feature has a vocabulary. `earlier` is the rows that earlier parts looked up, like
        `FeatureStatistics.touched_bits`.
        """
        self._training = training
        self._earlier = earlier
        self._num_lookups = self._num_unseen = 0
        self._lock = threading.Lock()

    def add_window(self, ids: NDArray[np.integer], num_samples: int) -> None:
        bits = None if self._training is None else self._training.touched_bits()
        num_unseen = count_unseen(ids, bits if bits is None or self._earlier is None else bits | self._earlier)
        with self._lock:
            self._num_lookups += ids.size
            self._num_unseen += num_unseen

    def get_state(self) -> tuple[list[int], bytes]:
        with self._lock:
            return [self._num_lookups, self._num_unseen], b""

    def set_state(self, numbers: Sequence[int], seen: bytes) -> None:
        self._num_lookups, self._num_unseen = numbers

    def result(self) -> LookupCounts | None:
        """Return the counts of all windows, or `None` if there was no lookup."""
        if not self._num_lookups:
            return None
        return LookupCounts(num_lookups=self._num_lookups, num_unseen=self._num_unseen)


@dataclass(kw_only=True)
class UnseenValues:
    """Numbers of unseen values in new rows, by feature."""

    unseen_counts: Counter[str] = field(default_factory=Counter)
    value_counts: Counter[str] = field(default_factory=Counter)
    """Number of all values of each feature whose unseen values can be counted."""
    uncounted_features: tuple[str, ...] = ()
    """Hashed features whose unseen values cannot be counted, because the dataset does not store their trained rows."""
    test_shares: Mapping[str, float] = field(default_factory=dict)
    """Unseen share in the test split, by feature, if it was recorded."""

    def add(self, other: UnseenValues) -> None:
        self.unseen_counts.update(other.unseen_counts)
        self.value_counts.update(other.value_counts)

    def shares(self) -> list[tuple[str, float]]:
        """Return (feature, unseen share) pairs with the largest share first. Features without values are left out."""
        shares = [(name, self.unseen_counts[name] / number) for name, number in self.value_counts.items() if number]
        return sorted(shares, key=lambda pair: -pair[1])

    def warnings(self) -> list[str]:
        """Return a warning for each feature whose share is far above that of the test split, in descending order."""
        names = [name for name, share in self.shares() if self._is_warning(name, share)]
        return [f"{self._describe(name)}; {CHECK_SPELLING_REMEDY}" for name in names]

    def check(self, command: str = "predict") -> None:
        """Raise MesetaError if almost all values of a feature are unseen and its test split does not explain it. The
        message names the command."""
        names = [name for name, share in self.shares() if self._is_error(name, share)]
        if names:
            suffix = f", and so are those of {len(names) - 1:,} other features" if len(names) > 1 else ""
            raise MesetaError(
                f"{command}: {self._describe(names[0])}{suffix}; {CHECK_SPELLING_REMEDY}, or {command} with "
                "--allow-unseen"
            )

    def _is_error(self, name: str, share: float) -> bool:
        test_share = self.test_shares.get(name, 1.0)
        return self.value_counts[name] >= MIN_LOOKUPS and share >= MIN_ERROR_SHARE and test_share < MAX_TEST_SHARE

    def _is_warning(self, name: str, share: float) -> bool:
        test_share = self.test_shares.get(name, 0.0)
        return self._is_error(name, share) or (share > MIN_WARNING_SHARE and share >= MIN_WARNING_FACTOR * test_share)

    def _describe(self, name: str) -> str:
        share, test_share = self.unseen_counts[name] / self.value_counts[name], self.test_shares.get(name)
        before = "not stored" if test_share is None else f"{test_share:.2%}"
        return f"{share:.2%} of the {self.value_counts[name]:,} values of {name!r} are unseen (test split: {before})"


TOUCHED_ROWS_FILE = "touched.parquet"
# The bits of the largest table take 8 MiB.
MAX_TOUCHED_TABLE_ROWS = 1 << 26
"""Largest number of table rows for which the bits are stored."""


def write_touched(folder: Path, bits: Mapping[str, NDArray[np.uint8] | None]) -> str | None:
    """Write `folder`/touched.parquet with the columns feature and bits, and return its name.

    Tables that are too large are left out. Returns `None`, and writes nothing, if no table remains.
    """
    kept = {name: one for name, one in bits.items() if one is not None and one.size <= MAX_TOUCHED_TABLE_ROWS // 8}
    if not kept:
        return None
    write_row_bits(folder / TOUCHED_ROWS_FILE, kept)
    return TOUCHED_ROWS_FILE


def write_row_bits(path: Path, bits: Mapping[str, NDArray[np.uint8]]) -> None:
    """Write a Parquet file with the columns feature and bits [ceil(rows / 8)], one bit per row of a table."""
    rows = pa.array([one.tobytes() for one in bits.values()], pa.large_binary())
    table = pa.table({"feature": pa.array(list(bits), pa.string()), "bits": rows})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)


def read_touched(dataset: Dataset) -> dict[str, NDArray[np.uint8]]:
    """Return the bits [ceil(rows / 8)] of each table whose bits are stored. Only hashed features have them.

    Raises MesetaError if the file cannot be read, or if the bits do not fit their table.
    """
    if dataset.touched is None:
        return {}
    sizes = {feature.name: feature.num_embeddings for feature in dataset.sparse if feature.encoding == "hash"}
    return read_row_bits(dataset.resolve_file(dataset.touched), sizes, ignored=dataset.without)


def read_row_bits(
    path: Path, num_rows: Mapping[str, int], *, ignored: Collection[str] = ()
) -> dict[str, NDArray[np.uint8]]:
    """Return the bits of `write_row_bits` by feature, except for `ignored` features.

    Raises MesetaError if the file cannot be read, or has other bits than one for each of the `num_rows` of a feature.
    """
    remedy = "prepare the dataset again"
    try:
        table = pq.read_table(path, columns=["feature", "bits"]).cast(_SCHEMA)
        kept = zip(table["feature"].to_pylist(), table["bits"], strict=True)
        bits = {name: np.frombuffer(one.as_buffer() or b"", np.uint8) for name, one in kept if name not in ignored}
    except (pa.ArrowException, OSError, KeyError) as error:
        raise MesetaError(
            f"dataset file {str(path)!r} cannot be read ({error_summary(error)})", remedy=remedy
        ) from None
    for name, one in bits.items():
        if name not in num_rows or one.size != -(-num_rows[name] // 8):
            raise MesetaError(
                f"dataset file {str(path)!r} has {one.size} bytes for feature {name!r}, which do not match the size of "
                "its table",
                remedy=remedy,
            )
    return bits


_SCHEMA = pa.schema([("feature", pa.string()), ("bits", pa.large_binary())])


@dataclass(frozen=True, kw_only=True)
class FeatureTables:
    """Encodings and statistics of the sparse features, by name."""

    num_embeddings: Mapping[str, int]
    hash_seeds: Mapping[str, int]
    vocabularies: Mapping[str, Vocabulary]
    """Vocabularies by feature. Other features are hashed or bucketized."""
    statistics: Mapping[str, FeatureStatistics]
    test_lookups: Mapping[str, LookupCounter]
    """Counters of the test split, for the features whose unseen values can be counted."""


MAX_DENSE_VALUES, MAX_SPARSE_VALUES, MAX_SOURCE_VALUES = 8, 81, 4
"""Maximum number of JSON values that one feature or one source takes in dataset.json. Boundaries are extra."""
MAX_DENSE_BYTES, MAX_SPARSE_BYTES, MAX_SOURCE_BYTES, MAX_BOUNDARY_BYTES = 256, 2048, 128, 32
"""Maximum number of bytes of such an entry, without names."""
MAX_NAME_OCCURRENCES = 5
"""Maximum number of times that dataset.json contains the name of a column."""
RESERVED_VALUES, RESERVED_BYTES = 20_000, 1 << 20
"""Reserve for the rest of dataset.json, mainly the files of the splits. They take two values per 524,288 rows."""
MAX_CATEGORICAL_FEATURES, MAX_NUMERIC_FEATURES = (
    int(round((MAX_DOCUMENT_VALUES - RESERVED_VALUES) / values, -3)) for values in (MAX_SPARSE_VALUES, MAX_DENSE_VALUES)
)
"""Number of features that fit if all are of one kind, rounded to thousands."""


def check_description_size(where: str, layout: RawLayout, paths: Sequence[str]) -> None:
    """Raise MesetaError with the prefix `where` if dataset.json with these source `paths` could exceed JSON limits."""
    # An age takes up to twice as many values as another dense feature.
    num_dense, num_sparse = len(layout.dense) + len(layout.ages), len(layout.sparse)
    num_sources = len(paths)
    cuts = [column.buckets for column in layout.sparse if column.buckets]
    num_boundaries = sum(max(cut.num_quantiles or 0, len(cut.boundaries)) for cut in cuts)
    made_of = [name for column in layout.sparse for name in column.made_of]
    # As JSON, because escaped characters make names longer.
    names = json.dumps(
        "".join([*layout.sample_columns, *layout.feature_names, *made_of, *layout.header, *paths])
    ).encode()
    num_values = (
        MAX_DENSE_VALUES * num_dense + MAX_SPARSE_VALUES * num_sparse + MAX_SOURCE_VALUES * num_sources + num_boundaries
    )
    num_values += len(made_of) + len(layout.header) + MAX_NAME_OCCURRENCES * count_json_values(names) + RESERVED_VALUES
    num_bytes = MAX_DENSE_BYTES * num_dense + MAX_SPARSE_BYTES * num_sparse + MAX_SOURCE_BYTES * num_sources
    num_bytes += MAX_BOUNDARY_BYTES * num_boundaries + MAX_NAME_OCCURRENCES * len(names) + RESERVED_BYTES
    if num_values > MAX_DOCUMENT_VALUES or num_bytes > MAX_DOCUMENT_BYTES:
        raise MesetaError(
            f"{where}: {num_dense:,} numeric and {num_sparse:,} categorical features are too many for one dataset; "
            f"dataset.json would have up to {num_values:,} values in {num_bytes:,} bytes, but may have "
            f"{MAX_DOCUMENT_VALUES:,} in {MAX_DOCUMENT_BYTES:,}, which is enough for about "
            f"{MAX_CATEGORICAL_FEATURES:,} categorical or {MAX_NUMERIC_FEATURES:,} numeric "
            "features. Leave columns out with --ignore, or select columns with a --schema file"
        )


def describe_dense(layout: RawLayout, mean: NDArray[np.float64], std: NDArray[np.float64]) -> tuple[DenseFeature, ...]:
    """Describe the dense features in the order of the layout, with their means and deviations [num_dense]."""
    columns = zip(layout.dense, mean.tolist(), std.tolist(), strict=True)
    ages = {age.name: age for age in layout.ages}
    return tuple(
        DenseFeature(name=name, fill=0.0, signed=layout.is_signed(name), mean=mean, std=std, age=ages.get(name))
        for name, mean, std in columns
    )


def describe_sparse(layout: RawLayout, tables: FeatureTables) -> tuple[SparseFeature, ...]:
    """Describe the sparse features in the order of the layout."""
    return tuple(_describe(column, tables) for column in layout.sparse)


def make_source_form(layout: RawLayout, raw_format: RawFormat) -> SourceForm:
    """Describe the properties of the raw files that the features do not contain."""
    weights = {column.name: column.weight or column.weight_separator for column in layout.sparse}
    return SourceForm(
        kind=raw_format.name,
        labels=layout.labels,
        label_rules=layout.label_rules,
        group=layout.group,
        delimiter=layout.delimiter,
        header=layout.header if raw_format.is_delimited else (),
        encoding=layout.encoding,
        whole_numbers=layout.whole_numbers,
        number_format=layout.number_format,
        partition_keys=layout.partition_keys,
        separators={column.name: column.separator for column in layout.sparse if column.separator is not None},
        weights={name: sign for name, sign in weights.items() if sign is not None},
    )


def _describe(column: SparseColumn, tables: FeatureTables) -> SparseFeature:
    vocabulary, counter = tables.vocabularies.get(column.name), tables.test_lookups.get(column.name)
    is_hashed = vocabulary is None and column.buckets is None and column.time_part is None
    return SparseFeature(
        name=column.name,
        num_embeddings=tables.num_embeddings[column.name],
        encoding="buckets" if column.buckets else column.time_part or ("vocabulary" if vocabulary else "hash"),
        multi_valued=column.multi_valued,
        weighted=column.weighted,
        hash_seed=hex(tables.hash_seeds[column.name]) if is_hashed else None,
        vocabulary=vocabulary.path if vocabulary else None,
        vocabulary_digest=vocabulary.digest if vocabulary else None,
        candidates=vocabulary.candidates if vocabulary else None,
        num_added=vocabulary.num_added if vocabulary else 0,
        num_retired=vocabulary.num_retired if vocabulary else 0,
        boundaries=column.buckets.boundaries if column.buckets else None,
        made_of=column.made_of,
        statistics=tables.statistics[column.name].result(),
        test_lookups=counter.result() if counter else None,
    )
