"""Pinned host buffers that are reused, and copies to the host that use them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MAX_PENDING_COPIES = 4
"""Number of copies in progress at which a new batch waits for the oldest one."""
MAX_SHAPES = 64
"""Number of shapes of tensors for which buffers are kept."""
BUFFER_GROWTH_FACTOR = 1.25
"""Size of new buffers relative to the batch that did not fit."""


class BufferPool:
    """Thread-safe pool of host buffers. A buffer is reused after its copy has completed."""

    def __init__(self, new_buffer: Callable[[int], Tensor]) -> None:
        self._new_buffer = new_buffer
        self._num_bytes = 0
        # In the order of the copies, which is that of their completion.
        self._copied = deque[tuple[Tensor, Any]]()
        self._lock = threading.Lock()

    def acquire(self, num_bytes: int) -> Tensor:
        """Return a buffer of at least `num_bytes`. May wait for a copy."""
        with self._lock:
            is_done = bool(self._copied) and self._copied[0][1].query()
            reused = self._copied.popleft() if is_done or len(self._copied) >= MAX_PENDING_COPIES else None
            if num_bytes > self._num_bytes:
                self._num_bytes = int(num_bytes * BUFFER_GROWTH_FACTOR)
            num_new_bytes = self._num_bytes
        if reused is not None:
            buffer, copied = reused
            if not is_done:
                copied.synchronize()
            if buffer.numel() >= num_bytes:
                return buffer
        return self._new_buffer(num_new_bytes)

    def release(self, buffer: Tensor, copied: Any) -> None:
        """Return a buffer to the pool. `copied` is the event after its copy."""
        with self._lock:
            self._copied.append((buffer, copied))


class AsyncHostCopy:
    """Asynchronous copy of a tensor to host memory, ordered after the previous work of the current stream.

    Reading does not block if the caller has already waited for later work of the same stream.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy. A CPU tensor is not copied, and `read` then returns the tensor itself."""
        self._host: Tensor | None = tensor
        self._pinned: Tensor | None = None
        if tensor.device.type == "cuda":
            self._host = None
            self._pool = _pool_of_shape(tensor.dtype, tensor.shape)
            self._pinned = self._pool.acquire(tensor.numel())
            self._pinned.copy_(tensor, non_blocking=True)
            self._copied_event = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Tensor:
        """Return the tensor in host memory. Waits until the copy is complete."""
        if self._host is None:
            assert self._pinned is not None
            self._copied_event.synchronize()
            self._host = self._pinned.clone()
            self._release()
        return self._host

    def _release(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._pool.release(pinned, self._copied_event)

    def __del__(self) -> None:
        if getattr(self, "_pinned", None) is not None:
            self._release()


@lru_cache(maxsize=MAX_SHAPES)
def _pool_of_shape(dtype: torch.dtype, shape: torch.Size) -> BufferPool:
    return BufferPool(lambda _: torch.empty(shape, dtype=dtype, pin_memory=True))
