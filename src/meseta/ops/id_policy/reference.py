"""Reference of id policies in plain PyTorch, for any device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from meseta.ops.common import copy_to_device, device_constant
from meseta.ops.hash_ids.reference import splitmix64
from meseta.ops.step_verdict import REJECTED_ID

ERROR, DROP, CLAMP, HASH = range(4)
NUM_REPORT_WORDS = 5
"""Number of words of a `CheckedIds.report` before the numbers of out-of-range ids."""


def count_outside(ids: Tensor, bounds: Sequence[int], num_rows: Sequence[int]) -> Tensor:
    """Count the ids outside 0..num_rows[f]-1 among ids[bounds[f] : bounds[f + 1]], int64 [F]."""
    sizes = copy_to_device([stop - start for start, stop in pairwise(bounds)], torch.int64, ids.device)
    checked = ids[bounds[0] : bounds[-1]]
    limit = device_constant(tuple(num_rows), ids.device)
    feature = torch.repeat_interleave(
        torch.arange(len(num_rows), device=ids.device), sizes, output_size=checked.numel()
    )
    outside = (checked < 0) | (checked >= limit[feature])
    return torch.zeros_like(limit).scatter_add_(0, feature, outside.long())


def fix_ids(
    ids: Tensor, lengths: Tensor, first_bags: Sequence[int], num_rows: Sequence[int], policies: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply policies, given as ERROR, DROP, CLAMP or HASH. A host sync is needed for DROP only.

    Returns int64 tensors (ids, lengths, kept, first_error). `kept` has the original position of each id. `first_error`
    is (feature, sample, id) of the first id that ERROR rejects, or feature -1.
    """
    ids, device = ids.to(torch.int64), ids.device
    starts = copy_to_device(first_bags, torch.int64, device)
    bags = torch.arange(lengths.numel(), device=device)
    bag = torch.repeat_interleave(bags, lengths, output_size=ids.numel())
    feature = torch.searchsorted(starts, bag, right=True) - 1
    limit = device_constant(tuple(num_rows), device)[feature]
    policy = device_constant(tuple(policies), device)[feature]
    outside = (ids < 0) | (ids >= limit)
    refused = outside & (policy == ERROR)
    fixed = torch.where(refused, 0, ids)
    fixed = torch.where(outside & (policy == CLAMP), torch.minimum(ids.clamp(min=0), limit - 1), fixed)
    fixed = torch.where(outside & (policy == HASH), mix_bits(ids) % limit, fixed)
    first_error = device_constant((-1, 0, 0), device)
    if ids.numel():
        at = refused.long().argmax()
        error = torch.stack([feature[at], bag[at] - starts[feature[at]], ids[at]])
        first_error = torch.where(refused[at], error, first_error)
    lengths, kept = lengths.to(torch.int64), torch.arange(ids.numel(), device=device)
    if DROP in policies:
        keep = ~(outside & (policy == DROP))
        lengths = torch.zeros_like(lengths).scatter_add_(0, bag, keep.long())
        fixed, kept = fixed[keep], kept[keep]
    return fixed, lengths.clone(), kept, first_error


def check_ids(
    ids: Tensor, lengths: Tensor, first_bags: Sequence[int], num_rows: Sequence[int], policies: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply policies other than DROP. Returns int64 (ids, offsets, report), see `CheckedIds.report`.

    Feature f starts at bag first_bags[f]. Ids behind the last bag are padding, which is not in the result.
    """
    offsets = torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0, dtype=torch.int64)])
    bounds = offsets[torch.tensor(list(first_bags), device=offsets.device)].tolist()
    ids = ids[: bounds[-1]]
    fixed, _, _, first_error = fix_ids(ids, lengths, first_bags, num_rows, policies)
    return fixed, offsets, make_report(first_error, count_outside(ids, bounds, num_rows))


def make_report(first_error: Tensor, num_outside: Tensor) -> Tensor:
    """Implement `CheckedIds.report`."""
    verdict = (first_error[:1] >= 0).long() * REJECTED_ID
    return torch.cat([verdict, torch.zeros_like(verdict), first_error, num_outside])


def mix_bits(ids: Tensor) -> Tensor:
    """Return SplitMix64 of each id without its highest bit."""
    return splitmix64(ids) & 0x7FFFFFFFFFFFFFFF
