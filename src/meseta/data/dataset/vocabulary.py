"""Vocabularies: map values to rows, and count the values of the training split in bounded memory."""

from __future__ import annotations

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
    """Map from the values of one feature to rows. Values outside the vocabulary have row 0."""

    num_embeddings: int
    """Number of rows: row 0, one per value, and freed rows."""
    path: str
    """Path of the Parquet file with the columns value, id, count and last, relative to the dataset."""
    hashes: NDArray[np.uint64]
    """Hashes [num_values] of the values in ascending order."""
    ids: NDArray[np.int64]
    """Rows [num_values] of the values in the order of `hashes`."""
    digest: str
    """`values_digest` of the values in the order of their rows."""
    candidates: str | None = None
    """Path of the file with the counts of values without a row, relative to the dataset."""
    num_added: int = 0
    """Number of values that the last part added to those of earlier parts."""
    num_retired: int = 0
    """Number of values of earlier parts that lost their row."""

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
    """Return the values of a vocabulary as large_binary [num_embeddings]. Row 0 and freed rows are null. `folder` is
    the dataset folder.

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
    """Return the SHA-256 of values in their order, in hexadecimal. Text is hashed as UTF-8. Null is a freed row."""
    # The hash covers the lengths in bytes (int64, little-endian) first, so that ["ab", "c"] and ["a", "bc"] differ. The
    # length -1 of a freed row differs from that of an empty value.
    lengths = pc.binary_length(values.cast(pa.large_binary())).fill_null(-1)
    lengths = lengths.to_numpy(zero_copy_only=False).astype("<i8")
    whole = values.cast(pa.large_binary()).fill_null(b"")
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
    return make_vocabulary(feature.name, feature.vocabulary or "", read_table_values(folder, feature), hash_seed)


def read_table_values(folder: Path, feature: SparseFeature) -> pa.Array:
    """Return the result of `read_vocabulary_values`. Raises MesetaError as it does, and if the number of rows differs
    from that of the table."""
    values = read_vocabulary_values(folder, feature)
    # Freed rows change the digest. A vocabulary without a digest is of a version that freed no rows.
    num_nulls = values.null_count if feature.vocabulary_digest is not None else 1
    if len(values) != feature.num_embeddings or values.null_count != num_nulls or values[0].is_valid:
        raise MesetaError(
            f"vocabulary {str(folder / (feature.vocabulary or ''))!r} must have {feature.num_embeddings} rows, and "
            "only the first one without a value; prepare the dataset again"
        )
    return values


def make_vocabulary(
    feature: str, path: str, values: pa.Array, hash_seed: int, candidates: str | None = None
) -> Vocabulary:
    """Create a vocabulary of `values` [num_embeddings], which are null for row 0 and freed rows.

    Raises MesetaError if two values have the same 64-bit hash.
    """
    ids = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    hashes = hash_categories(values.drop_null(), hash_seed)
    # Sorted for the binary search in `lookup`.
    order = np.argsort(hashes)
    if (np.diff(hashes[order]) == 0).any():
        raise MesetaError(f"vocabulary of {feature!r}: two values have the same hash; choose another --seed")
    return Vocabulary(len(values), path, hashes[order], ids[order], values_digest(values[1:]), candidates)


class VocabularyCounter:
    """Counter of the values of one feature in bounded memory.

    Tables of counts are merged when the size of the pending tables has doubled. Above `budget_bytes` they are spilled
    to disk, partitioned by hash.
    """

    def __init__(self, feature: str, spill_dir: Path, budget_bytes: int, hash_seed: int = 0) -> None:
        self._feature = feature
        self._spill_dir = spill_dir
        self._budget_bytes = budget_bytes
        self._hash_seed = hash_seed
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

    def partitions(self) -> Iterator[pa.Table]:
        """Yield tables with the columns value and count. All values with one hash are in the same table."""
        if not self._spills:
            yield _merge(self._pending)
            return
        self.get_state()
        for index in range(_NUM_PARTITIONS):
            yield _merge([_read(self._spill_dir / name, index) for name in self._spills])

    def get_state(self) -> list[str]:
        """Spill all counts to disk and return the names of the files. `set_state` of another counter continues from
        them."""
        if self._pending:
            self._spill(_merge(self._pending))
        return list(self._spills)

    def set_state(self, state: Sequence[str]) -> None:
        self._spills = list(state)

    def _spill(self, merged: pa.Table) -> None:
        partition = hash_categories(combine_chunks(merged["value"]), self._hash_seed) % np.uint64(_NUM_PARTITIONS)
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
