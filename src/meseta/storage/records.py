"""A row with its optimizer state side by side, as far sides keep it: one record of bytes.

    | row [columns] | state [columns] | ... | state, one number | ... |

in the order of the names, each as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.jagged.shapes import Shaped
from meseta.ops.memory import empty


class _Field(NamedTuple):
    """Where a value lies in a record."""

    first: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one row."""


class RecordLayout:
    """How rows with their values by name lie in records."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        """Of such values, [rows, ...] each, on any device; numbers do not matter."""
        self._fields: dict[str, _Field] = {}
        first = 0
        for name, value in values.items():
            shape = tuple(value.shape[1:])
            stop = first + prod(shape) * value.element_size()
            self._fields[name] = _Field(first, stop, value.dtype, shape)
            first = stop
        self.num_bytes = first
        """Of a record."""

    @property
    def widths(self) -> list[int]:
        """Bytes of each value of a row."""
        return [field.stop - field.first for field in self._fields.values()]

    def to_bytes(self, values: Mapping[str, NDArray[Any]]) -> list[NDArray[np.uint8]]:
        """Values of n rows, as files have them, as [n, bytes] each, which side by side are their records; copies of
        what is not contiguous."""
        arrays = [values[name].reshape(-1, prod(field.shape)) for name, field in self._fields.items()]
        return [np.ascontiguousarray(array).view(np.uint8) for array in arrays]

    def from_bytes(self, bits: Sequence[Shaped[Tensor, "n _"]]) -> dict[str, Tensor]:
        """The way back, also of whole records: values of n rows by name; copies of what is not contiguous."""
        values = {}
        if len(bits) == 1:
            bits = bits[0].split(self.widths, dim=1)
        for own, (name, field) in zip(bits, self._fields.items(), strict=True):
            whole = own if own.is_contiguous() else empty(own.shape, torch.uint8).copy_(own)
            values[name] = whole.view(field.dtype).view(len(own), *field.shape)
        return values
