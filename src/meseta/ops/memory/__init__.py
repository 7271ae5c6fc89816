"""Large tensors on 2 MB pages: tables, and outputs whose memory the next step takes again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.ops.core import core

MIN_HUGE_PAGE_BYTES = 1 << 20
"""Smaller tensors come from torch's own allocator."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", *, keep: bool = True) -> Tensor:
    """An uninitialised tensor, as torch.empty; on a CPU a large one lies on 2 MB pages.

    With `keep` its memory is kept for the next request when the tensor dies, as outputs of a step want it; without, it
    goes back to the system, as tables want it. Memory kept idle never exceeds the most that was in use at once.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < MIN_HUGE_PAGE_BYTES or torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    tensor: Tensor = torch.from_dlpack(core().allocate(num_bytes, keep)).view(dtype).view(tuple(shape))
    poison = getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009  (unknown to its types)
    if torch.are_deterministic_algorithms_enabled() and poison:
        tensor.fill_(math.nan if dtype.is_floating_point else torch.iinfo(dtype).max)  # what torch.empty does then
    return tensor


def release_idle_memory() -> None:
    """Memory that is kept idle goes back to the system: after large work that does not come again soon."""
    core().release_idle_memory()
