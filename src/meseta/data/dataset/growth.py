"""Growth of vocabularies over parts: values get rows, keep them, and lose them if they no longer occur.

A value gets a row once it has occurred `min_count` times over all parts. Until then it is a candidate, of which only a
64-bit hash is stored. Two values with one hash share a count and a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.records import SparseFeature
from meseta.data.dataset.vocabulary import (
    VOCABULARY_FOLDER,
    Vocabulary,
    combine_chunks,
    make_vocabulary,
    read_table_values,
)
from meseta.data.hash_categories import hash_categories
from meseta.errors import error_summary
from meseta.spec import MesetaError
from meseta.system.files import resolve_inside, to_file_name

DEFAULT_MAX_CANDIDATES = 10_000_000
_CANDIDATE_SCHEMA = pa.schema([("hash", pa.uint64()), ("count", pa.int64()), ("last", pa.int32())])


def vocabulary_path(feature: str) -> str:
    """Return the path of a vocabulary, relative to the dataset."""
    return f"{VOCABULARY_FOLDER}/{to_file_name(feature)}.parquet"


def candidates_path(feature: str) -> str:
    """Return the path of the candidates of a vocabulary, relative to the dataset."""
    # `to_file_name` never returns a plus sign, so no other feature has this path.
    return f"{VOCABULARY_FOLDER}/{to_file_name(feature)}+candidates.parquet"


@dataclass(frozen=True, kw_only=True)
class GrowthRule:
    """Rule by which values of one part change a vocabulary."""

    min_count: int
    """Number of occurrences over all parts from which on a value has a row."""
    part: int = 1
    """Number of the part."""
    max_candidates: int = DEFAULT_MAX_CANDIDATES
    """Maximum number of candidates. Those not seen for longest are dropped, then those with the smallest count, then
    those with the largest hash."""
    retire_after: int | None = None
    """Number of parts without an occurrence after which a value loses its row, and a candidate its count. `None` means
    never."""

    def is_retired(self, last: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether values [n] that occurred in part `last` [n] for the last time are dropped."""
        return np.zeros(last.size, bool) if self.retire_after is None else last <= self.part - self.retire_after


def _to_numbers(column: pa.ChunkedArray, number_type: pa.DataType) -> NDArray[Any]:
    # A cast of numbers without missing values. Others raise ArrowInvalid.
    if column.null_count:
        raise pa.ArrowInvalid("values must not be missing")
    return column.cast(number_type).to_numpy()


