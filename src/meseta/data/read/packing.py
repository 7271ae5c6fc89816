"""Compact layout of a batch in one buffer, so that a single copy moves it to a device.

    tensors          dense inputs, ids, weights of ids, labels, sample weights, groups and label mask
    fixed lengths    number of ids per sample of each feature, if the lengths of some features are stored
    varying          indices of the features whose lengths are stored
    lengths          numbers of ids of these features
    zeros            words that the check of the ids may overwrite, if no lengths are stored

Ids are int32 if all of them fit. Stored lengths have 8, 16 or 32 bits. If the number of ids varies between batches, the
sections of ids and their weights have a capacity, and end with zeros. All sections have the same place in most batches,
as a CUDA graph requires.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.data.read.batch import Batch
from meseta.ops.common import device_constant
from meseta.ops.id_policy.reference import NUM_REPORT_WORDS
from meseta.spec import MesetaError

ALIGNMENT = 256
"""Alignment of sections in bytes, as in torch's allocator."""
MIN_CAPACITY = 64
"""Minimum capacity for a varying number of ids."""
MAX_KINDS = 64
"""Number of kinds of batches whose layouts are remembered."""
MAX_CONSTANT_BAGS = 16
"""Number of combinations of lengths whose bags remain on a device."""
# Other tensors are copied as bytes.
_NUMPY_INTEGERS = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64}


class PackedSection(NamedTuple):
    """Place of a tensor in a buffer."""

    start: int
    """Offset in bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def write(self, memory: NDArray[np.uint8], source: NDArray[Any]) -> None:
        """Write integers, or the bytes of other numbers, and zeros up to the end of the section."""
        place = memory[self.start : self.start + self.num_bytes].view(_NUMPY_INTEGERS.get(self.dtype, np.uint8))
        np.copyto(place[: source.size], source, casting="unsafe")
        place[source.size :] = 0

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor as a view of `buffer` [n], uint8."""
        first, size = self.start // self.dtype.itemsize, prod(self.shape)
        flat = buffer.view(self.dtype)[first : first + size]
        return flat if len(self.shape) == 1 else flat.view(self.shape)


class BatchKind(NamedTuple):
    """Properties of a batch that its layout cannot adapt."""

    keys: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    num_padding: int
    length_dtype: torch.dtype
    id_weight_dtype: torch.dtype | None
    """`None` if ids have no weights."""
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]] | None, ...]
    """Dtypes and shapes of dense inputs, labels, sample weights, groups and label mask. `None` for a missing tensor."""

    @staticmethod
    def from_batch(batch: Batch, num_padding: int) -> BatchKind:
        ids, tensors = batch.sparse, (batch.dense, batch.label, batch.weight, batch.group, batch.label_mask)
        return BatchKind(
            keys=ids.keys,
            batch_sizes=ids.batch_sizes,
            num_padding=num_padding,
            length_dtype=ids.lengths.dtype,
            id_weight_dtype=None if ids.weights is None else ids.weights.dtype,
            tensors=tuple(None if tensor is None else (tensor.dtype, tuple(tensor.shape)) for tensor in tensors),
        )


