"""Temporary change of the number of compute threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_num_threads(count: int) -> Iterator[None]:
    """Context manager that sets torch's number of threads to `count`. The compiled core uses the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
