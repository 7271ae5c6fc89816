"""Numbers that change in every training step, in device memory, so that a CUDA graph can read them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from meseta.ops.step_scalars import reference
from meseta.ops.step_scalars.reference import WORDS_PER_BLOCK
from meseta.sparse.shapes import Shaped
from meseta.spec import MesetaError

_FORMATS = {torch.int64: "Q", torch.float64: "d", torch.float32: "f4x"}
"""Format of one word in `struct`. A float32 number has the lower half of its word."""


class StepNumbers(NamedTuple):
    """Numbers of one step, from which all others are computed on the host."""

    step: int
    """Number of updates before this step."""
    lr_factor: float
    """Factor of the learning rates of all tables."""
    divisor: float = 1.0
    """Divisor of the sum of the losses."""


@dataclass(frozen=True)
class _Slot:
    compute: Callable[[StepNumbers], Sequence[float]]
    packing: Struct
    view: Tensor


class _WordBlock:
    """Words in device memory that are written together."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self.num_used = 0
        self.slots: list[_Slot] = []

    def add(self, slot_size: int, dtype: torch.dtype, compute: Callable[[StepNumbers], Sequence[float]]) -> Tensor:
        first, stop = self.num_used, self.num_used + slot_size
        view = self.words[first:stop].view(dtype)
        self.slots.append(_Slot(compute, Struct("<" + slot_size * _FORMATS[dtype]), view[:: 8 // dtype.itemsize]))
        self.num_used = stop
        return self.slots[-1].view

    def write(self, numbers: StepNumbers) -> None:
        packed = b"".join(slot.packing.pack(*slot.compute(numbers)) for slot in self.slots)
        if self.words.device.type == "cuda":
            from meseta.ops.step_scalars import triton

            triton.write_words(self.words, packed)
        else:
            reference.write_words(self.words, packed)


class StepScalars:
    """Numbers of the current step on a device. Each number keeps its address.

    The host computes all of them at the start of a step, and one kernel per seven numbers receives them as arguments. A
    kernel that reads one from device memory can be captured in a CUDA graph, and one that receives it as an argument
    cannot.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[Hashable, Tensor] = {}
        self._blocks: list[_WordBlock] = []
        self._numbers = StepNumbers(0, 1.0)

    def write(self, numbers: StepNumbers) -> None:
        """Compute all numbers of a step and write them in the current stream."""
        self._numbers = numbers
        for block in self._blocks:
            block.write(numbers)

    def view(
        self, key: Hashable, dtype: torch.dtype, compute: Callable[[StepNumbers], Sequence[float]]
    ) -> Shaped[Tensor, " n"]:
        """Return the numbers `key` of the current step on the device, [n]. Their address never changes.

        Args:
            key: Name of the numbers, unique for these scalars.
            dtype: float64, float32, or int64 with unsigned numbers.
            compute: Function that returns n numbers for a step, always the same n.

        Raises:
            MesetaError: The key is used for the first time while a CUDA graph is captured.
        """
        if (known := self._slots.get(key)) is not None:
            return known
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise MesetaError(
                f"a CUDA graph is captured, but {key!r} is not in the memory of this step; run the same step once "
                "before the capture"
            )
        size = len(compute(self._numbers))
        if not self._blocks or self._blocks[-1].num_used + size > len(self._blocks[-1].words):
            self._blocks.append(_WordBlock(-(-size // WORDS_PER_BLOCK) * WORDS_PER_BLOCK, self._device))
        self._slots[key] = self._blocks[-1].add(size, dtype, compute)
        self._blocks[-1].write(self._numbers)
        return self._slots[key]
