"""Batch of samples, as the reader passes it to the model."""

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
    """Contiguous slice of a global batch that one rank trains."""

    dense: Float[Tensor, "B num_dense"]
    """Dense inputs. Missing values are filled, and columns are transformed and standardized."""
    sparse: KeyedJaggedTensor
    """Ids of all sparse features."""
    label: Float[Tensor, " B *T"]
    """Labels in 0..1 as float32, [B] for one label and [B, T] for T > 1 labels. NaN if the dataset has no label, and 0
    where `label_mask` is false."""
    weight: Float[Tensor, " B"] | None = None
    """Sample weights as float32, finite and not negative. `None` means that all are 1."""
    group: Int[Tensor, " B"] | None = None
    """Keys (int64) of the groups of samples, for metrics within groups. `None` if the dataset has no groups."""
    label_mask: Bool[Tensor, " B *T"] | None = None
    """Whether each label is known, in the shape of `label`. `None` means that all are known."""
    num_padding: int = 0
    """Number of padding samples at the end of the slice. They have weight 0 and no ids, and do not affect any
    result."""
    position: Position | None = None
    """Position of the reader after this batch. `None` if the batch does not come from a reader."""

    @property
    def batch_size(self) -> int:
        """Number of samples, including padding."""
        return self.label.shape[0]

    @property
    def label_mask_2d(self) -> Bool[Tensor, "B T"] | None:
        """`label_mask` with one column per task. `None` if all labels are known."""
        mask = self.label_mask
        return mask[:, None] if mask is not None and mask.dim() == 1 else mask

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that are not `None`, in the order that `with_tensors` expects."""
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
        """Return (sample, column, value) of the first dense input that is not finite, or `None`."""
        places = torch.nonzero(~self.dense.isfinite()).tolist()
        return None if not places else (*places[0], float(self.dense[tuple(places[0])]))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Batch:
        """Return a copy with `tensors` in place of the property `tensors`, such as copies on another device."""
        replacements = iter(tensors)
        sparse = self.sparse
        return replace(
            self,
            dense=next(replacements),
            sparse=sparse.with_tensors(
                next(replacements), next(replacements), None if sparse.weights is None else next(replacements)
            ),
            label=next(replacements),
            weight=None if self.weight is None else next(replacements),
            group=None if self.group is None else next(replacements),
            label_mask=None if self.label_mask is None else next(replacements),
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`. Returns the same object if it is already there."""
        if self.label.device == torch.device(device):
            return self
        return self.with_tensors([tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors])
