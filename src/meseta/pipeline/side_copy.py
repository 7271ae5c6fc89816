"""Batches that are copied to a GPU on a stream of their own, beside the one that computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from meseta.data.batch import Batch
from meseta.telemetry.span import StageTimes


class SideCopies:
    """Begins copies that wait for nothing that is computed, and lets the computation wait for each where it needs it:
    no wait of the host."""

    def __init__(
        self,
        device: torch.device,
        times: StageTimes,
        *,
        cuda: Any = torch.cuda,
        pin: Callable[[Batch], Batch] = Batch.pin_memory,
    ) -> None:
        """`times` is told of each copy. `cuda` has what is used of torch.cuda; `pin` brings a batch to memory that the
        device reads by itself: from other memory the host would copy."""
        self._device, self._times, self._cuda, self._pin = device, times, cuda, pin
        self._stream = cuda.Stream(device)

    def begin(self, batch: Batch) -> Callable[[], Batch]:
        """Begin to copy a batch; what is returned gives it, for the stream that is then the current one."""
        pinned = self._pin(batch)
        num_bytes = sum(tensor.nbytes for tensor in pinned.tensors)
        with self._cuda.stream(self._stream):
            with self._times.copying(num_bytes):
                on_device = pinned.to(self._device, non_blocking=True)
            arrived = self._stream.record_event()
        return partial(self._take, on_device, arrived)

    def _take(self, on_device: Batch, arrived: Any) -> Batch:
        stream = self._cuda.current_stream(self._device)
        stream.wait_event(arrived)
        for tensor in on_device.tensors:  # its memory is of the other stream, which would give it to a later batch
            tensor.record_stream(stream)
        return on_device
