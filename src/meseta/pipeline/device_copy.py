"""Batches that are copied to a GPU on a stream of their own, beside the one that computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.data.batch import Batch
from meseta.telemetry.span import StageTimes

ALIGNMENT = 256
"""Bytes: where a tensor may begin in the memory that several share, as in torch's own allocator."""


class DeviceCopier:
    """Begins copies that wait for nothing that is computed, and lets the computation wait for each where it needs it:
    no wait of the host."""

    def __init__(
        self,
        device: torch.device,
        times: StageTimes,
        *,
        cuda: Any = torch.cuda,
        new_buffer: Callable[[int], Tensor] | None = None,
    ) -> None:
        """`times` is told of each copy. `cuda` has what is used of torch.cuda; `new_buffer` gives so many bytes that
        the device reads by itself, from other memory the host would copy; None: pinned memory of torch's."""
        self._device, self._times, self._cuda = device, times, cuda
        self._new_buffer = new_buffer or partial(torch.empty, dtype=torch.uint8, pin_memory=True)
        self._stream = cuda.Stream(device)

    def start(self, batch: Batch) -> Callable[[], Batch]:
        """Begin to copy a batch; what is returned gives it, for the stream that is then the current one."""
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
        """All tensors in one buffer, which is one copy, and where each begins."""
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
        on_device.record_stream(stream)  # its memory is of the other stream, which would give it to a later batch
        return batch
