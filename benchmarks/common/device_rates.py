"""Times of calls on a device, and its rates of copies and matrix products."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from common.timing import seconds

NUM_WARM_UP_CALLS, NUM_CALLS = 16, 15
COPY_BYTES, PRODUCT_SIZE = 1 << 30, 8192
DELAY_CYCLES = 2_000_000
"""Cycles, about a millisecond, for which a GPU waits before a call, so that the host has started all of its kernels."""


def device_seconds(run: Callable[[int], object], device: str = "cuda") -> float:
    """Return the median seconds of calls with successive numbers. On a GPU they include no work of the host, unless it
    takes longer than a millisecond."""
    measure = _event_seconds if device == "cuda" else _host_seconds
    return statistics.median([measure(run, number) for number in range(NUM_WARM_UP_CALLS + NUM_CALLS)][-NUM_CALLS:])


def copy_rate(device: str = "cuda", num_bytes: int = COPY_BYTES) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / device_seconds(lambda _: target.copy_(source), device)


def product_rate(dtype: torch.dtype, device: str = "cuda", size: int = PRODUCT_SIZE) -> float:
    """Return the operations per second of a product of square matrices. Their numbers are random."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return float(2 * size**3 / device_seconds(lambda _: torch.mm(a, b, out=out), device))


def _event_seconds(run: Callable[[int], object], number: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(DELAY_CYCLES)
    begin.record()
    run(number)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def _host_seconds(run: Callable[[int], object], number: int) -> float:
    return seconds(lambda: run(number))
