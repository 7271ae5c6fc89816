"""Tests of memory that one step frees and the next one reuses."""

import resource
from pathlib import Path

import pytest
import torch

from meseta.ops.memory import MIN_HUGE_PAGE_BYTES, empty, release_idle_memory


def test_a_large_output_gets_the_memory_of_the_one_before() -> None:
    shape = (3 * MIN_HUGE_PAGE_BYTES,)
    before = empty(shape, torch.float32)
    address = before.data_ptr()
    del before
    assert empty(shape, torch.float32).data_ptr() == address


def test_the_longest_idle_block_is_freed_first() -> None:
    """Freeing the largest block would give a growing step new pages every time."""
    small = [empty((MIN_HUGE_PAGE_BYTES + 4 * k,), torch.float32) for k in range(4)]
    large = empty((200 * MIN_HUGE_PAGE_BYTES,), torch.uint8)
    del small
    address = large.data_ptr()
    for _ in range(3):
        del large
        large = empty((200 * MIN_HUGE_PAGE_BYTES,), torch.uint8)
        assert large.data_ptr() == address


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux reports the memory of a process")
def test_idle_blocks_can_be_freed() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    kept = empty((200 * MIN_HUGE_PAGE_BYTES,), torch.uint8).fill_(1)
    before = resident_bytes()
    del kept
    assert resident_bytes() > before - 100 * MIN_HUGE_PAGE_BYTES
    release_idle_memory()
    assert resident_bytes() < before - 100 * MIN_HUGE_PAGE_BYTES


@pytest.mark.parametrize("count", [0, 1, MIN_HUGE_PAGE_BYTES - 1, MIN_HUGE_PAGE_BYTES, MIN_HUGE_PAGE_BYTES + 1])
def test_shapes_and_types_are_as_asked(count: int) -> None:
    tensor = empty((count, 1), torch.int8)
    assert tensor.shape == (count, 1) and tensor.dtype == torch.int8 and tensor.is_contiguous()
