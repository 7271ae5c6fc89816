"""Compact layout of a batch in one buffer, so that a single copy moves it to a device.

    header           numbers of samples, padding samples and ids, and the total weight of the samples
    tensors          dense inputs, ids, weights of ids, labels, sample weights, groups and label mask
    fixed lengths    number of ids per sample of each feature, unless all features vary
    varying          indices of the features whose number of ids varies
    lengths          numbers of ids of the varying features

Ids are int32 if all ids of the batch fit. Lengths have 8, 16 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.data.read.batch import Batch

ALIGNMENT = 256
"""Alignment of sections in bytes, as in torch's allocator."""
HEADER = np.dtype([("num_samples", "<i8"), ("num_padding", "<i8"), ("num_ids", "<i8"), ("weight", "<f8")])
"""Type of the header, at the start of the buffer."""
# Other tensors are copied as bytes.
_NUMPY_INTEGERS = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64}


@dataclass(frozen=True)
class PackedSection:
    """Place of a tensor in a buffer."""

    start: int
    """Offset in bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def write(self, memory: NDArray[np.uint8], source: NDArray[Any]) -> None:
        """Write integers, or the bytes of other numbers."""
        place = memory[self.start : self.start + self.num_bytes].view(_NUMPY_INTEGERS.get(self.dtype, np.uint8))
        np.copyto(place, source, casting="unsafe")

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor as a view of `buffer` [n], uint8."""
        first, size = self.start // self.dtype.itemsize, prod(self.shape)
        flat = buffer.view(self.dtype)[first : first + size]
        return flat if len(self.shape) == 1 else flat.view(self.shape)


@dataclass(frozen=True)
class PackedLayout:
    """Layout of one batch in a buffer."""

    batch: Batch
    """The batch in host memory."""
    tensors: tuple[PackedSection, ...]
    """Sections of `Batch.tensors` except the lengths."""
    fixed_lengths: PackedSection
    varying: PackedSection
    lengths: PackedSection
    num_bytes: int
    """Number of bytes to copy."""

    def unpack(self, buffer: Tensor) -> Batch:
        """Return the batch on the device of `buffer` [num_bytes], uint8. Its tensors are views, except the lengths.

        Ids are int32 if they were packed as int32. All other tensors equal those of the batch.
        """
        dense, ids, *others = (section.view(buffer) for section in self.tensors)
        return self.batch.with_tensors([dense, ids, self._unpack_lengths(buffer), *others])

    def _unpack_lengths(self, buffer: Tensor) -> Tensor:
        ids, dtype = self.batch.sparse, self.batch.sparse.lengths.dtype
        varying = self.lengths.view(buffer)
        if not self.fixed_lengths.num_bytes:
            return varying.to(dtype)
        lengths = torch.empty(len(ids.keys), ids.batch_size, dtype=dtype, device=buffer.device)
        lengths.copy_(self.fixed_lengths.view(buffer)[:, None])
        if varying.numel():
            rows = varying.view(-1, ids.batch_size).to(dtype)
            lengths.index_copy_(0, self.varying.view(buffer), rows)
        return lengths.view(-1)


def pack(batch: Batch, weight: float, new_buffer: Callable[[int], Tensor]) -> tuple[PackedLayout, Tensor]:
    """Pack a CPU batch. Returns its layout and the buffer.

    Args:
        batch: Batch in host memory.
        weight: Total weight of its samples.
        new_buffer: Function that returns a uint8 buffer of at least the given number of bytes.
    """
    # In numpy, because torch would wake a team of threads for it.
    tensors = batch.tensors
    ids, (fixed, varying, lengths) = batch.sparse.values.numpy(), _split_lengths(batch)
    types = [(tensor.dtype, tuple(tensor.shape)) for tensor in (tensors[0], *tensors[3:])]
    types.insert(1, (_smallest_type(ids, (torch.int32, torch.int64)), ids.shape))
    types += [(torch.int64, fixed.shape), (torch.int64, varying.shape)]
    types.append((_smallest_type(lengths, (torch.uint8, torch.int16, torch.int32)), lengths.shape))
    sections, end = list[PackedSection](), ALIGNMENT
    for dtype, shape in types:
        sections.append(PackedSection(end, dtype, shape))
        end += -(-sections[-1].num_bytes // ALIGNMENT) * ALIGNMENT
    buffer = new_buffer(end)
    memory = buffer.numpy()
    header = (batch.batch_size, batch.num_padding, ids.size, weight)
    memory[: HEADER.itemsize].view(HEADER)[0] = header
    sources = [_numbers(tensors[0]), ids, *map(_numbers, tensors[3:]), fixed, varying, lengths]
    for section, source in zip(sections, sources, strict=True):
        section.write(memory, source)
    layout = PackedLayout(batch, tuple(sections[:-3]), sections[-3], sections[-2], sections[-1], end)
    return layout, buffer


def _split_lengths(batch: Batch) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return (length of each feature, varying features, lengths of varying features). If all vary, only lengths."""
    ids, nothing = batch.sparse, np.empty(0, np.int64)
    lengths = ids.lengths.numpy()
    if len(set(ids.batch_sizes)) != 1 or not lengths.size:
        return nothing, nothing, lengths
    by_feature = lengths.reshape(len(ids.keys), -1)
    is_varying = by_feature.min(1) != by_feature.max(1)
    if is_varying.all():
        return nothing, nothing, lengths
    return by_feature[:, 0], np.flatnonzero(is_varying), by_feature[is_varying].reshape(-1)


def _smallest_type(numbers: NDArray[Any], dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    low, high = numbers.min(initial=0), numbers.max(initial=0)
    fitting = (dtype for dtype in dtypes if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max)
    return next(fitting)


def _numbers(tensor: Tensor) -> NDArray[Any]:
    flat = tensor.contiguous().view(-1)
    return (flat if tensor.dtype in _NUMPY_INTEGERS else flat.view(torch.uint8)).numpy()
