"""Conversion of decoded rows to batches of tensors, and padding of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch import Batch
from meseta.data.read.rows import IdLists, Rows
from meseta.sparse import KeyedJaggedTensor


def to_batch(dataset: Dataset, rows: Rows) -> Batch:
    """Return the rows as tensors. Ids and lengths are int64, feature by feature.

    Arrays that own their memory are used without a copy, so the batch takes them over. Views of other arrays are
    copied.
    """
    keys = tuple(feature.name for feature in dataset.sparse)
    if not rows.bags:
        is_taken_over = rows.single_ids.flags.owndata and rows.single_ids.flags.c_contiguous
        values = rows.single_ids.astype(np.int64, order="C", copy=not is_taken_over).reshape(-1)
        sparse = KeyedJaggedTensor.from_single_ids(keys, torch.from_numpy(values))
    else:
        values, lengths, weights = _interleave(dataset, rows)
        sparse = KeyedJaggedTensor(
            keys=keys,
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(lengths),
            weights=None if weights is None else torch.from_numpy(weights),
            batch_sizes=(len(rows.label),) * len(keys),
        )
    label, label_mask = rows.label, None
    if dataset.masked_labels:
        label_mask = ~np.isnan(label)
        # A NaN would make the masked loss NaN too.
        label = np.where(label_mask, label, np.float32(0))
    return Batch(
        dense=_owned_tensor(rows.dense),
        sparse=sparse,
        label=_owned_tensor(label),
        label_mask=None if label_mask is None else torch.from_numpy(label_mask),
        weight=None if rows.weight is None else _owned_tensor(rows.weight),
        group=None if rows.group is None else _owned_tensor(rows.group),
        time=None if rows.time is None else _owned_tensor(rows.time),
    )


def pad_batch(batch: Batch, batch_size: int) -> Batch:
    """Return a copy with padding up to `batch_size` samples. Padding has weight 0, no ids, and zeros otherwise."""
    more = batch_size - batch.batch_size
    sparse, num_keys = batch.sparse, len(batch.sparse.keys)
    lengths = functional.pad(sparse.lengths.view(num_keys, batch.batch_size), (0, more)).reshape(-1)
    weight = torch.ones(batch.batch_size) if batch.weight is None else batch.weight
    return Batch(
        dense=functional.pad(batch.dense, (0, 0, 0, more)),
        sparse=KeyedJaggedTensor(
            keys=sparse.keys,
            values=sparse.values,
            lengths=lengths,
            weights=sparse.weights,
            batch_sizes=(batch_size,) * num_keys,
        ),
        label=_pad_labels(batch.label, more),
        label_mask=None if batch.label_mask is None else _pad_labels(batch.label_mask, more),
        weight=functional.pad(weight, (0, more)),
        group=None if batch.group is None else functional.pad(batch.group, (0, more)),
        time=None if batch.time is None else functional.pad(batch.time, (0, more)),
        num_padding=more,
    )


def _pad_labels(labels: Tensor, more: int) -> Tensor:
    return functional.pad(labels, (*(0, 0) * (labels.dim() - 1), 0, more))


def _interleave(
    dataset: Dataset, rows: Rows
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32] | None]:
    singles, bags = iter(rows.single_ids), iter(rows.bags)
    ones = np.ones(len(rows.label), np.int64)
    parts = [next(bags) if f.multi_valued else IdLists(ones, next(singles), None) for f in dataset.sparse]
    weights = None
    if any(feature.weighted for feature in dataset.sparse):
        weights = np.concatenate(
            [np.ones(p.values.size, np.float32) if p.weights is None else p.weights for p in parts]
        )
    values = np.concatenate([part.values for part in parts]).astype(np.int64)
    return values, np.concatenate([part.lengths for part in parts]), weights


def _owned_tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array if array.flags.owndata and array.flags.writeable else np.array(array))
