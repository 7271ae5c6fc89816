"""Vocabularies: count the values of the training split in bounded memory, give the frequent ones their own rows."""

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

from meseta.data.dataset.dataset import SparseFeature
from meseta.data.hash_categories import hash_categories
from meseta.errors import error_summary
from meseta.machine.files import resolve_inside, to_file_name
from meseta.spec import MesetaError

VOCABULARY_FOLDER = "vocabulary"
_COUNTED_SCHEMA = pa.schema([("value", pa.large_binary()), ("count", pa.int64())])
_NUM_PARTITIONS = 32


@dataclass(frozen=True)
class Vocabulary:
    """Rows of one feature: 0 for everything out of the vocabulary, then the kept values, the most frequent first."""

    num_embeddings: int
    """Kept values + 1."""
    path: str
    """Parquet file with value, id and count, relative to the dataset."""
    hashes: NDArray[np.uint64]
    """Hashes of the kept values, ascending [num_embeddings - 1]."""
    ids: NDArray[np.int64]
    """Their rows [num_embeddings - 1]."""
    digest: str
    """`values_digest` of the kept values, in the order of their rows."""

    def lookup(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Rows of hashed values, int64 [nnz]. An unknown value is taken for a known one with odds of V / 2**64."""
        if not self.hashes.size:
            return np.zeros(hashes.size, np.int64)
        at = np.minimum(np.searchsorted(self.hashes, hashes), self.hashes.size - 1)
        return np.where(self.hashes[at] == hashes, self.ids[at], 0)


def count_values(values: pa.Array) -> pa.Table:
    """Distinct values of a block and how often each occurs: value large_binary, count int64."""
    counted = pc.value_counts(values.cast(pa.large_binary()))
    return pa.table([counted.field("values"), counted.field("counts")], schema=_COUNTED_SCHEMA)


def read_vocabulary_values(folder: Path, feature: SparseFeature) -> pa.Array:
    """The values of a vocabulary by row, large_binary [num_embeddings]; row 0 is null. `folder` is the dataset's.

    Raises MesetaError for a file that cannot be read, and for one that the ids were not made with.
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
    """SHA-256 in hexadecimal of n values in their order: their lengths in bytes, int64 little-endian, then all their
    bytes. Text counts by its UTF-8."""
    whole = values.cast(pa.large_binary()).fill_null(b"")
    lengths = pc.binary_length(whole).to_numpy(zero_copy_only=False).astype("<i8")
    digest = hashlib.sha256(lengths)
    if len(whole):
        first, last = whole.offset, whole.offset + len(whole)
        offsets = np.frombuffer(whole.buffers()[1], np.int64)
        digest.update(memoryview(whole.buffers()[2] or b"")[offsets[first] : offsets[last]])
    return digest.hexdigest()


def load_vocabulary(folder: Path, feature: SparseFeature, hash_seed: int) -> Vocabulary:
    """That of an earlier dataset in `folder`, for values that are hashed with `hash_seed`.

    Raises MesetaError for a file that cannot be read, or is not that of the feature."""
    values = read_vocabulary_values(folder, feature)
    if len(values) != feature.num_embeddings or values.null_count != 1 or values[0].is_valid:
        raise MesetaError(
            f"vocabulary {str(folder / (feature.vocabulary or ''))!r} must have {feature.num_embeddings} rows, none "
            "of them without a value but the first; prepare the dataset again"
        )
    return _make_vocabulary(feature.name, feature.vocabulary or "", values[1:], hash_seed)


def _make_vocabulary(feature: str, path: str, values: pa.Array, hash_seed: int) -> Vocabulary:
    """Of the kept `values` in the order of their rows. Raises MesetaError where two share their 64-bit hash."""
    hashes = hash_categories(values, hash_seed)
    order = np.argsort(hashes)
    if (np.diff(hashes[order]) == 0).any():
        raise MesetaError(f"vocabulary of {feature!r}: two values share their hash; choose another --seed")
    return Vocabulary(len(values) + 1, path, hashes[order], order + 1, values_digest(values))


class VocabularyCounter:
    """Adds up the counted blocks of one feature.

    Equal values are merged when the pending tables have doubled; above `budget_bytes` they go to disk, partitioned by
    hash, so memory is bounded by the budget and by the values that are kept in the end.
    """

    def __init__(self, feature: str, spill_dir: Path, budget_bytes: int) -> None:
        self._feature = feature
        self._spill_dir = spill_dir
        self._budget_bytes = budget_bytes
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self._merged_bytes = 0
        self._spills: list[str] = []
        """Files in `spill_dir`, each with one batch per partition."""

    def add(self, counted: pa.Table) -> None:
        """Add one table of `count_values`."""
        self._pending.append(counted)
        self._pending_bytes += counted.nbytes
        if self._pending_bytes > max(2 * self._merged_bytes, self._budget_bytes // 4):
            merged = _merge(self._pending)
            self._pending, self._pending_bytes, self._merged_bytes = [merged], merged.nbytes, merged.nbytes
            if merged.nbytes > self._budget_bytes // 2:
                self._spill(merged)

    def finish(self, dataset_dir: Path, min_count: int, hash_seed: int) -> Vocabulary:
        """Write `dataset_dir`/vocabulary/<feature>.parquet and return it; values seen less often go to row 0.

        Row 0 stands in the file with a null value and the number of training lookups that fell to it.
        Raises MesetaError where two kept values share their 64-bit hash.
        """
        num_lookups = 0
        kept = [_COUNTED_SCHEMA.empty_table()]
        for tables in self._partitions():
            merged = _merge(tables)
            num_lookups += pc.sum(merged["count"]).as_py() or 0
            kept.append(merged.filter(pc.greater_equal(merged["count"], min_count)))
        table = pa.concat_tables(kept).sort_by([("count", "descending"), ("value", "ascending")]).combine_chunks()
        path = f"{VOCABULARY_FOLDER}/{to_file_name(self._feature)}.parquet"
        _write(dataset_dir / path, table, num_lookups)
        return _make_vocabulary(self._feature, path, combine_chunks(table["value"]), hash_seed)

    def get_state(self) -> list[str]:
        """Put all that was counted on disk, and name the files; `set_state` of another counter takes them up."""
        if self._pending:
            self._spill(_merge(self._pending))
        return list(self._spills)

    def set_state(self, state: Sequence[str]) -> None:
        """Go on from what `get_state` gave."""
        self._spills = list(state)

    def _partitions(self) -> Iterator[list[pa.Table]]:
        """All counted tables, those with equal values together."""
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
    """Equal values once, their counts added."""
    if not tables:
        return _COUNTED_SCHEMA.empty_table()
    summed = pa.concat_tables(tables).group_by("value", use_threads=False).aggregate([("count", "sum")])
    return summed.select(["value", "count_sum"]).rename_columns(["value", "count"]).cast(_COUNTED_SCHEMA)


def _read(path: Path, partition: int) -> pa.Table:
    with pa.OSFile(str(path), "rb") as file:
        return pa.Table.from_batches([pa.ipc.open_file(file).get_batch(partition)])


def combine_chunks(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array."""
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _write(path: Path, kept: pa.Table, num_lookups: int) -> None:
    """Values are written as strings where they are valid UTF-8, which click logs' are, else as bytes."""
    path.parent.mkdir(exist_ok=True)
    value = pa.concat_arrays([pa.nulls(1, pa.large_binary()), combine_chunks(kept["value"])])
    with contextlib.suppress(pa.ArrowInvalid):
        value = value.cast(pa.large_string())
    unknown = num_lookups - (pc.sum(kept["count"]).as_py() or 0)
    count = pa.concat_arrays([pa.array([unknown], pa.int64()), combine_chunks(kept["count"])])
    pq.write_table(pa.table({"value": value, "id": pa.array(np.arange(len(count))), "count": count}), path)
