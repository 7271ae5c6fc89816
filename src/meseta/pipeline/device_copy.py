"""Copies of batches to a GPU on a separate stream, while another batch is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.data.read.batch import Batch
from meseta.telemetry.span import StageTimes

ALIGNMENT = 256
"""Alignment in bytes of tensors that share a buffer, as in torch's allocator."""


class DeviceCopier:
    """Copies batches to a device asynchronously. The host never waits, only the computation on the device."""

    def __init__(
        self,
        device: torch.device,
        times: StageTimes,
        *,
        cuda: Any = torch.cuda,
        new_buffer: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Create a copier. `times` records each copy. `new_buffer` allocates host memory for direct access, or
        pinned memory if `None`. Tests replace `cuda`."""
        self._device, self._times, self._cuda = device, times, cuda
        self._new_buffer = new_buffer or partial(torch.empty, dtype=torch.uint8, pin_memory=True)
        self._stream = cuda.Stream(device)

    def start(self, batch: Batch) -> Callable[[], Batch]:
        """Start copying a batch. Return a function that makes the then current stream wait, and returns the batch."""
        buffer, places = self._pack(batch.tensors)
        with self._cuda.stream(self._stream):
            with self._times.time_copy(buffer.nbytes, self._stream):
                on_device = buffer.to(self._device, non_blocking=True)
            arrived = self._stream.record_event()
        tensors = [
            on_device[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(places, batch.tensors, strict=True)
        ]
        return partial(self._wait, batch.with_tensors(tensors), on_device, arrived)

    def _pack(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        # With one buffer, one copy suffices.
        places, size = list[int](), 0
        for tensor in tensors:
            places.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = self._new_buffer(size)
        memory = buffer.numpy()
        for place, tensor in zip(places, tensors, strict=True):
            # In numpy, because torch would wake a team of threads for it.
            source = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            np.copyto(memory[place : place + source.size], source)
        return buffer, places

    def _wait(self, batch: Batch, on_device: Tensor, arrived: Any) -> Batch:
        stream = self._cuda.current_stream(self._device)
        stream.wait_event(arrived)
        # Without this, the copy stream, which allocated the memory, could reuse it for a later batch too early.
        on_device.record_stream(stream)
        return batch
