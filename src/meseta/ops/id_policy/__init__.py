"""What happens to ids outside their table; none is ever read as another row in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.jagged import KeyedJaggedTensor
from meseta.jagged.shapes import Int
from meseta.spec import IdPolicy


@dataclass(frozen=True)
class CheckedIds:
    """A batch whose ids are all valid rows, unless `first_error` says otherwise."""

    kjt: KeyedJaggedTensor
    """Ids after the policies, int64."""
    num_outside: Int[Tensor, " F"]
    """Ids outside their table, per feature."""
    first_error: Int[Tensor, " 3"]
    """(feature, sample, id) of the first id that the policy 'error' refuses; feature is -1 where there is none.
    Such ids read row 0 until the error is raised, at the latest before any row is written."""


def apply_id_policy(kjt: KeyedJaggedTensor, num_rows: Sequence[int], policies: Sequence[IdPolicy]) -> CheckedIds:
    """Apply each feature's policy to the ids outside 0..num_rows-1 [F]. No host sync unless a policy is 'drop'.

    'clamp' moves to the nearest row; 'hash' mixes the 64 bits of the id (the finaliser of SplitMix64: Steele et al.,
    "Fast splittable pseudorandom number generators", OOPSLA 2014) and takes them modulo the rows; 'drop' leaves the
    id out.
    """
    ids, device = kjt.values.to(torch.int64), kjt.values.device
    num_features, num_bags = len(kjt.keys), kjt.lengths.numel()
    per_bag = torch.tensor(kjt.batch_sizes, device=device)
    feature_of_bag = torch.repeat_interleave(torch.arange(num_features, device=device), per_bag, output_size=num_bags)
    feature = torch.repeat_interleave(feature_of_bag, kjt.lengths, output_size=ids.numel())
    limit = torch.tensor(num_rows, device=device)[feature]
    outside = (ids < 0) | (ids >= limit)
    num_outside = torch.zeros(num_features, dtype=torch.int64, device=device)
    num_outside.scatter_add_(0, feature, outside.long())

    def under(policy: str) -> Tensor:
        return outside & torch.tensor([p == policy for p in policies], device=device)[feature]

    refused = under("error")
    first_error = _first(refused, feature, kjt, ids) if ids.numel() else torch.tensor([-1, 0, 0], device=device)
    fixed = torch.where(refused, 0, ids)
    if "clamp" in policies:
        fixed = torch.where(under("clamp"), torch.minimum(ids.clamp(min=0), limit - 1), fixed)
    if "hash" in policies:
        fixed = torch.where(under("hash"), _mix(ids) % limit, fixed)
    kept = kjt.with_values(fixed)
    if "drop" in policies:
        kept = _drop(kept, under("drop"))
    return CheckedIds(kjt=kept, num_outside=num_outside, first_error=first_error)


def _drop(kjt: KeyedJaggedTensor, dropped: Tensor) -> KeyedJaggedTensor:
    """Shorter bags without the marked ids [nnz]."""
    keep = ~dropped
    bags = torch.arange(kjt.lengths.numel(), device=dropped.device)
    bag = torch.repeat_interleave(bags, kjt.lengths, output_size=dropped.numel())
    return KeyedJaggedTensor(
        keys=kjt.keys,
        values=kjt.values[keep],
        lengths=torch.zeros_like(kjt.lengths).scatter_add_(0, bag, keep.to(kjt.lengths.dtype)),
        weights=None if kjt.weights is None else kjt.weights[keep],
        batch_sizes=kjt.batch_sizes,
    )


def _first(refused: Tensor, feature: Tensor, kjt: KeyedJaggedTensor, ids: Tensor) -> Tensor:
    """(feature, sample, id) at the first marked position, or feature -1."""
    at = refused.long().argmax()
    bag = torch.searchsorted(kjt.offsets, at, right=True) - 1
    starts = torch.tensor([sum(kjt.batch_sizes[:f]) for f in range(len(kjt.keys))], device=ids.device)
    found = torch.stack([feature[at], bag - starts[feature[at]], ids[at]])
    return torch.where(refused[at], found, torch.tensor([-1, 0, 0], device=ids.device))


def _mix(ids: Tensor) -> Tensor:
    """SplitMix64's finaliser; int64 products wrap as the method wants, shifts are made logical by a mask."""
    mixed = ids + (0x9E3779B97F4A7C15 - (1 << 64))
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - (1 << 64))
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) & 0x7FFFFFFFFFFFFFFF