@dataclass(frozen=True)
class Candidates:
    """Values without a row, in ascending order of their hashes."""

    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]
    """Number of occurrences over all parts."""
    last: NDArray[np.int32]
    """Last part with an occurrence."""

    @staticmethod
    def empty() -> Candidates:
        return Candidates(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int32))

    @staticmethod
    def load(folder: Path, feature: SparseFeature) -> Candidates:
        """Load the candidates of a feature. `folder` is the dataset folder. Raises MesetaError if the file cannot be
        read."""
        path = feature.candidates or ""
        try:
            table = pq.read_table(resolve_inside(folder, path), columns=_CANDIDATE_SCHEMA.names)
            columns = [_to_numbers(table[field.name], field.type) for field in _CANDIDATE_SCHEMA]
        except (pa.ArrowException, OSError, KeyError) as error:
            raise MesetaError(
                f"candidates {str(folder / path)!r} cannot be read ({error_summary(error)}); prepare the dataset again"
            ) from None
        return Candidates(*columns).select(np.argsort(columns[0]))

    def save(self, path: Path) -> None:
        arrays = [self.hashes, self.counts, self.last]
        table = pa.table(dict(zip(_CANDIDATE_SCHEMA.names, arrays, strict=True)), schema=_CANDIDATE_SCHEMA)
        path.parent.mkdir(exist_ok=True)
        # Hashes are random, so that a dictionary would only take space.
        pq.write_table(table, path, use_dictionary=["count", "last"], compression="zstd")

    def select(self, places: NDArray[np.generic]) -> Candidates:
        """Return the candidates at `places`, which are indices or a mask."""
        return Candidates(self.hashes[places], self.counts[places], self.last[places])

    def find(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the index of each of `hashes` [n], or -1."""
        if not self.hashes.size:
            return np.full(hashes.size, -1, np.int64)
        at = np.minimum(np.searchsorted(self.hashes, hashes), self.hashes.size - 1)
        return np.where(self.hashes[at] == hashes, at, -1)

    def limit(self, number: int) -> Candidates:
        """Return at most `number` candidates, see `GrowthRule.max_candidates`."""
        if self.hashes.size <= number:
            return self
        order = np.lexsort((self.hashes, -self.counts, -self.last))
        return self.select(np.sort(order[:number]))

    @staticmethod
    def concatenate(parts: list[Candidates]) -> Candidates:
        """Join candidates with different hashes, and sort them."""
        columns = [(part.hashes, part.counts, part.last) for part in parts]
        joined = Candidates(*(np.concatenate(column) for column in zip(*columns, strict=True)))
        return joined.select(np.argsort(joined.hashes))


@dataclass(frozen=True)
class VocabularyParts:
    """Vocabulary of the earlier parts, from which the next one grows."""

    vocabulary: Vocabulary | None
    """`None` if there are no earlier parts."""
    values: pa.Array
    """Values [num_embeddings] as large_binary. Row 0 and freed rows are null."""
    counts: NDArray[np.int64]
    """Number of lookups of each row over all parts."""
    last: NDArray[np.int32]
    """Last part in which each value occurred. 0 for freed rows."""
    candidates: Candidates
    has_candidates: bool = True
    """Whether candidates were recorded."""

    @staticmethod
    def empty() -> VocabularyParts:
        values = pa.nulls(1, pa.large_binary())
        return VocabularyParts(None, values, np.zeros(1, np.int64), np.zeros(1, np.int32), Candidates.empty())

    @property
    def min_count(self) -> int:
        """Smallest count of a value with a row, or 1 without values."""
        counts = self.counts[self.values.is_valid().to_numpy(zero_copy_only=False)]
        return max(int(counts.min()), 1) if counts.size else 1

    @staticmethod
    def load(folder: Path, feature: SparseFeature, hash_seed: int, part: int) -> VocabularyParts:
        """Load the vocabulary of a feature of the dataset in `folder`, which is number `part`.

        Earlier versions stored neither the last parts nor candidates. All values then occurred in `part`, and there are
        no candidates. Raises MesetaError if a file cannot be read, or does not belong to the feature.
        """
        values = read_table_values(folder, feature)
        vocabulary = make_vocabulary(feature.name, feature.vocabulary or "", values, hash_seed)
        try:
            place = resolve_inside(folder, feature.vocabulary or "")
            names = [name for name in ("count", "last") if name in pq.read_schema(place).names]
            table = pq.read_table(place, columns=names)
            counts = _to_numbers(table["count"], pa.int64())
            last = _to_numbers(table["last"], pa.int32()) if "last" in names else np.full(counts.size, part, np.int32)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise MesetaError(
                f"vocabulary {str(folder / (feature.vocabulary or ''))!r} cannot be read ({error_summary(error)}); "
                "prepare the dataset again"
            ) from None
        candidates = Candidates.empty() if feature.candidates is None else Candidates.load(folder, feature)
        return VocabularyParts(vocabulary, values, counts, last, candidates, feature.candidates is not None)


@dataclass
class _PartCounts:
    """Counts of one part on top of earlier parts."""

    counts: NDArray[np.int64]
    last: NDArray[np.int32]
    promoted: list[pa.Table]
    """Values that get a row, with their counts."""
    candidates: Candidates
    num_lookups: int
    """Number of lookups in all parts."""


def grow_vocabulary(
    feature: str,
    tables: Iterable[pa.Table],
    earlier: VocabularyParts,
    rule: GrowthRule,
    hash_seed: int,
    folder: Path,
) -> Vocabulary:
    """Add the values of one part to a vocabulary, write it with its candidates to `folder`, and return it.

    `tables` are the result of `VocabularyCounter.partitions`. New values get the lowest free rows, then rows at the
    end, in order of falling count over all parts, then value. Row 0 of the file has a null value and the number of
    lookups of all values without a row. Freed rows have a null value.

    The memory is bounded by the largest table, the vocabulary and twice the candidates.
    """
    part = _count_part(tables, earlier, rule, hash_seed)
    promoted = pa.concat_tables(part.promoted).sort_by([("count", "descending"), ("value", "ascending")])
    num_rows, num_new = len(earlier.values), promoted.num_rows
    is_taken = earlier.values.is_valid().to_numpy(zero_copy_only=False) & ~rule.is_retired(part.last)
    free = np.flatnonzero(~is_taken[1:])[:num_new] + 1
    ids = np.concatenate([free, np.arange(num_rows, num_rows + num_new - free.size)])
    size = num_rows + num_new - free.size
    # Places of the values of all rows in the earlier and the new values.
    places = np.where(np.pad(is_taken, (0, size - num_rows)), np.arange(size), -1)
    places[ids] = num_rows + np.arange(num_new)
    stays = (places > 0) & (places < num_rows)
    counts, last = (np.where(stays, np.pad(a, (0, size - num_rows)), 0) for a in (part.counts, part.last))
    counts[ids], last[ids] = combine_chunks(promoted["count"]).to_numpy(), rule.part
    counts[0], last[0] = part.num_lookups - counts[1:].sum(), rule.part
    both = pa.concat_arrays([earlier.values, combine_chunks(promoted["value"])])
    values = both.take(pa.array(places, mask=places < 0))
    path, inner = vocabulary_path(feature), candidates_path(feature)
    _write_vocabulary(folder / path, values, counts, last)
    part.candidates.save(folder / inner)
    vocabulary = make_vocabulary(feature, path, values, hash_seed, inner)
    if earlier.vocabulary is None:
        return vocabulary
    num_retired = num_rows - 1 - earlier.values[1:].null_count - int(stays.sum())
    return replace(vocabulary, num_added=num_new, num_retired=num_retired)


def _count_part(tables: Iterable[pa.Table], earlier: VocabularyParts, rule: GrowthRule, hash_seed: int) -> _PartCounts:
    old = earlier.candidates
    counts, last = earlier.counts.copy(), earlier.last.copy()
    num_lookups = int(earlier.counts.sum())
    is_seen = np.zeros(old.hashes.size, bool)
    promoted: list[pa.Table] = []
    fresh = [Candidates.empty()]
    for counted in tables:
        hashes, table = _sum_by_hash(counted, hash_seed)
        added = combine_chunks(table["count"]).to_numpy()
        num_lookups += int(added.sum())
        ids = np.zeros(hashes.size, np.int64) if earlier.vocabulary is None else earlier.vocabulary.lookup(hashes)
        has_row = ids > 0
        counts[ids[has_row]] += added[has_row]
        last[ids[has_row]] = rule.part
        places = old.find(hashes)
        is_seen[places[places >= 0]] = True
        total = added + np.where(places >= 0, old.counts[places] if old.counts.size else 0, 0)
        is_promoted = ~has_row & (total >= rule.min_count)
        chosen = table.filter(pa.array(is_promoted))
        promoted.append(chosen.set_column(1, "count", pa.array(total[is_promoted], pa.int64())))
        rest = ~has_row & ~is_promoted
        fresh.append(Candidates(hashes[rest], total[rest], np.full(int(rest.sum()), rule.part, np.int32)))
        # Candidates of this part precede the earlier ones, so that dropping some now does not change the result.
        if sum(one.hashes.size for one in fresh) > 2 * rule.max_candidates:
            fresh = [Candidates.concatenate(fresh).limit(rule.max_candidates)]
    kept = old.select(~is_seen & ~rule.is_retired(old.last))
    candidates = Candidates.concatenate([*fresh, kept]).limit(rule.max_candidates)
    return _PartCounts(counts, last, promoted, candidates, num_lookups)


def _sum_by_hash(table: pa.Table, hash_seed: int) -> tuple[NDArray[np.uint64], pa.Table]:
    """Return distinct hashes in ascending order, and a value with its count for each. Of values with equal hashes, the
    smallest is returned."""
    hashes, ordered = _sort_by_hash(table, hash_seed)
    is_first = np.concatenate([np.ones(min(hashes.size, 1), bool), hashes[1:] != hashes[:-1]])
    if is_first.all():
        return hashes, ordered
    hashes, ordered = _sort_by_hash(table.sort_by("value"), hash_seed)
    sums = np.add.reduceat(combine_chunks(ordered["count"]).to_numpy(), np.flatnonzero(is_first))
    return hashes[is_first], ordered.filter(pa.array(is_first)).set_column(1, "count", pa.array(sums, pa.int64()))


def _sort_by_hash(table: pa.Table, hash_seed: int) -> tuple[NDArray[np.uint64], pa.Table]:
    hashes = hash_categories(combine_chunks(table["value"]), hash_seed)
    # A binary search for hashes in this order is several times as fast.
    order = np.argsort(hashes, kind="stable")
    return hashes[order], table.take(pa.array(order))


def copy_vocabulary(feature: str, earlier: VocabularyParts, folder: Path) -> Vocabulary:
    """Write an unchanged vocabulary with its candidates to `folder`, and return it."""
    assert earlier.vocabulary is not None
    path, inner = vocabulary_path(feature), candidates_path(feature)
    _write_vocabulary(folder / path, earlier.values, earlier.counts, earlier.last)
    if not earlier.has_candidates:
        return replace(earlier.vocabulary, path=path)
    earlier.candidates.save(folder / inner)
    return replace(earlier.vocabulary, path=path, candidates=inner)


def _write_vocabulary(path: Path, values: pa.Array, counts: NDArray[np.int64], last: NDArray[np.int32]) -> None:
    path.parent.mkdir(exist_ok=True)
    # Store valid UTF-8, as in click logs, as strings, and other values as bytes.
    with contextlib.suppress(pa.ArrowInvalid):
        values = values.cast(pa.large_string())
    ids = pa.array(np.arange(len(counts)))
    columns = {"value": values, "id": ids, "count": pa.array(counts), "last": pa.array(last, pa.int32())}
    pq.write_table(pa.table(columns), path)
