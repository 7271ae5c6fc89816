"""Vocabularies: count the values of the training split in bounded memory and assign rows to the frequent ones."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.records import SparseFeature
from meseta.data.hash_categories import hash_categories
from meseta.errors import error_summary
from meseta.spec import MesetaError
from meseta.system.files import resolve_inside, to_file_name

VOCABULARY_FOLDER = "vocabulary"
_COUNTED_SCHEMA = pa.schema([("value", pa.large_binary()), ("count", pa.int64())])
_NUM_PARTITIONS = 32


@dataclass(frozen=True)
class Vocabulary:
    """Map from the values of one feature to rows. Values outside the vocabulary have row 0, the most frequent one row
    1."""

    num_embeddings: int
    path: str
    """Path of the Parquet file with the columns value, id and count, relative to the dataset."""
    hashes: NDArray[np.uint64]
    """Hashes [num_embeddings - 1] of the values in ascending order."""
    ids: NDArray[np.int64]
    """Rows [num_embeddings - 1] of the values in the order of `hashes`."""
    digest: str
    """`values_digest` of the values in the order of their rows."""

    def lookup(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the rows of hashed values, int64 [nnz]."""
        # Only hashes are compared, so another value gets a wrong row with probability V / 2**64 for V values.
        if not self.hashes.size:
            return np.zeros(hashes.size, np.int64)
        at = np.minimum(np.searchsorted(self.hashes, hashes), self.hashes.size - 1)
        return np.where(self.hashes[at] == hashes, self.ids[at], 0)


def count_values(values: pa.Array) -> pa.Table:
    """Count the distinct values of a block. Columns of the result: value (large_binary) and count (int64)."""
    counted = pc.value_counts(values.cast(pa.large_binary()))
    return pa.table([counted.field("values"), counted.field("counts")], schema=_COUNTED_SCHEMA)


def read_vocabulary_values(folder: Path, feature: SparseFeature) -> pa.Array:
    """Return the values of a vocabulary as large_binary [num_embeddings]. Row 0 is null. `folder` is the dataset
    folder.

    Raises MesetaError if the file cannot be read, or if its values are not those from which the ids were made.
    """
    path = folder / (feature.vocabulary or "")
    try:
        place = resolve_inside(folder, feature.vocabulary or "")
        values = combine_chunks(pq.read_table(place, columns=["value"])["value"].cast(pa.large_binary()))
    except (pa.ArrowException, OSError, KeyError) as error:
        raise MesetaError(
            f"vocabulary {str(path)!r} cannot be read ({error_summary(error)}); prepare the dataset again"
        ) from None
    if feature.vocabulary_digest not in (None, values_digest(values[1:])):
        raise MesetaError(
            f"vocabulary {str(path)!r} is not the one that the ids of {feature.name!r} were made with: its values have "
            "changed since; prepare the dataset again"
        )
    return values


def values_digest(values: pa.Array) -> str:
    """Return the SHA-256 of values in their order, in hexadecimal. Text is hashed as UTF-8."""
    # The hash covers the lengths in bytes (int64, little-endian) first, so that ["ab", "c"] and ["a", "bc"] differ.
    whole = values.cast(pa.large_binary()).fill_null(b"")
    lengths = pc.binary_length(whole).to_numpy(zero_copy_only=False).astype("<i8")
    digest = hashlib.sha256(lengths)
    if len(whole):
        first, last = whole.offset, whole.offset + len(whole)
        offsets = np.frombuffer(whole.buffers()[1], np.int64)
        digest.update(memoryview(whole.buffers()[2] or b"")[offsets[first] : offsets[last]])
    return digest.hexdigest()


def load_vocabulary(folder: Path, feature: SparseFeature, hash_seed: int) -> Vocabulary:
    """Load the vocabulary of an earlier dataset in `folder`, for values that are hashed with `hash_seed`.

    Raises MesetaError if the file cannot be read, or does not belong to the feature.
    """
    values = read_vocabulary_values(folder, feature)
    if len(values) != feature.num_embeddings or values.null_count != 1 or values[0].is_valid:
        raise MesetaError(
            f"vocabulary {str(folder / (feature.vocabulary or ''))!r} must have {feature.num_embeddings} rows, and "
            "only the first one without a value; prepare the dataset again"
        )
    return _make_vocabulary(feature.name, feature.vocabulary or "", values[1:], hash_seed)


def _make_vocabulary(feature: str, path: str, values: pa.Array, hash_seed: int) -> Vocabulary:
    """Create a vocabulary of `values` in the order of their rows. Raises MesetaError if two have the same 64-bit
    hash."""
    hashes = hash_categories(values, hash_seed)
    # Sorted for the binary search in `lookup`.
    order = np.argsort(hashes)
    if (np.diff(hashes[order]) == 0).any():
        raise MesetaError(f"vocabulary of {feature!r}: two values have the same hash; choose another --seed")
    return Vocabulary(len(values) + 1, path, hashes[order], order + 1, values_digest(values))


