"""Allocation of large tensors on 2 MB pages, for tables and for outputs whose memory is reused in each step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.ops.core import core

MIN_HUGE_PAGE_BYTES = 1 << 20
"""Minimum size of a tensor on huge pages. Torch allocates smaller tensors."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", *, keep: bool = True) -> Tensor:
    """Return an uninitialized tensor, as torch.empty. Large CPU tensors are on 2 MB pages.

    If `keep` is true, freed memory is kept for the next request, as outputs of a step need it. Otherwise it is returned
    to the operating system, as tables need it. Idle memory is limited to the peak of memory in use.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < MIN_HUGE_PAGE_BYTES or torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    tensor: Tensor = torch.from_dlpack(core().allocate(num_bytes, keep)).view(dtype).view(tuple(shape))
    # The attribute is missing in torch's type stubs.
    poison = getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009
    if torch.are_deterministic_algorithms_enabled() and poison:
        tensor.fill_(math.nan if dtype.is_floating_point else torch.iinfo(dtype).max)  # As torch.empty does.
    return tensor


def release_idle_memory() -> None:
    """Return idle memory to the operating system. Call it after large work that will not be repeated soon."""
    core().release_idle_memory()
