"""Byte layout of the records in a backing store. A record is one row and its optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.ops.memory import empty
from meseta.sparse.shapes import Shaped


# A record has the values in the order of their names, without padding:
#
#     | row [columns] | state [columns] | ... | state with one number per row | ... |
class _Field(NamedTuple):
    first: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the value of one row: (columns,), or () for one number per row."""


class RecordLayout:
    """Conversion between named values of rows and records."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        """Derive the layout from the dtypes and shapes of `values` [rows, ...]. Their device and contents do not
        matter."""
        self._fields: dict[str, _Field] = {}
        first = 0
        for name, value in values.items():
            shape = tuple(value.shape[1:])
            stop = first + prod(shape) * value.element_size()
            self._fields[name] = _Field(first, stop, value.dtype, shape)
            first = stop
        self.num_bytes = first

    @property
    def widths(self) -> list[int]:
        """Size of each value of a record in bytes."""
        return [field.stop - field.first for field in self._fields.values()]

    def to_bytes(self, values: Mapping[str, NDArray[Any]]) -> list[NDArray[np.uint8]]:
        """Return each value of n rows as uint8 [n, bytes]. Concatenated on axis 1, they are the records.

        Arrays must have the dtypes of `as_stored`. Contiguous arrays are not copied.
        """
        arrays = [values[name].reshape(-1, prod(field.shape)) for name, field in self._fields.items()]
        return [np.ascontiguousarray(array).view(np.uint8) for array in arrays]

    def from_bytes(self, columns: Sequence[Shaped[Tensor, "n _"]]) -> dict[str, Tensor]:
        """Return the named values of n rows, given whole records or the result of `to_bytes`.

        Contiguous tensors are not copied.
        """
        values = {}
        if len(columns) == 1:
            columns = columns[0].split(self.widths, dim=1)
        for column, (name, field) in zip(columns, self._fields.items(), strict=True):
            contiguous = column if column.is_contiguous() else empty(column.shape, torch.uint8).copy_(column)
            values[name] = contiguous.view(field.dtype).view(len(column), *field.shape)
        return values
