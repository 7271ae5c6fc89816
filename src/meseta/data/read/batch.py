"""Position of a reader in the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Bool, Float, Int


class Position(NamedTuple):
    """Position of a reader: the next row in the order of an epoch."""

    epoch: int
    """Number of the epoch, from 0."""
    row: int
    """Number of the row in the epoch, from 0."""


@dataclass(frozen=True)
class Batch:
    """Contiguous slice of a global batch that belongs to one rank."""

    dense: Float[Tensor, "B num_dense"]
    """Dense inputs with missing values filled, transformed and standardized."""
    sparse: KeyedJaggedTensor
    label: Float[Tensor, " B *T"]
    """Labels in 0..1 (float32), [B] if the dataset has one label, [B, T] if it has T > 1. NaN if the dataset has no
    labels, and 0 where `label_mask` is false."""
    weight: Float[Tensor, " B"] | None = None
    """Sample weights (float32), finite and not negative. `None` means that all weights are 1."""
    group: Int[Tensor, " B"] | None = None
    """Group key of each sample (int64), for metrics within groups. `None` if there are no groups."""
    label_mask: Bool[Tensor, " B *T"] | None = None
    """Mask of the known labels with the shape of `label`. `None` means that all labels are known."""
    time: Float[Tensor, " B"] | None = None
    """Time of each sample (float64) in seconds since 1970-01-01 UTC, NaN if missing. Always in host memory. `None`
    unless `Dataset.reads_time` is set."""
    num_padding: int = 0
    """Number of padding samples at the end. They have weight 0 and no ids, and do not affect any result."""
    position: Position | None = None
    """Position of the reader after this batch. `None` if the batch was not made by a reader."""

    @property
    def batch_size(self) -> int:
        """Number of samples, including padding."""
        return self.label.shape[0]

    @property
    def label_mask_2d(self) -> Bool[Tensor, "B T"] | None:
        """`label_mask` with one column per task. `None` if all labels are known."""
        mask = self.label_mask
        return mask[:, None] if mask is not None and mask.dim() == 1 else mask

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the batch that are not `None`."""
        optional_tensors = (
            self.dense,
            self.sparse.values,
            self.sparse.lengths,
            self.sparse.weights,
            self.label,
            self.weight,
            self.group,
            self.label_mask,
        )
        return tuple(tensor for tensor in optional_tensors if tensor is not None)

    def find_non_finite(self) -> tuple[int, int, float] | None:
        """Return (sample, column, value) of the first non-finite dense input, or `None` if all are finite."""
        places = torch.nonzero(~self.dense.isfinite()).tolist()
        return None if not places else (*places[0], float(self.dense[tuple(places[0])]))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Batch:
        """Return a copy with other tensors in the order of `tensors`, such as copies on another device."""
        replacements = iter(tensors)
        sparse = self.sparse
        return replace(
            self,
            dense=next(replacements),
            sparse=sparse.with_tensors(
                next(replacements), next(replacements), None if sparse.weights is None else next(replacements)
            ),
            label=next(replacements),
            weight=None if self.weight is None else next(replacements),
            group=None if self.group is None else next(replacements),
            label_mask=None if self.label_mask is None else next(replacements),
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`, or the batch itself if it is there already."""
        if self.label.device == torch.device(device):
            return self
        return self.with_tensors([tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors])


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
    """Split a batch into `num_parts` micro-batches of consecutive samples, as equal in size as possible.

    Ids are copied. All other tensors are views.
    """
    if num_parts == 1:
        return [batch]
    # The first parts are smaller, or empty. Therefore no part that is empty on all ranks follows a non-empty one.
    share, more = divmod(batch.batch_size, num_parts)
    sizes = [share + (part >= num_parts - more) for part in range(num_parts)]
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    ids = batch.sparse
    first_bags = torch.arange(len(ids.keys))[:, None] * batch.batch_size + bounds
    places = ids.offsets[first_bags.to(ids.offsets.device)].tolist()
    lengths = ids.lengths.view(len(ids.keys), batch.batch_size).split(sizes, dim=1)

    def cut(tensor: Tensor | None) -> list[Tensor | None]:
        return [None] * num_parts if tensor is None else list(tensor.split(sizes))

    def cut_ids(tensor: Tensor, part: int) -> Tensor:
        return torch.cat([tensor[of_key[part] : of_key[part + 1]] for of_key in places])

    return [
        Batch(
            dense=batch.dense[start:stop],
            sparse=KeyedJaggedTensor(
                keys=ids.keys,
                values=cut_ids(ids.values, part),
                lengths=lengths[part].reshape(-1),
                weights=None if ids.weights is None else cut_ids(ids.weights, part),
                batch_sizes=(stop - start,) * len(ids.keys),
            ),
            label=batch.label[start:stop],
            weight=weight,
            group=group,
            label_mask=None if batch.label_mask is None else batch.label_mask[start:stop],
        )
        for part, ((start, stop), weight, group) in enumerate(
            zip(pairwise(bounds.tolist()), cut(batch.weight), cut(batch.group), strict=True)
        )
    ]
