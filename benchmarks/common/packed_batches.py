"""Batches that are packed for a GPU before the steps that train on them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch

from meseta.data import Batch
from meseta.pipeline.device_copy import BatchPacker, PackedBatch

MAX_THREADS = 8


class PackedBatches(Iterator[Batch | PackedBatch]):
    """Batches that `make` creates from an iterator of its arguments, packed if the device needs it."""

    NUM_AHEAD = 2
    """Largest number of batches that a pipeline reads before their steps."""

    def __init__(self, arguments: Iterator[Any], make: Callable[[Any], Batch], device: torch.device) -> None:
        self._arguments, self._make = arguments, make
        self._packer = BatchPacker.for_device(device, num_parts=1)
        self._ready: deque[PackedBatch] = deque()
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))

    def pack(self, num_steps: int) -> None:
        """Create and pack the batches that the next steps read in several threads, so that these steps do neither."""
        if self._packer is not None:
            missing = num_steps + self.NUM_AHEAD - len(self._ready)
            self._ready.extend(self._threads.map(self._make_packed, islice(self._arguments, max(missing, 0))))

    def __next__(self) -> Batch | PackedBatch:
        if not self._ready:
            self.pack(0)
        return self._ready.popleft() if self._ready else self._make(next(self._arguments))

    def _make_packed(self, argument: Any) -> PackedBatch:
        assert self._packer is not None
        return self._packer.pack(self._make(argument))