@dataclass(frozen=True)
class PackedLayout:
    """Layout of batches in buffers. It is hashable.

    Batches with equal layouts are unpacked by the same operators, from the same offsets to the same shapes.
    """

    kind: BatchKind
    tensors: tuple[PackedSection, ...]
    """Sections of `Batch.tensors` except the lengths."""
    fixed_lengths: PackedSection
    varying: PackedSection
    lengths: PackedSection
    zeros: PackedSection
    key_offsets: tuple[int, ...] | None
    """`KeyedJaggedTensor.key_offsets` of all batches with this layout. `None` if lengths vary."""
    num_bytes: int
    """Number of bytes to copy."""

    @property
    def id_capacity(self) -> int:
        """Maximum number of ids."""
        return self.tensors[1].shape[0]

    def write(self, batch: Batch, varies: NDArray[np.bool_], memory: NDArray[np.uint8]) -> None:
        """Write a CPU batch. `varies` [F] is true for the features whose lengths are not all equal."""
        ids, tensors = batch.sparse, batch.tensors
        fixed = varying = np.empty(0, np.int64)
        lengths = ids.lengths.numpy()
        if self.key_offsets is not None:
            lengths = fixed
        elif self.fixed_lengths.num_bytes:
            by_feature = lengths.reshape(len(ids.keys), -1)
            # Features of constant length fill the rest of the section.
            varying = np.argsort(~varies, kind="stable")[: self.varying.shape[0]]
            fixed, lengths = by_feature[:, :1].sum(1), by_feature[varying].reshape(-1)
        sections = (*self.tensors, self.fixed_lengths, self.varying, self.lengths, self.zeros)
        sources = [_numbers(tensors[0]), ids.values.numpy(), *map(_numbers, tensors[3:]), fixed, varying, lengths]
        sources.append(np.empty(0, np.int64))
        for section, source in zip(sections, sources, strict=True):
            section.write(memory, source)

    def unpack(self, batch: Batch, buffer: Tensor, *, padded: bool = False) -> Batch:
        """Return a batch on the device of `buffer` [num_bytes], uint8. Its tensors are views, except the lengths.

        Ids are int32 if they were packed as int32. All other tensors equal those of `batch`.

        With `padded`, ids and their weights have `id_capacity` elements, of which the last ones belong to no feature.
        The result then depends only on the layout and the content of the buffer, so a CUDA graph can contain it.
        """
        num_ids = self.id_capacity if padded else batch.sparse.values.numel()
        end = 2 if self.kind.id_weight_dtype is None else 3
        id_sections = [section._replace(shape=(num_ids,)) for section in self.tensors[1:end]]
        sections = (self.tensors[0], *id_sections, *self.tensors[end:])
        dense, ids, *others = (section.view(buffer) for section in sections)
        if self.key_offsets is not None:
            lengths, offsets = _constant_bags(self.key_offsets, self.kind, buffer.device)
            unpacked = batch.with_tensors([dense, ids, lengths, *others])
            return replace(unpacked, sparse=unpacked.sparse.with_constant_bags(offsets, self.zeros.view(buffer)))
        unpacked = batch.with_tensors([dense, ids, self._unpack_lengths(buffer), *others])
        return replace(unpacked, sparse=unpacked.sparse.as_padded()) if padded else unpacked

    def _unpack_lengths(self, buffer: Tensor) -> Tensor:
        dtype, varying = self.kind.length_dtype, self.lengths.view(buffer)
        if not self.fixed_lengths.num_bytes:
            return varying.to(dtype)
        num_keys, batch_size = len(self.kind.keys), self.kind.batch_sizes[0]
        lengths = torch.empty(num_keys, batch_size, dtype=dtype, device=buffer.device)
        lengths.copy_(self.fixed_lengths.view(buffer)[:, None])
        lengths.index_copy_(0, self.varying.view(buffer), varying.view(-1, batch_size).to(dtype))
        return lengths.flatten()


