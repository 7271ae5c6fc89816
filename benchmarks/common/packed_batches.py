"""Batches that are packed for a GPU before the steps that train on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from meseta.data import Batch
from meseta.pipeline.device_copy import BatchPacker, PackedBatch


class PackedBatches(Iterator[Batch | PackedBatch]):
    """Batches of an iterator, packed if the device needs it."""

    NUM_AHEAD = 2
    """Largest number of batches that a pipeline reads before their steps."""

    def __init__(self, batches: Iterator[Batch], device: torch.device) -> None:
        self._batches = batches
        self._packer = BatchPacker.for_device(device, num_parts=1)
        self._ready: deque[PackedBatch] = deque()

    def pack(self, num_steps: int) -> None:
        """Pack the batches that the next steps read, so that these steps include no packing."""
        while self._packer is not None and len(self._ready) < num_steps + self.NUM_AHEAD:
            self._ready.append(self._packer.pack(next(self._batches)))

    def __next__(self) -> Batch | PackedBatch:
        if not self._ready:
            self.pack(0)
        return self._ready.popleft() if self._ready else next(self._batches)
