"""One batch, from the reader to the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.jagged import KeyedJaggedTensor
from meseta.jagged.shapes import Float


@dataclass(frozen=True)
class Batch:
    """One rank's contiguous slice of a global batch."""

    dense: Float[Tensor, "B num_dense"]
    """Dense inputs, already filled, transformed and standardised."""
    sparse: KeyedJaggedTensor
    """Ids of all sparse features."""
    label: Float[Tensor, " B"]
    """Clicked or not, 0 to 1."""

    @property
    def batch_size(self) -> int:
        return self.label.numel()

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same on another device."""
        return Batch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            label=self.label.to(device, non_blocking=non_blocking),
        )