class _Extremes(NamedTuple):
    """Extremes over some batches of one kind."""

    lowest_id: int
    highest_id: int
    num_ids: int
    """Largest number of ids."""
    shortest: NDArray[Any]
    """Smallest length of each feature [F]."""
    longest: NDArray[Any]
    """Largest length of each feature [F]."""

    @property
    def varies(self) -> NDArray[np.bool_]:
        """Mask [F] of the features whose lengths are not all equal."""
        return self.shortest != self.longest

    @staticmethod
    def from_batch(batch: Batch) -> _Extremes:
        # In numpy, because torch would wake a team of threads for it.
        ids, lengths, num_keys = batch.sparse.values.numpy(), batch.sparse.lengths.numpy(), len(batch.sparse.keys)
        if len(set(batch.sparse.batch_sizes)) > 1:
            # The lengths of all features are stored.
            shortest, longest = np.full(num_keys, -1), np.full(num_keys, lengths.max(initial=0))
        elif lengths.size:
            by_feature = lengths.reshape(num_keys, -1)
            shortest, longest = by_feature.min(1), by_feature.max(1)
        else:
            shortest = longest = np.zeros(num_keys, np.int64)
        return _Extremes(int(ids.min(initial=0)), int(ids.max(initial=0)), ids.size, shortest, longest)

    def merge(self, other: _Extremes) -> _Extremes:
        """Return the extremes over the batches of both."""
        return _Extremes(
            min(self.lowest_id, other.lowest_id),
            max(self.highest_id, other.highest_id),
            max(self.num_ids, other.num_ids),
            np.minimum(self.shortest, other.shortest),
            np.maximum(self.longest, other.longest),
        )

    def make_layout(self, kind: BatchKind) -> PackedLayout:
        """Return the layout for all batches within these extremes."""
        num_keys, num_varying = len(kind.keys), int(self.varies.sum())
        capacity, key_offsets = self.num_ids, None
        if num_varying:
            capacity = ceil_capacity(self.num_ids)
            # At powers of two, because features may start to vary one by one.
            num_varying = min(1 << (num_varying - 1).bit_length(), num_keys)
        else:
            sizes = zip(self.longest.tolist(), kind.batch_sizes, strict=True)
            key_offsets = tuple(accumulate((length * size for length, size in sizes), initial=0))
        dense, *others = kind.tensors
        types = [dense, (_smallest_type(self.lowest_id, self.highest_id, torch.int32, torch.int64), (capacity,))]
        if kind.id_weight_dtype is not None:
            types.append((kind.id_weight_dtype, (capacity,)))
        is_all = num_varying == num_keys > 0
        num_lengths = sum(kind.batch_sizes) if is_all else num_varying * max(kind.batch_sizes, default=0)
        longest = int(self.longest.max()) if num_varying else 0
        types += [
            *others,
            (torch.int64, (0 if is_all or not num_varying else num_keys,)),
            (torch.int64, (0 if is_all else num_varying,)),
            (_smallest_type(0, longest, torch.uint8, torch.int16, torch.int32), (num_lengths,)),
            (torch.int64, (0 if num_varying else num_keys + NUM_REPORT_WORDS,)),
        ]
        sections, end = list[PackedSection](), 0
        for dtype, shape in filter(None, types):
            sections.append(PackedSection(end, dtype, shape))
            end += -(-sections[-1].num_bytes // ALIGNMENT) * ALIGNMENT
        *tensors, fixed, varying, lengths, zeros = sections
        return PackedLayout(kind, tuple(tensors), fixed, varying, lengths, zeros, key_offsets, end)


class PackedLayouts:
    """Thread-safe packing of successive batches with as few layouts as possible.

    A layout has room for all earlier batches of the same kind. If a batch does not fit, the layout widens.
    """

    def __init__(self) -> None:
        # The least recently used kind is first.
        self._by_kind: dict[BatchKind, tuple[_Extremes, PackedLayout]] = {}
        self._lock = threading.Lock()

    def pack(
        self, batch: Batch, new_buffer: Callable[[int], Tensor], *, num_padding: int | None = None
    ) -> tuple[PackedLayout, Tensor]:
        """Pack a CPU batch. Returns its layout and the buffer.

        Args:
            batch: Batch in host memory.
            new_buffer: Function that returns a uint8 buffer of at least the given number of bytes.
            num_padding: Number of padding samples in the batch of which `batch` is a part. Padding has no ids, and must
                not make the layout of other batches wider. `None` means that of `batch`.
        """
        kind = BatchKind.from_batch(batch, batch.num_padding if num_padding is None else num_padding)
        extremes = _Extremes.from_batch(batch)
        layout = self._find_layout(kind, extremes)
        buffer = new_buffer(layout.num_bytes)
        layout.write(batch, extremes.varies, buffer.numpy())
        return layout, buffer

    def _find_layout(self, kind: BatchKind, extremes: _Extremes) -> PackedLayout:
        with self._lock:
            earlier = self._by_kind.pop(kind, None)
            if earlier is not None:
                extremes = earlier[0].merge(extremes)
            layout = extremes.make_layout(kind)
            if earlier is not None and earlier[1] == layout:
                layout = earlier[1]  # Comparing an object with itself is faster.
            self._by_kind[kind] = extremes, layout
            if len(self._by_kind) > MAX_KINDS:
                del self._by_kind[next(iter(self._by_kind))]
        return layout


def ceil_capacity(num_ids: int) -> int:
    """Return the smallest capacity for `num_ids` ids. Capacities are 64, 80, 96, 112, 128, 160 and so on.

    Successive capacities differ by a factor of 1.25 at most.
    """
    num_ids = max(num_ids, MIN_CAPACITY)
    quarter = 1 << (num_ids.bit_length() - 3)
    return -(-num_ids // quarter) * quarter


def _constant_bags(key_offsets: tuple[int, ...], kind: BatchKind, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lengths and offsets of bags if all bags of a feature have as many ids. The first call computes them."""
    size = max(kind.batch_sizes, default=0)
    by_feature = tuple((stop - start) // max(size, 1) for start, stop in pairwise(key_offsets))
    return _repeat_lengths(by_feature, size, kind.length_dtype, device)


@lru_cache(maxsize=MAX_CONSTANT_BAGS)
def _repeat_lengths(
    by_feature: tuple[int, ...], batch_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise MesetaError(
            "a batch with new lengths of bags was unpacked while a CUDA graph is captured; train on a batch with the "
            "same lengths once before the capture"
        )
    lengths = device_constant(by_feature, device)[:, None].expand(-1, batch_size).flatten().contiguous()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return lengths.to(dtype), offsets


def _smallest_type(low: int, high: int, *dtypes: torch.dtype) -> torch.dtype:
    return next(dtype for dtype in dtypes if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max)


def _numbers(tensor: Tensor) -> NDArray[Any]:
    flat = tensor.contiguous().view(-1)
    return (flat if tensor.dtype in _NUMPY_INTEGERS else flat.view(torch.uint8)).numpy()
