"""Offsets of bags and id policies on a GPU, in two launches, or id policies alone in one."""
# The first launch sums the lengths of chunks of bags. In the second one, some programs of each feature write offsets,
# and the others fix and count out-of-range ids. The last program to finish reports the first error.
#
# Triton parses the source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.common import device_constant
from meseta.ops.id_policy import reference
from meseta.ops.step_verdict import REJECTED_ID
from meseta.ops.triton_shared import find_last_at_most

CHUNK_BAGS = tl.constexpr(4096)
"""Number of bags of a feature whose offsets a program writes."""
IDS = tl.constexpr(512)
"""Number of ids that a program fixes at a time."""
MAX_PROGRAMS = 256
"""Maximum number of programs that fix the ids of a feature."""
SUM_BLOCK = tl.constexpr(1024)
"""Number of chunks whose lengths are added at a time."""
REJECTED = tl.constexpr(REJECTED_ID)
ERROR, CLAMP, HASH = (tl.constexpr(number) for number in (reference.ERROR, reference.CLAMP, reference.HASH))


def check_ids(
    ids: Tensor, lengths: Tensor, first_bags: Sequence[int], num_rows: Sequence[int], policies: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `meseta.ops.id_policy.reference.check_ids` on a GPU, with equal results. The host does not wait.

    The result has all of `ids`, but those behind the last bag are not initialized.
    """
    num_features, device = len(num_rows), ids.device
    num_chunks = max(triton.cdiv(max(stop - start for start, stop in pairwise(first_bags)), CHUNK_BAGS.value), 1)
    # Twice as many programs as needed if all features have as many ids.
    num_programs = min(max(triton.cdiv(2 * ids.numel(), IDS.value * num_features), 1), MAX_PROGRAMS)
    num_sums = num_features * num_chunks
    sizes = ids.numel(), num_sums + first_bags[-1] + 1, NUM_OUTSIDE.value + num_features
    fixed, work, report = (torch.empty(size, dtype=torch.int64, device=device) for size in sizes)
    words = device_constant((num_features, num_chunks, *first_bags, *num_rows, *policies), device)
    with torch.cuda.device_of(ids):
        lengths = lengths.contiguous()
        _sum_lengths[(num_features, num_chunks)](report, work, lengths, words)
        grid = (num_features, num_chunks + num_programs)
        _check[grid](fixed, report, work, ids.contiguous(), lengths, words, ids.numel())
    return fixed, work[num_sums:], report


def check_placed_ids(
    ids: Tensor, zeros: Tensor, offsets: Tensor, numbers: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Check ids as `check_ids` does, in one launch, if the offsets of all bags are known. Returns (ids, report).

    Args:
        ids: Ids of all features.
        zeros: int64 zeros [F + 5], which are overwritten.
        offsets: Offsets of all bags.
        numbers: The first bags, the key offsets, the numbers of rows and the policies.
    """
    first_bags, bounds, num_rows, policies = numbers
    num_features = len(num_rows)
    fixed, report = (torch.empty(size, dtype=torch.int64, device=ids.device) for size in (ids.numel(), len(zeros)))
    longest = max((stop - start for start, stop in pairwise(bounds)), default=0)
    grid = (num_features, min(max(triton.cdiv(longest, IDS.value), 1), MAX_PROGRAMS))
    # There are no programs that write offsets.
    words = device_constant((num_features, 0, *first_bags, *num_rows, *policies, *bounds), ids.device)
    with torch.cuda.device_of(ids):
        _check_placed[grid](fixed, report, zeros, ids.contiguous(), offsets, words, ids.numel())
    return fixed, report


# `words` has the numbers of features F and of chunks C per feature, then F + 1 first bags, F numbers of rows and F
# policies, and in `_check_placed` the F + 1 key offsets. `work` has the F * C sums of the lengths of chunks, and the
# offsets. Until the last program finishes, the first words of `report` (or `zeros`) are the number of ids from the
# first rejected one to the end, and the number of programs that have finished. The largest number of ids to the end
# belongs to the first error, so that an atomic maximum finds it.
NUM_OUTSIDE = tl.constexpr(reference.NUM_REPORT_WORDS)
"""Position of the numbers of out-of-range ids in `report`."""
BAGS = tl.constexpr(2)
"""Position of the first bags in `words`."""


@triton.jit
@no_type_check
def _sum_lengths(report, work, lengths, words):
    """Write the sums of the lengths of chunks, and set all counts to 0."""
    feature, chunk = tl.program_id(0), tl.program_id(1)
    bag = tl.load(words + BAGS + feature) + chunk * CHUNK_BAGS + tl.arange(0, CHUNK_BAGS)
    length = tl.load(lengths + bag, mask=bag < tl.load(words + BAGS + feature + 1), other=0).to(tl.int64)
    tl.store(work + feature * tl.num_programs(1) + chunk, tl.sum(length, axis=0))
    tl.store(report + NUM_OUTSIDE + feature, 0)
    tl.store(report, 0)
    tl.store(report + 1, 0)


@triton.jit(do_not_specialize=["num_ids"])
@no_type_check
def _check(fixed, report, work, ids, lengths, words, num_ids):
    """Write offsets, fix ids, and report the first error."""
    feature, part = tl.program_id(0), tl.program_id(1)
    num_features, num_chunks = tl.load(words), tl.load(words + 1)
    offsets = work + num_features * num_chunks
    if part < num_chunks:
        first_bag, last_bag = tl.load(words + BAGS + feature), tl.load(words + BAGS + feature + 1)
        bag = first_bag + part * CHUNK_BAGS + tl.arange(0, CHUNK_BAGS)
        length = tl.load(lengths + bag, mask=bag < last_bag, other=0).to(tl.int64)
        ends = _sum_first(work, feature * num_chunks + part) + tl.cumsum(length, axis=0)
        tl.store(offsets + bag + 1, ends, mask=bag < last_bag)
        tl.store(offsets + tl.zeros_like(bag), tl.zeros_like(bag), mask=bag == 0)
    else:
        first_chunk = feature * num_chunks
        begin = _sum_first(work, first_chunk) + (part - num_chunks) * IDS
        end = tl.minimum(_sum_first(work, first_chunk + num_chunks), num_ids)
        _repair(fixed, report, ids, words, feature, begin, end, num_ids)
    # All threads of this program have written before its number of finished programs, which orders the writes of all
    # programs before the reads of the last one.
    tl.debug_barrier()
    num_finished = tl.atomic_add(report + 1, 1, sem="acq_rel")
    if num_finished == tl.num_programs(0) * tl.num_programs(1) - 1:
        _report_first_error(report, tl.load(report), offsets, ids, words, num_ids)


@triton.jit(do_not_specialize=["num_ids"])
@no_type_check
def _check_placed(fixed, report, zeros, ids, offsets, words, num_ids):
    """Fix ids and count in `zeros`, which the last program copies to the report."""
    feature, num_features = tl.program_id(0), tl.load(words)
    bounds = words + BAGS + 3 * num_features + 1
    begin = tl.load(bounds + feature) + tl.program_id(1) * IDS
    _repair(fixed, zeros, ids, words, feature, begin, tl.load(bounds + feature + 1), num_ids)
    tl.debug_barrier()  # See `_check`.
    if tl.atomic_add(zeros + 1, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1:
        for first in range(0, num_features, IDS):
            index = first + tl.arange(0, IDS)
            counts = tl.load(zeros + NUM_OUTSIDE + index, mask=index < num_features, other=0)
            tl.store(report + NUM_OUTSIDE + index, counts, mask=index < num_features)
        _report_first_error(report, tl.load(zeros), offsets, ids, words, num_ids)


@triton.jit
@no_type_check
def _sum_first(sums, count):
    """Return the sum of the first `count` numbers."""
    total = tl.zeros([SUM_BLOCK], dtype=tl.int64)
    for first in range(0, count, SUM_BLOCK):
        index = first + tl.arange(0, SUM_BLOCK)
        total += tl.load(sums + index, mask=index < count, other=0)
    return tl.sum(total, axis=0)


@triton.jit
@no_type_check
def _mix_bits(ids):
    """Return the finalizer of SplitMix64 without its highest bit."""
    mixed = ids.to(tl.uint64) + 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return ((mixed ^ (mixed >> 31)) & 0x7FFFFFFFFFFFFFFF).to(tl.int64)


@triton.jit
@no_type_check
def _repair(fixed, report, ids, words, feature, begin, end, num_ids):
    """Fix and count out-of-range ids of a feature in ids[begin:end]. Other programs have some of them."""
    num_features, num_chunks = tl.load(words), tl.load(words + 1)
    limit = tl.load(words + BAGS + num_features + 1 + feature)
    policy = tl.load(words + BAGS + 2 * num_features + 1 + feature)
    num_outside = tl.zeros([IDS], dtype=tl.int64)
    refused = tl.zeros([IDS], dtype=tl.int64)
    for first in range(begin, end, (tl.num_programs(1) - num_chunks) * IDS):
        at = first + tl.arange(0, IDS)
        live = at < end
        row = tl.load(ids + at, mask=live, other=0).to(tl.int64)
        outside = live & ((row < 0) | (row >= limit))
        nearest = tl.where(row < 0, 0, limit - 1)
        repaired = tl.where(policy == HASH, _mix_bits(row) % limit, tl.where(policy == CLAMP, nearest, 0))
        tl.store(fixed + at, tl.where(outside, repaired, row), mask=live)
        num_outside += outside.to(tl.int64)
        refused = tl.maximum(refused, tl.where(outside & (policy == ERROR), num_ids - at, 0))
    tl.atomic_add(report + NUM_OUTSIDE + feature, tl.sum(num_outside, axis=0))
    tl.atomic_max(report, tl.max(refused, axis=0))


@triton.jit
@no_type_check
def _report_first_error(report, left, offsets, ids, words, num_ids):
    num_features = tl.load(words)
    there = left > 0
    at = tl.where(there, num_ids - left, 0)
    feature = _find_feature(at, offsets, words, num_features, there)
    first_bag = tl.load(words + BAGS + feature)
    bag = find_last_at_most(offsets, first_bag, tl.load(words + BAGS + feature + 1) - first_bag, at, there)
    row = tl.load(ids + at, mask=there, other=0).to(tl.int64)
    tl.store(report, tl.where(there, REJECTED, 0))
    tl.store(report + 1, 0)
    tl.store(report + 2, tl.where(there, feature, -1))
    tl.store(report + 3, tl.where(there, bag - first_bag, 0))
    tl.store(report + 4, tl.where(there, row, 0))


@triton.jit
@no_type_check
def _find_feature(at, offsets, words, num_features, live):
    """Return the feature of the id at position `at`: the last one whose first bag starts at or before it."""
    # Features without ids start at the same position as the next feature with ids, and precede it.
    low = tl.zeros_like(at)
    high = low + num_features
    width = num_features
    while width > 1:
        middle = (low + high) // 2
        bag = tl.load(words + BAGS + middle, mask=live, other=0)
        begins = tl.load(offsets + bag, mask=live, other=0) <= at
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
        width = (width + 1) // 2
    return low
