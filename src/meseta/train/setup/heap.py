"""What the C library's heap grows to while training takes and gives back blocks of memory.

A model of glibc up to 2.37 as `meseta.ops.allocator.keep_freed_memory` sets it. torch asks for blocks at multiples of
64 bytes; each is cut from a larger one, and the ends are kept for small requests. So a block that was given back is not
joined with its neighbours, and is too small by its ends for the next one of its size. Of nine models on batches of
1,024 samples to 16,384, bytes in use are 0.43 to 0.99 of what /proc says, and what is told here is 0.69 to 1.22 of it.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable

MMAP_THRESHOLD_BYTES = 32 << 20
"""Blocks from here on, for which the heap has no room, are the system's, and go back to it."""
_BLOCK_ALIGNMENT_BYTES = 64
_CHUNK_HEADER_BYTES, _CHUNK_ALIGNMENT_BYTES, _MIN_CHUNK_BYTES = 8, 16, 32
"""Bytes of a chunk beside its block, what its size is a multiple of, and its least size."""
_MAX_TCACHE_BYTES, _MAX_TCACHE_COUNT = 1040, 7
"""Chunks below are kept for requests of their size, so many of each."""
NUM_SIMULATED_STEPS = 3
"""Steps after which the heap grows little more."""


class HeapModel:
    """One heap, which never shrinks, and the blocks beside it."""

    def __init__(self) -> None:
        self.peak = 0
        """The most bytes of the heap and beside it."""
        self._free: list[tuple[int, int]] = []
        """(place, size) of chunks that are free, in order; none touches the next, or the end."""
        self._end = 0
        """Of what is used."""
        self._max_end = 0
        """The furthest that the end ever was."""
        self._mmapped_bytes = 0
        self._allocated: dict[int, tuple[int | None, int]] = {}
        """Of a block: where its chunk lies, None for beside the heap, and its size."""
        self._tcache_counts: Counter[int] = Counter()

    def allocate(self, block: int, num_bytes: int) -> None:
        """Take a block, under a number of its own."""
        size = -(-(num_bytes + _CHUNK_HEADER_BYTES) // _CHUNK_ALIGNMENT_BYTES) * _CHUNK_ALIGNMENT_BYTES
        wanted = size + _BLOCK_ALIGNMENT_BYTES + _MIN_CHUNK_BYTES
        fitting = [index for index, (_, free) in enumerate(self._free) if free >= wanted]
        if not fitting and self._max_end - self._end < wanted and wanted >= MMAP_THRESHOLD_BYTES:
            self._mmapped_bytes += wanted
            self._allocated[block] = None, wanted
        else:
            if fitting:
                place, free = self._free.pop(min(fitting, key=lambda index: self._free[index][1]))
            else:
                place, free, self._end = self._end, wanted, self._end + wanted
                self._max_end = max(self._max_end, self._end)
            before = -(place + 2 * _CHUNK_HEADER_BYTES) % _BLOCK_ALIGNMENT_BYTES
            before += _BLOCK_ALIGNMENT_BYTES if 0 < before < _MIN_CHUNK_BYTES else 0
            size = size if free - before - size >= _MIN_CHUNK_BYTES else free - before
            self._allocated[block] = place + before, size
            self._free_remainder(place + before + size, free - before - size)
            self._free_remainder(place, before)
        self.peak = max(self.peak, self._max_end + self._mmapped_bytes)

    def free(self, block: int) -> None:
        """Give a block back that was taken."""
        place, size = self._allocated.pop(block)
        if place is None:
            self._mmapped_bytes -= size
        else:
            self._coalesce(place, size)

    def _free_remainder(self, place: int, size: int) -> None:
        if size and size < _MAX_TCACHE_BYTES and self._tcache_counts[size] < _MAX_TCACHE_COUNT:
            self._tcache_counts[size] += 1
        elif size:
            self._coalesce(place, size)

    def _coalesce(self, place: int, size: int) -> None:
        """Let a chunk be free, one with those beside it."""
        index = bisect(self._free, (place, size))
        if index < len(self._free) and place + size == self._free[index][0]:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == place:
            place, before = self._free.pop(index - 1)
            index, size = index - 1, before + size
        if place + size == self._end:
            self._end = place
        else:
            self._free.insert(index, (place, size))


def heap_peak(entries: Iterable[tuple[int, int]]) -> int:
    """The most bytes that are held where training takes and gives back the same blocks in every step: (number of the
    block, bytes taken, or given back where they are negative), in order. What a step keeps is given back at its end."""
    heap, steps = HeapModel(), [*entries]
    for _ in range(NUM_SIMULATED_STEPS):
        left: dict[int, None] = {}
        for block, num_bytes in steps:
            if num_bytes > 0:
                heap.allocate(block, num_bytes)
                left[block] = None
            elif block in left:
                heap.free(block)
                del left[block]
        for block in left:
            heap.free(block)
    return heap.peak
