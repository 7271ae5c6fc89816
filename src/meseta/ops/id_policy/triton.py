"""Id policies on a GPU: one launch fixes and counts out-of-range ids, a second one reports the first error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.common import device_constant
from meseta.ops.id_policy import reference
from meseta.ops.triton_shared import find_last_at_most

IDS = tl.constexpr(512)
"""Number of ids per program."""
ERROR, CLAMP, HASH = (tl.constexpr(number) for number in (reference.ERROR, reference.CLAMP, reference.HASH))


def check_ids(
    ids: Tensor, offsets: Tensor, first_bags: Sequence[int], num_rows: Sequence[int], policies: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `meseta.ops.id_policy.reference.check_ids` on a GPU, with equal results. The host does not wait."""
    num_features, device = len(num_rows), ids.device
    fixed = torch.empty(ids.numel(), dtype=torch.int64, device=device)
    # The number of out-of-range ids per feature, then the number of ids from the first rejected one to the end. The
    # largest such number belongs to the first error, so that an atomic maximum finds it.
    counts = torch.zeros(num_features + 1, dtype=torch.int64, device=device)
    first_error = torch.empty(3, dtype=torch.int64, device=device)
    words = device_constant((*first_bags, *num_rows, *policies), device)
    with torch.cuda.device_of(ids):
        if ids.numel():
            _repair[(triton.cdiv(ids.numel(), IDS.value),)](
                fixed, counts, ids.contiguous(), offsets, words, num_features, ids.numel()
            )
        _report_first_error[(1,)](first_error, counts, ids, offsets, words, num_features, ids.numel(), num_warps=1)
    return fixed, counts[:num_features], first_error


@triton.jit
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _find_feature(at, offsets, words, num_features, live):
    """Return the feature of the id at position `at`: the last one whose first bag starts at or before it."""
    # Features without ids start at the same position as the next feature with ids, and precede it.
    low = tl.zeros_like(at)
    high = low + num_features
    width = num_features
    while width > 1:
        middle = (low + high) // 2
        bag = tl.load(words + middle, mask=live, other=0)
        begins = tl.load(offsets + bag, mask=live, other=0) <= at
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
        width = (width + 1) // 2
    return low


@triton.jit
@no_type_check
def _mix_bits(ids):
    """Return the finalizer of SplitMix64 without its highest bit."""
    mixed = ids.to(tl.uint64) + 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return ((mixed ^ (mixed >> 31)) & 0x7FFFFFFFFFFFFFFF).to(tl.int64)


@triton.jit(do_not_specialize=["num_features"])
@no_type_check
def _repair(fixed, counts, ids, offsets, words, num_features, num_ids):
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    live = at < num_ids
    row = tl.load(ids + at, mask=live, other=0).to(tl.int64)
    feature = _find_feature(at, offsets, words, num_features, live)
    limit = tl.load(words + num_features + 1 + feature, mask=live, other=1)
    policy = tl.load(words + 2 * num_features + 1 + feature, mask=live, other=0)
    outside = live & ((row < 0) | (row >= limit))
    nearest = tl.where(row < 0, 0, limit - 1)
    repaired = tl.where(policy == HASH, _mix_bits(row) % limit, tl.where(policy == CLAMP, nearest, 0))
    tl.store(fixed + at, tl.where(outside, repaired, row), mask=live)
    tl.atomic_add(counts + feature, 1, mask=outside)
    refused = tl.where(outside & (policy == ERROR), num_ids - at, 0)
    tl.atomic_max(counts + num_features, tl.max(refused, axis=0))


@triton.jit(do_not_specialize=["num_features"])
@no_type_check
def _report_first_error(first_error, counts, ids, offsets, words, num_features, num_ids):
    left = tl.load(counts + num_features)
    there = left > 0
    at = tl.where(there, num_ids - left, 0)
    feature = _find_feature(at, offsets, words, num_features, there)
    first_bag = tl.load(words + feature)
    bag = find_last_at_most(offsets, first_bag, tl.load(words + feature + 1) - first_bag, at, there)
    row = tl.load(ids + at, mask=there, other=0).to(tl.int64)
    tl.store(first_error, tl.where(there, feature, -1))
    tl.store(first_error + 1, tl.where(there, bag - first_bag, 0))
    tl.store(first_error + 2, tl.where(there, row, 0))
