"""Conversion of decoded rows to Arrow record batches and back. Readers send them to trainers.

    labels          weight    group    dense                 sparse features, each followed by its weights
    float32 each    float32   int64    list of D float32     int32 or int64, or a list of them; a list of float32

Columns have this order and the names of the dataset. Columns that the dataset does not have are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.rows import IdLists, Rows
from meseta.errors import MesetaError, error_summary

# The overhead per batch is small, and a batch fits into a CPU cache.
MAX_RECORD_BATCH_ROWS = 16_384
"""Maximum number of rows in a record batch."""


def record_batch_schema(dataset: Dataset, int64_features: Collection[str]) -> pa.Schema:
    """Return the schema of the record batches of a dataset. Ids of `int64_features` are int64, others int32."""
    fields = [pa.field(name, pa.float32()) for name in dataset.label_columns]
    if dataset.weight is not None:
        fields.append(pa.field(dataset.weight, pa.float32()))
    if dataset.group is not None:
        fields.append(pa.field(dataset.group, pa.int64()))
    if dataset.dense:
        names = {"columns": ",".join(column.name for column in dataset.dense)}
        fields.append(pa.field("dense", pa.list_(pa.float32(), len(dataset.dense)), metadata=names))
    for feature in dataset.sparse:
        ids = pa.int64() if feature.name in int64_features else pa.int32()
        fields.append(pa.field(feature.name, pa.list_(ids) if feature.multi_valued else ids))
        if feature.weighted:
            fields.append(pa.field(f"{feature.name}.weight", pa.list_(pa.float32())))
    return pa.schema(fields)


def to_record_batch(rows: Rows, dataset: Dataset, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows of a dataset as a record batch with the schema of `record_batch_schema`."""
    kinds = iter(schema.types)
    columns = [column(next(kinds)) for column in _column_builders(rows, dataset)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column_builders(rows: Rows, dataset: Dataset) -> Iterator[Any]:
    if dataset.has_labels:
        labels = rows.label if rows.label.ndim == 2 else rows.label[:, None]
        yield from (_array_builder(label) for label in labels.T)
    yield from (_array_builder(values) for values in (rows.weight, rows.group) if values is not None)
    if dataset.dense:
        flat = pa.array(np.ascontiguousarray(rows.dense).reshape(-1))
        yield lambda kind: pa.FixedSizeListArray.from_arrays(flat, type=kind)
    singles, bags = iter(np.ascontiguousarray(rows.single_ids)), iter(rows.bags)
    for feature in dataset.sparse:
        if not feature.multi_valued:
            yield _array_builder(next(singles))
            continue
        lists = next(bags)
        offsets = np.zeros(len(lists.lengths) + 1, np.int32)
        np.cumsum(lists.lengths, out=offsets[1:])
        yield _list_builder(offsets, lists.values)
        if lists.weights is not None:
            yield _list_builder(offsets, lists.weights)


def _array_builder(values: NDArray[Any]) -> Any:
    return lambda kind: pa.array(np.ascontiguousarray(values, kind.to_pandas_dtype()))


def _list_builder(offsets: NDArray[np.int32], values: NDArray[Any]) -> Any:
    return lambda kind: pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values.astype(kind.value_type.to_pandas_dtype(), copy=False)), type=kind
    )


class ReceivedRows:
    """Rows of one record batch, which can be taken in parts. The parts share its memory where possible."""

    def __init__(self, batch: pa.RecordBatch, dataset: Dataset, schema: pa.Schema, sender: str) -> None:
        """Validate a batch. Raises MesetaError that names `sender` unless it has the form of `to_record_batch`."""
        problem = None
        arrays = batch.columns
        if not batch.schema.equals(schema):
            problem = "rows with other columns than the dataset"
        elif any(column.null_count for column in arrays):
            problem = "rows with missing values"
        else:
            try:
                # The sender is another process, so check all offsets before they are used.
                batch.validate(full=True)
            except pa.ArrowException as error:
                problem = f"a damaged record batch ({error_summary(error)})"
        if problem is not None:
            raise MesetaError(f"{sender} sent {problem}; run the same version everywhere")
        self.num_rows = batch.num_rows
        columns = iter(arrays)
        self._labels = [next(columns).to_numpy() for _ in dataset.label_columns]
        self._num_labels = len(dataset.labels)
        self._weight = None if dataset.weight is None else next(columns).to_numpy()
        self._group = None if dataset.group is None else next(columns).to_numpy()
        shape = (self.num_rows, len(dataset.dense))
        self._dense = (
            next(columns).flatten().to_numpy().reshape(shape) if dataset.dense else np.empty(shape, np.float32)
        )
        singles: list[NDArray[Any]] = []
        self._bags: list[IdLists] = []
        for feature in dataset.sparse:
            ids = next(columns)
            if not feature.multi_valued:
                singles.append(ids.to_numpy())
                continue
            lengths = np.diff(ids.offsets.to_numpy()).astype(np.int64)
            weights = next(columns) if feature.weighted else None
            if weights is not None and not weights.offsets.equals(ids.offsets):
                raise MesetaError(
                    f"{sender} sent different numbers of weights and ids; run the same version everywhere"
                )
            values = ids.flatten().to_numpy()
            self._bags.append(IdLists(lengths, values, None if weights is None else weights.flatten().to_numpy()))
        self._columns = singles  # The matrix of _stack_columns keeps only the first alive.
        self._singles = _stack_columns(singles)

    def take(self, start: int, stop: int) -> Rows:
        """Return rows start..stop-1 of the batch."""
        labels = [label[start:stop] for label in self._labels]
        labels = labels or [np.full(stop - start, np.nan, np.float32) for _ in range(self._num_labels)]
        single = np.empty((len(self._columns), stop - start), np.int64)
        for place, ids in self._singles:
            single[place] = ids[..., start:stop]
        return Rows(
            labels[0] if len(labels) == 1 else np.stack(labels, axis=1),
            self._dense[start:stop],
            single,
            tuple(lists.take(slice(start, stop)) for lists in self._bags),
            None if self._weight is None else self._weight[start:stop],
            None if self._group is None else self._group[start:stop],
        )


def _stack_columns(columns: list[NDArray[Any]]) -> list[tuple[int | slice, NDArray[Any]]]:
    """Return (indices, values) pairs, with columns [n] stacked to one matrix without a copy if possible."""
    # Stacking requires columns of one type at equal distances in memory, as in a received record batch.
    addresses = [column.__array_interface__["data"][0] for column in columns]
    steps = set(np.diff(addresses).tolist())
    if len(steps) == 1 and len({column.dtype for column in columns}) == 1:
        shape, strides = (len(columns), len(columns[0])), (*steps, columns[0].itemsize)
        return [(slice(None), as_strided(columns[0], shape, strides, writeable=False))]
    return list(enumerate(columns))
