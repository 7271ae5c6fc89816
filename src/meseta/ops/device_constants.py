"""Small tensors that go to a GPU or come from it while the host goes on: tables of integers that kernels read, such as
addresses, sizes and flags of many tensors; numbers of a step; and what is learned of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meseta.spec import MesetaError


def device_constant(words: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [len(words)] on the device, copied at the first use of these words and kept.

    The copy comes from pinned memory, so the host does not wait. Raises MesetaError at the first use inside the
    capture of a CUDA graph, where such a copy has no place.
    """
    found = _make_constant(words, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _GRAPH_CONSTANTS[words, device] = found
    return found


_GRAPH_CONSTANTS: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
"""Graphs hold the addresses of these for ever."""


@lru_cache(maxsize=1024)
def _make_constant(words: tuple[int, ...], device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.tensor(words, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise MesetaError(
            "a CUDA graph is being captured, and an operator sees its tables for the first time: run the same call "
            "once before the capture, with the same tables"
        )
    return torch.tensor(words, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def copy_to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[len(numbers)] on the device, for numbers that are others in every step. The host does not wait."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class AsyncHostCopy:
    """A tensor on its way to the memory of the host, behind the work of the current stream.

    Who has waited for later work of that stream meanwhile, for whatever reason, reads it without waiting.
    """

    def __init__(self, tensor: Tensor) -> None:
        """On a CPU it is there at once: the same memory."""
        self._host = tensor
        self._copied_event: Any = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied_event = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Tensor:
        """The tensor, on the CPU, once the stream has come to it."""
        if self._copied_event is not None:
            self._copied_event.synchronize()
            self._copied_event = None
        return self._host
