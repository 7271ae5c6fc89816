"""Rows that the tables of a run take over from its parent: those of the same values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from meseta.checkpoint.row_map import RowMap
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.encoding import DatasetEncoding, encoding_difference
from meseta.data.dataset.records import SparseEncoding, SparseFeature
from meseta.data.dataset.statistics import read_touched
from meseta.data.dataset.vocabulary import read_vocabulary_values
from meseta.data.hash_categories import hash_categories
from meseta.spec import MesetaError, suggest
from meseta.system.processors import num_cores

DENSE_PART = "dense"
"""Name of the dense part in `start.reset`, in place of a table."""
_MAX_THREADS = 4


def map_rows(before: Dataset, now: Dataset, reset: Collection[str]) -> dict[str, RowMap]:
    """Return the maps from the parent's rows to those of the run, of the features that both have and that are not
    `reset`.

    Rows of a vocabulary are matched by value, and others by number. Raises MesetaError if ids or numbers of a column
    have another meaning than in the parent, or a vocabulary cannot be read.
    """
    names = [feature.name for feature in now.sparse]
    for name in reset:
        if name not in (*names, DENSE_PART):
            raise MesetaError(f"start.reset: {name!r} is no sparse feature; {suggest(name, [*names, DENSE_PART])}")
    check_same_meaning(before, now, reset)
    former = {feature.name: feature for feature in before.sparse}
    maps, others = {}, []
    for feature in now.sparse:
        if feature.name in reset or feature.name not in former:
            continue
        if feature.encoding != "vocabulary":
            maps[feature.name] = RowMap.identity(feature.num_embeddings)
            continue
        was = former[feature.name]
        if was.vocabulary_digest is not None and was.vocabulary_digest == feature.vocabulary_digest:
            maps[feature.name] = RowMap.identity(feature.num_embeddings)
        else:
            others.append((was, feature))

    def load(pair: tuple[SparseFeature, SparseFeature]) -> tuple[pa.Array, pa.Array]:
        return read_vocabulary_values(before.dir, pair[0]), read_vocabulary_values(now.dir, pair[1])

    row_maps = map_vocabularies([partial(load, pair) for pair in others])
    return maps | {feature.name: rows for (_, feature), rows in zip(others, row_maps, strict=True)}


def map_vocabularies(loads: Sequence[Callable[[], tuple[pa.Array, pa.Array]]]) -> list[RowMap]:
    """Return `map_values` of the two vocabularies that each function loads."""
    with ThreadPoolExecutor(min(num_cores(), _MAX_THREADS)) as pool:
        return list(pool.map(lambda load: map_values(*load()), loads))


def map_values(before: pa.Array, now: pa.Array) -> RowMap:
    """Return the map between rows with the same values, and between rows 0.

    `before` [rows] and `now` [rows] are values (large_binary) in the order of their rows. Rows without a value are
    null.
    """
    # Rows usually keep their numbers, and comparing is faster than searching.
    num_common = min(len(before), len(now))
    is_same = pc.equal(before[:num_common], now[:num_common]).fill_null(False).to_numpy(zero_copy_only=False)
    is_same[:1] = True
    sources = np.full(len(now), -1, np.int64)
    sources[:num_common][is_same] = np.flatnonzero(is_same)
    moved, rest = (_other_rows(values, is_same) for values in (now, before))
    if moved.size and rest.size:
        hashes = [[hash_categories(values, seed)[rows] for seed in (0, 1)] for values, rows in
                  ((before, rest), (now, moved))]  # fmt: skip
        at = pc.index_in(pa.array(hashes[1][0]), value_set=pa.array(hashes[0][0])).fill_null(-1)
        places = at.to_numpy(zero_copy_only=False)
        # Values with one hash rarely have another one in common.
        is_equal = (places >= 0) & (hashes[0][1][places] == hashes[1][1])
        sources[moved] = np.where(is_equal, rest[places], -1)
    return RowMap.from_sources(sources)


def _other_rows(values: pa.Array, is_same: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the rows that have a value and are not the same in another vocabulary."""
    is_other = values.is_valid().to_numpy(zero_copy_only=False)
    is_other[: len(is_same)] &= ~is_same
    return np.flatnonzero(is_other)


def check_same_meaning(before: Dataset, now: Dataset, reset: Collection[str]) -> None:
    """Raise MesetaError if a column that both datasets have is encoded otherwise, except for the tables `reset` and the
    values of vocabularies."""
    encodings = [DatasetEncoding.from_dataset(dataset) for dataset in (before, now)]
    common = set(encodings[0].column_names).intersection(encodings[1].column_names) - {*reset}
    one, other = (_shared_part(encoding, common) for encoding in encodings)
    if (difference := encoding_difference(one, other)) is None:
        return
    names = [feature.name for feature in one.sparse if feature not in other.sparse]
    hint = f"reinitialize it with --reset {names[0]}, or " if names else ""
    raise MesetaError(
        f"dataset {str(now.dir)!r} was encoded otherwise than that of start_from, {str(before.dir)!r}: {difference}; "
        f"{hint}prepare the rows with --like {before.dir} --as train"
    )


def _shared_part(encoding: DatasetEncoding, names: Collection[str]) -> DatasetEncoding:
    """Return the encoding of some columns, in the order of their names and without the values of vocabularies."""
    dense = sorted((column for column in encoding.dense if column.name in names), key=lambda column: column.name)
    sparse = sorted((feature for feature in encoding.sparse if feature.name in names), key=lambda column: column.name)
    whole = [name for name in encoding.whole_numbers if any(name in (f.made_of or (f.name,)) for f in sparse)]
    return encoding.model_copy(
        update={"dense": tuple(dense), "sparse": tuple(map(_without_values, sparse)), "whole_numbers": tuple(whole)}
    )


def _without_values(feature: SparseEncoding) -> SparseEncoding:
    if feature.encoding != "vocabulary":
        return feature
    return feature.model_copy(update={"num_embeddings": 1, "vocabulary_digest": None})


def new_row_masks(before: Dataset, now: Dataset, maps: Mapping[str, RowMap]) -> dict[str, NDArray[np.bool_]]:
    """Return which rows [rows] of each table are new.

    A value of a vocabulary is new if the parent has no row for it, and so is row 0. A hashed row is new if the parent
    never looked it up. Tables for which this is unknown are left out.

    Raises MesetaError if the parent's bits of hashed rows cannot be read.
    """
    masks = {}
    touched = read_touched(before)
    for feature in now.sparse:
        num_rows, rows = feature.num_embeddings, maps.get(feature.name)
        if feature.encoding == "vocabulary":
            mask = np.ones(num_rows, bool)
            for _, target in rows.parts() if rows is not None else ():
                mask[target] = False
            mask[:1] = True
            masks[feature.name] = mask
        elif feature.encoding == "hash" and rows is None:
            masks[feature.name] = np.ones(num_rows, bool)
        elif feature.encoding == "hash" and feature.name in touched:
            bits = np.unpackbits(touched[feature.name], count=num_rows, bitorder="little")
            masks[feature.name] = bits == 0
    return masks
