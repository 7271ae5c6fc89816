"""Copies of small tensors between host and GPU that do not block the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meseta.spec import MesetaError


def device_constant(words: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an int64 tensor of `words` on `device`. It is copied at the first call and then cached.

    The host does not wait, because the copy comes from pinned memory. Raises MesetaError if the first call is within
    the capture of a CUDA graph, which cannot contain this copy.
    """
    constant = _make_constant(words, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _GRAPH_CONSTANTS[words, device] = constant
    return constant


_GRAPH_CONSTANTS: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
"""Constants whose addresses a CUDA graph holds. They are never freed."""


@lru_cache(maxsize=1024)
def _make_constant(words: tuple[int, ...], device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.tensor(words, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise MesetaError(
            "an operator was called with new tables while a CUDA graph is captured; run the same call, with the same "
            "tables, once before the capture"
        )
    return torch.tensor(words, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def copy_to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a 1-d tensor on `device` without blocking the host. For numbers that change in every step."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class AsyncHostCopy:
    """Asynchronous copy of a tensor to host memory, ordered after the previous work of the current stream.

    Reading does not block if the caller has already waited for later work of the same stream.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy. A CPU tensor is not copied, and `read` then returns the tensor itself."""
        self._host = tensor
        self._copied_event: Any = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied_event = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Tensor:
        """Return the tensor in host memory. Waits until the copy is complete."""
        if self._copied_event is not None:
            self._copied_event.synchronize()
            self._copied_event = None
        return self._host
