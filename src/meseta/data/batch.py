"""One batch, from the reader to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meseta.data.position import Position
from meseta.jagged import KeyedJaggedTensor
from meseta.jagged.shapes import Bool, Float, Int


@dataclass(frozen=True)
class Batch:
    """One rank's contiguous slice of a global batch."""

    dense: Float[Tensor, "B num_dense"]
    """Dense inputs, already filled, transformed and standardised."""
    sparse: KeyedJaggedTensor
    """Ids of all sparse features."""
    label: Float[Tensor, " B *T"]
    """Clicked or not, 0 to 1: float32 [B] where the dataset has one label, [B, T] where it has T > 1;
    NaN where it has none, 0 where `label_mask` is false."""
    weight: Float[Tensor, " B"] | None = None
    """Weights of the samples, float32, finite and not negative; None: all 1."""
    group: Int[Tensor, " B"] | None = None
    """Keys of the groups that the samples belong to, int64, for metrics within groups; None: there are none."""
    label_mask: Bool[Tensor, " B *T"] | None = None
    """Whether each label is known, of the shape of `label`; None: all are."""
    num_padding: int = 0
    """Samples at its end that only fill it up, with weight 0 and no ids, and count for nothing."""
    position: Position | None = None
    """Where its reader stands after it; None where it came from none."""

    @property
    def batch_size(self) -> int:
        """Samples."""
        return self.label.shape[0]

    @property
    def label_mask_2d(self) -> Bool[Tensor, "B T"] | None:
        """`label_mask` with a column for each task; None if all labels are known."""
        mask = self.label_mask
        return mask[:, None] if mask is not None and mask.dim() == 1 else mask

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that it has."""
        all_of_it = (
            self.dense,
            self.sparse.values,
            self.sparse.lengths,
            self.sparse.weights,
            self.label,
            self.weight,
            self.group,
            self.label_mask,
        )
        return tuple(tensor for tensor in all_of_it if tensor is not None)

    def find_non_finite(self) -> tuple[int, int, float] | None:
        """Sample, column and value of the first dense input that is no finite number; None where all are."""
        places = torch.nonzero(~self.dense.isfinite()).tolist()
        return None if not places else (*places[0], float(self.dense[tuple(places[0])]))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Batch:
        """The same with others in place of `tensors`, such as copies on another device."""
        others = iter(tensors)
        sparse = self.sparse
        return replace(
            self,
            dense=next(others),
            sparse=sparse.with_tensors(next(others), next(others), None if sparse.weights is None else next(others)),
            label=next(others),
            weight=None if self.weight is None else next(others),
            group=None if self.group is None else next(others),
            label_mask=None if self.label_mask is None else next(others),
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same on another device."""
        if self.label.device == torch.device(device):
            return self
        return self.with_tensors([tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors])