class VocabularyCounter:
    """Counter of the values of one feature in bounded memory.

    Tables of counts are merged when the size of the pending tables has doubled. Above `budget_bytes` they are spilled
    to disk, partitioned by hash. The memory is bounded by the budget and the final vocabulary.
    """

    def __init__(self, feature: str, spill_dir: Path, budget_bytes: int) -> None:
        self._feature = feature
        self._spill_dir = spill_dir
        self._budget_bytes = budget_bytes
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self._merged_bytes = 0
        self._spills: list[str] = []
        """Names of the files in `spill_dir`. Each has one record batch per partition."""

    def add(self, counted: pa.Table) -> None:
        """Add a table from `count_values`."""
        self._pending.append(counted)
        self._pending_bytes += counted.nbytes
        if self._pending_bytes > max(2 * self._merged_bytes, self._budget_bytes // 4):
            merged = _merge(self._pending)
            self._pending, self._pending_bytes, self._merged_bytes = [merged], merged.nbytes, merged.nbytes
            if merged.nbytes > self._budget_bytes // 2:
                self._spill(merged)

    def finish(self, dataset_dir: Path, min_count: int, hash_seed: int) -> Vocabulary:
        """Write `dataset_dir`/vocabulary/<feature>.parquet and return the vocabulary.

        Values with a count below `min_count` are left out. Row 0 of the file has a null value and the number of
        training lookups of all these values. Raises MesetaError if two values in the vocabulary have the same 64-bit
        hash.
        """
        num_lookups = 0
        kept = [_COUNTED_SCHEMA.empty_table()]
        # Equal values are in the same partition, so one partition at a time is enough to decide which values to keep.
        for tables in self._partitions():
            merged = _merge(tables)
            num_lookups += pc.sum(merged["count"]).as_py() or 0
            kept.append(merged.filter(pc.greater_equal(merged["count"], min_count)))
        # Ties are sorted by value, so that the rows do not depend on the order of the blocks.
        table = pa.concat_tables(kept).sort_by([("count", "descending"), ("value", "ascending")]).combine_chunks()
        path = f"{VOCABULARY_FOLDER}/{to_file_name(self._feature)}.parquet"
        _write(dataset_dir / path, table, num_lookups)
        return _make_vocabulary(self._feature, path, combine_chunks(table["value"]), hash_seed)

    def get_state(self) -> list[str]:
        """Spill all counts to disk and return the names of the files. `set_state` of another counter continues from
        them."""
        if self._pending:
            self._spill(_merge(self._pending))
        return list(self._spills)

    def set_state(self, state: Sequence[str]) -> None:
        self._spills = list(state)

    def _partitions(self) -> Iterator[list[pa.Table]]:
        if not self._spills:
            yield self._pending
            return
        self.get_state()
        for index in range(_NUM_PARTITIONS):
            yield [_read(self._spill_dir / name, index) for name in self._spills]

    def _spill(self, merged: pa.Table) -> None:
        partition = hash_categories(combine_chunks(merged["value"])) % np.uint64(_NUM_PARTITIONS)
        name = f"{to_file_name(self._feature)}-{len(self._spills)}.arrow"
        with pa.OSFile(str(self._spill_dir / name), "wb") as sink, pa.ipc.new_file(sink, _COUNTED_SCHEMA) as writer:
            for index in range(_NUM_PARTITIONS):
                part = merged.filter(pa.array(partition == index))
                writer.write_batch(
                    pa.record_batch([combine_chunks(part[column]) for column in part.column_names], _COUNTED_SCHEMA)
                )
        self._spills.append(name)
        self._pending, self._pending_bytes, self._merged_bytes = [], 0, 0


def _merge(tables: list[pa.Table]) -> pa.Table:
    if not tables:
        return _COUNTED_SCHEMA.empty_table()
    summed = pa.concat_tables(tables).group_by("value", use_threads=False).aggregate([("count", "sum")])
    return summed.select(["value", "count_sum"]).rename_columns(["value", "count"]).cast(_COUNTED_SCHEMA)


def _read(path: Path, partition: int) -> pa.Table:
    with pa.OSFile(str(path), "rb") as file:
        return pa.Table.from_batches([pa.ipc.open_file(file).get_batch(partition)])


def combine_chunks(column: pa.ChunkedArray) -> pa.Array:
    """Return the column as a single array."""
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _write(path: Path, kept: pa.Table, num_lookups: int) -> None:
    path.parent.mkdir(exist_ok=True)
    value = pa.concat_arrays([pa.nulls(1, pa.large_binary()), combine_chunks(kept["value"])])
    # Store valid UTF-8, as in click logs, as strings, and other values as bytes.
    with contextlib.suppress(pa.ArrowInvalid):
        value = value.cast(pa.large_string())
    unknown = num_lookups - (pc.sum(kept["count"]).as_py() or 0)
    count = pa.concat_arrays([pa.array([unknown], pa.int64()), combine_chunks(kept["count"])])
    pq.write_table(pa.table({"value": value, "id": pa.array(np.arange(len(count))), "count": count}), path)
