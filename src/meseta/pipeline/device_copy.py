"""Copies of batches to a GPU on a separate stream, while another batch is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meseta.comm import BatchTotals
from meseta.data.read.batch import Batch, split_batch
from meseta.data.read.packing import PackedLayout, PackedLayouts
from meseta.ops.common import BufferPool
from meseta.pipeline.losses import make_batch_totals
from meseta.telemetry.span import StageTimes


@dataclass(frozen=True, eq=False)
class PackedPart:
    """Micro-batch in a buffer. It can be copied once."""

    batch: Batch
    """The micro-batch in host memory."""
    totals: BatchTotals
    """Totals of the whole batch."""
    layout: PackedLayout
    buffer: Tensor
    pool: BufferPool


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Batch with its packed micro-batches."""

    batch: Batch
    parts: tuple[PackedPart, ...]


class BatchPacker:
    """Thread-safe packing of batches into pinned buffers."""

    def __init__(
        self, device: torch.device, num_parts: int = 1, *, new_buffer: Callable[[int], Tensor] | None = None
    ) -> None:
        """Create a packer of `num_parts` micro-batches. Tests replace `new_buffer`."""
        self._num_parts = num_parts
        self._pool = BufferPool(new_buffer or partial(_new_pinned_buffer, device))
        self._layouts = PackedLayouts()

    @staticmethod
    def for_device(device: torch.device, num_parts: int) -> BatchPacker | None:
        """Return a packer, or `None` if the device needs no copies."""
        return BatchPacker(device, num_parts) if device.type == "cuda" else None

    def pack(self, batch: Batch) -> PackedBatch:
        """Pack the micro-batches of a batch."""
        totals, parts = make_batch_totals(batch), []
        for part in split_batch(batch, self._num_parts):
            layout, buffer = self._layouts.pack(part, self._pool.acquire, num_padding=batch.num_padding)
            parts.append(PackedPart(part, totals, layout, buffer, self._pool))
        return PackedBatch(batch, tuple(parts))


@dataclass(frozen=True, eq=False)
class PendingCopy:
    """Copy of a micro-batch to a device."""

    part: PackedPart
    _buffer: Tensor
    _arrived: Any
    _current_stream: Callable[[], Any]

    @property
    def totals(self) -> BatchTotals:
        """Totals of the whole batch."""
        return self.part.totals

    def wait(self, *, padded: bool = False) -> Batch:
        """Return the micro-batch on the device. The current stream waits for it. See `PackedLayout.unpack`."""
        return self.part.layout.unpack(self.part.batch, self.wait_buffer(), padded=padded)

    def wait_buffer(self) -> Tensor:
        """Return the buffer on the device, uint8 [layout.num_bytes]. The current stream waits for it."""
        stream = self._current_stream()
        stream.wait_event(self._arrived)
        # Without this, the copy stream, which allocated the memory, could reuse it for a later batch too early.
        self._buffer.record_stream(stream)
        return self._buffer


@dataclass(frozen=True, eq=False)
class StaticPart:
    """Packed micro-batch in a buffer on the device whose content changes, as in a CUDA graph."""

    buffer: Tensor
    layout: PackedLayout
    batch: Batch
    """Host batch with this layout."""
    totals: BatchTotals

    def wait(self, *, padded: bool = False) -> Batch:
        """Return the micro-batch on the device."""
        return self.layout.unpack(self.batch, self.buffer, padded=padded)


class DeviceCopier:
    """Copies batches to a device asynchronously. Only the computation on the device waits for a copy."""

    def __init__(
        self,
        device: torch.device,
        times: StageTimes,
        num_parts: int,
        *,
        cuda: Any = torch.cuda,
        new_buffer: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Create a copier. `times` records each copy. Tests replace `cuda` and `new_buffer`."""
        self._device, self._times, self._cuda = device, times, cuda
        self.packer = BatchPacker(device, num_parts, new_buffer=new_buffer)
        """Packs batches that were not packed before."""
        self._stream = cuda.Stream(device)

    def start(self, part: PackedPart) -> PendingCopy:
        """Start copying a micro-batch."""
        source = part.buffer[: part.layout.num_bytes]
        with self._cuda.stream(self._stream):
            with self._times.time_copy(source.nbytes, self._stream):
                on_device = torch.empty(source.shape, dtype=source.dtype, device=self._device)
                on_device.copy_(source, non_blocking=True)
            arrived = self._stream.record_event()
        part.pool.release(part.buffer, arrived)
        return PendingCopy(part, on_device, arrived, partial(self._cuda.current_stream, self._device))


def _new_pinned_buffer(device: torch.device, num_bytes: int) -> Tensor:
    # A reading thread would otherwise create a context on the first device of the host.
    with torch.cuda.device(device):
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
