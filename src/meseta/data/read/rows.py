"""Time that the rows of a window took to make, by kind of work."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.records import SparseFeature


@dataclass
class WindowTimer:
    """Wall time of making the rows of a window. The three fields add up to the total."""

    storage_s: float = 0.0
    decode_s: float = 0.0
    """Seconds of decompressing, decoding, checking and filtering prepared files."""
    transform_s: float = 0.0
    """Seconds of encoding raw rows. 0 for prepared files."""

    @property
    def total_s(self) -> float:
        return self.storage_s + self.decode_s + self.transform_s

    def add_transform(self, seconds: float, read_share: float) -> None:
        """Add the time of making rows from raw files. Threads waited for bytes for `read_share` of it."""
        self.storage_s += seconds * read_share
        self.transform_s += seconds * (1.0 - read_share)

    def add_storage(self, seconds: float) -> None:
        self.storage_s += seconds

    @contextmanager
    def time_decoding(self) -> Iterator[None]:
        """Context manager that adds its duration, without waits for bytes, to `decode_s`."""
        begin_s, storage_s = time.perf_counter(), self.storage_s
        yield
        self.decode_s += max(time.perf_counter() - begin_s - (self.storage_s - storage_s), 0.0)


# This module does not import torch, so that processes that only decode start quickly.


RowIndex = NDArray[np.int64] | slice


@dataclass(frozen=True)
class IdLists:
    """Ids of one multi-valued feature, sample by sample."""

    lengths: NDArray[np.int64]
    values: NDArray[Any]
    weights: NDArray[np.float32] | None
    """Weight of each id [nnz]. `None` without weights."""

    def take(self, index: RowIndex) -> IdLists:
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        lengths = self.lengths[index]
        if isinstance(index, slice):
            start, stop, _ = index.indices(self.lengths.size)
            chosen: RowIndex = slice(int(offsets[start]), int(offsets[max(start, stop)]))
        else:
            # Position within the output, minus the output start of its bag, plus the input start of its bag.
            ends = np.cumsum(lengths)
            chosen = np.arange(lengths.sum()) + np.repeat(offsets[index] - (ends - lengths), lengths)
        return IdLists(lengths, self.values[chosen], None if self.weights is None else self.weights[chosen])

    def copy(self) -> IdLists:
        return IdLists(self.lengths.copy(), self.values.copy(), None if self.weights is None else self.weights.copy())


@dataclass(frozen=True)
class Rows:
    """Decoded samples."""

    label: NDArray[np.float32]
    """Labels [n], or [n, T] with T > 1 labels. NaN if the dataset has no labels, or if a sample lacks one."""
    dense: NDArray[np.float32]
    """Dense inputs [n, num_dense]."""
    single_ids: NDArray[Any]
    """Ids of the single-valued features [num_single, n], int32 or int64. The memory order may be by row or by
    feature."""
    bags: tuple[IdLists, ...]
    """Multi-valued features in the order of the dataset."""
    weight: NDArray[np.float32] | None = None
    """Sample weights [n]. `None` without weights."""
    group: NDArray[np.int64] | None = None
    time: NDArray[np.float64] | None = None
    """Times [n] in seconds since 1970-01-01 UTC, NaN if missing. `None` unless `Dataset.reads_time` is set."""

    def take(self, index: RowIndex) -> Rows:
        """Return the rows at `index`. A slice returns views."""
        if isinstance(index, slice):
            dense, single = self.dense[index], self.single_ids[:, index]
        else:
            # Transposed, so that ids which are adjacent in memory are gathered together.
            dense, single = self.dense.take(index, axis=0), self.single_ids.T.take(index, axis=0).T
        return Rows(
            self.label[index],
            dense,
            single,
            tuple(bags.take(index) for bags in self.bags),
            None if self.weight is None else self.weight[index],
            None if self.group is None else self.group[index],
            None if self.time is None else self.time[index],
        )

    def copy(self) -> Rows:
        """Return a copy. Views keep the whole arrays alive from which they were taken."""
        return Rows(
            self.label.copy(),
            self.dense.copy(),
            self.single_ids.copy(),
            tuple(bags.copy() for bags in self.bags),
            None if self.weight is None else self.weight.copy(),
            None if self.group is None else self.group.copy(),
            None if self.time is None else self.time.copy(),
        )


def decode_rows(dataset: Dataset, tables: Sequence[pa.Table], *, by_row: bool = False) -> Rows:
    """Decode the columns of row groups, one group after the other.

    With `by_row` the ids of a row are adjacent in memory. This costs more to write, but makes taking single rows much
    cheaper.
    """
    num_rows = sum(table.num_rows for table in tables)
    dense = np.empty((num_rows, len(dataset.dense)), np.float32)
    singles = [feature for feature in dataset.sparse if not feature.multi_valued]
    # Files may have ids of different widths.
    wide = any(table.schema.field(feature.name).type == pa.int64() for feature in singles for table in tables)
    shape = (num_rows, len(singles)) if by_row else (len(singles), num_rows)
    single = np.empty(shape, np.int64 if wide else np.int32)
    single = single.T if by_row else single
    start = 0
    for table in tables:  # Group by group, so that the columns fit into the CPU caches.
        stop = start + table.num_rows
        for place, column in enumerate(dataset.dense):
            dense[start:stop, place] = table.column(column.name).to_numpy()
        for place, feature in enumerate(singles):
            single[place, start:stop] = table.column(feature.name).to_numpy()
        start = stop
    labels = [_read_column(tables, name, np.float32) for name in dataset.label_columns]
    labels = labels or [np.full(num_rows, np.nan, np.float32) for _ in dataset.labels]
    return Rows(
        labels[0] if len(labels) == 1 else np.stack(labels, axis=1),
        dense,
        single,
        tuple(_read_bags(tables, feature) for feature in dataset.sparse if feature.multi_valued),
        None if dataset.weight is None else _read_column(tables, dataset.weight, np.float32),
        None if dataset.group is None else _read_column(tables, dataset.group, np.int64),
        _read_column(tables, dataset.time, np.float64) if dataset.time is not None and dataset.reads_time else None,
    )


def concatenate_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts in order."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        np.concatenate([part.label for part in parts]),
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.single_ids for part in parts], axis=1),
        tuple(_join_bags(bags) for bags in zip(*(part.bags for part in parts), strict=True)),
        _join_present([part.weight for part in parts]),
        _join_present([part.group for part in parts]),
        _join_present([part.time for part in parts]),
    )


def _read_column(tables: Sequence[pa.Table], name: str, dtype: type[Any]) -> NDArray[Any]:
    parts = [table.column(name).to_numpy().astype(dtype, copy=False) for table in tables]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _read_bags(tables: Sequence[pa.Table], feature: SparseFeature) -> IdLists:
    def flat(name: str) -> NDArray[Any]:
        return np.concatenate([chunk.flatten().to_numpy() for table in tables for chunk in table.column(name).chunks])

    chunks = [chunk for table in tables for chunk in table.column(feature.name).chunks]
    lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks]).astype(np.int64)
    return IdLists(lengths, flat(feature.name), flat(f"{feature.name}.weight") if feature.weighted else None)


def _join_present(parts: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None


def _join_bags(parts: Sequence[IdLists]) -> IdLists:
    weights = [part.weights for part in parts if part.weights is not None]
    return IdLists(
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.values for part in parts]),
        np.concatenate(weights) if weights else None,
    )
