"""A row with its optimizer state side by side, as far sides keep it: one record of bytes.

    | row [columns] | state [columns] | ... | state, one number | ... |

in the order of the names, each as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
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

    def pack(self, values: Mapping[str, Tensor]) -> Shaped[Tensor, "n bytes"]:
        """Records of n rows, uint8, in the memory of the host."""
        num_rows = len(next(iter(values.values())))
        records = torch.empty(num_rows, self.num_bytes, dtype=torch.uint8)
        for name, field in self._fields.items():
            bits = values[name].detach().contiguous().view(num_rows, prod(field.shape)).view(torch.uint8)
            records[:, field.first : field.stop] = bits.cpu()
        return records

    def unpack(self, records: Shaped[Tensor, "n bytes"]) -> dict[str, Tensor]:
        """Values of n rows by name; copies."""
        values = {}
        for name, field in self._fields.items():
            bits = empty((len(records), field.stop - field.first), torch.uint8)
            bits.copy_(records[:, field.first : field.stop])
            values[name] = bits.view(field.dtype).view(len(records), *field.shape)
        return values
