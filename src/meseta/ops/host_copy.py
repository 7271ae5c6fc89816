"""What the host learns of a device without standing still for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A tensor on its way to the memory of the host, behind the work of the current stream.

    Who has waited for later work of that stream meanwhile, for whatever reason, reads it without waiting.
    """

    def __init__(self, tensor: Tensor) -> None:
        """On a CPU it is there at once: the same memory."""
        self._host = tensor
        self._passed: Any = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._passed = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Tensor:
        """The tensor, on the CPU, once the stream has come to it."""
        if self._passed is not None:
            self._passed.synchronize()
            self._passed = None
        return self._host
