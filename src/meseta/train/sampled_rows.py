"""Samples of the rows of a split, in the memory of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.data.read.batch_reader import BatchReader
from meseta.sparse import JaggedTensor, KeyedJaggedTensor

MAX_PARTS = 4
"""Maximum number of places of a split that are read. A jump to another place decodes a row group."""


def gather_rows(reader: BatchReader, num_rows: int, world: World) -> Batch:
    """Return `num_rows` rows of a split in at most `MAX_PARTS` parts, evenly spaced, on all ranks. Collective.

    A part consists of consecutive global batches. The position of the reader changes.
    """
    size = reader.options.batch_size
    num_batches = -(-num_rows // size)
    num_parts = min(num_batches, MAX_PARTS)
    # The last batch may be shorter, so it is read only if all others are.
    num_skipped = max(reader.num_batches - 1 - num_batches, 0)
    local: list[Batch] = []
    for part in range(num_parts):
        start = len(local) + num_skipped * part // max(num_parts - 1, 1)
        reader.set_state({**reader.get_state(), "row": start * size})
        with closing(reader.epoch()) as batches:
            local += islice(batches, num_batches * (part + 1) // num_parts - len(local))
    by_rank = world.all_gather_object(local)
    rows = join_batches([batch for of_ranks in zip(*by_rank, strict=True) for batch in of_ranks])
    return take_rows(rows, torch.arange(num_rows))


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate the rows of batches of one dataset. Groups and positions are left out."""

    def join(tensors: Sequence[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    keys = batches[0].sparse.keys
    bags = []
    for key in keys:
        parts = [batch.sparse[key] for batch in batches]
        bags.append(
            JaggedTensor(
                values=torch.cat([part.values for part in parts]),
                lengths=torch.cat([part.lengths for part in parts]),
                weights=join([part.weights for part in parts]),
            )
        )
    return Batch(
        dense=torch.cat([batch.dense for batch in batches]),
        sparse=join_bags(keys, bags),
        label=torch.cat([batch.label for batch in batches]),
        weight=join([batch.weight for batch in batches]),
        label_mask=join([batch.label_mask for batch in batches]),
    )


def take_rows(batch: Batch, rows: Tensor) -> Batch:
    """Return the rows with indices `rows` [n] of a batch in CPU memory. Groups and the position are left out."""
    ids = batch.sparse
    return Batch(
        dense=batch.dense[rows],
        sparse=join_bags(ids.keys, [take_bags(ids[key], rows) for key in ids.keys]),
        label=batch.label[rows],
        weight=None if batch.weight is None else batch.weight[rows],
        label_mask=None if batch.label_mask is None else batch.label_mask[rows],
    )


def take_bags(bags: JaggedTensor, rows: Tensor) -> JaggedTensor:
    """Return the bags with indices `rows` [n]."""
    lengths = bags.lengths[rows]
    ends = lengths.cumsum(0)
    # Each id of the result is at its place in its bag, after the start of the bag it comes from.
    shifts = bags.offsets[rows] - (ends - lengths)
    places = torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
    return JaggedTensor(
        values=bags.values[places],
        lengths=lengths,
        weights=None if bags.weights is None else bags.weights[places],
    )


def join_bags(keys: Sequence[str], bags: Sequence[JaggedTensor]) -> KeyedJaggedTensor:
    """Return the bags of each key as one tensor."""
    if not keys:
        return KeyedJaggedTensor(
            keys=(), values=torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64)
        )
    weights: list[Any] = [of_key.weights for of_key in bags]
    return KeyedJaggedTensor(
        keys=tuple(keys),
        values=torch.cat([of_key.values for of_key in bags]),
        lengths=torch.cat([of_key.lengths for of_key in bags]),
        weights=None if weights[0] is None else torch.cat(weights),
        batch_sizes=tuple(of_key.lengths.numel() for of_key in bags),
    )


def first_label_weights(rows: Batch) -> NDArray[np.float64]:
    """Return the weights [B] of samples for the first label. They are 0 if the label is unknown."""
    weights = np.ones(rows.batch_size) if rows.weight is None else rows.weight.double().numpy()
    return weights if rows.label_mask is None else weights * first_column(rows.label_mask).numpy()


def first_column(labels: Tensor) -> Tensor:
    """Return the column [B] of the first label, given [B] or [B, T]."""
    return labels if labels.dim() == 1 else labels[:, 0]
