"""Triton kernels that prepare a row update: list the contributions to each row, order them, and sum long runs."""
# All kernels read the `plan`, int64 words: PLAN_WORDS with sizes, FEATURE_WORDS per feature, then the words of the
# tables, then the first key of each group of tables. Contributions are numbered by (feature, sample, id).
#
# An item has two words. The first one is the address of a gradient. The lower 32 bits of the second one are the block
# of samples. Its upper 32 bits are the scale before the sort, and then the distance to the next item.
#
# Triton parses the source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from meseta.ops.row_update.triton_parts import FEATURE_WORDS, PLAN_WORDS
from meseta.ops.triton_shared import find_last_at_most

ITEMS_PER_PROGRAM = tl.constexpr(512)
"""Number of items per program."""
FEATURE_BLOCK = tl.constexpr(32)
"""Number of features among which a program searches at a time."""
SEGMENT_ITEMS = tl.constexpr(4096)
"""Number of items per program of `mark_segments`, a multiple of ITEMS_PER_PROGRAM."""
# A run has the contributions of one block of samples to one row.
MIN_LONG_RUN = tl.constexpr(16)
"""Minimum length of a run that is summed before the update."""
# At most one long run starts within MIN_LONG_RUN consecutive items.
RUN_SLOTS = tl.constexpr(8)
"""Number of sections of MIN_LONG_RUN items per program."""
PREFETCH_ITEMS = tl.constexpr(8)
"""Number of gradients of a run that are loaded before they are added."""
SCAN_ITEMS = tl.constexpr(256)
"""Number of items that are searched for the end of a run, or numbers that are summed, at a time."""
BLOCK_SAMPLES = tl.constexpr(256)
"""Number of samples per block."""


@triton.jit(do_not_specialize=["limit", "gradients"])
@no_type_check
def list_items(keys, items, plan, ids, offsets, weights, gradients, limit):
    """Write key and item of each contribution. `gradients` is the only matrix, or has the int64 addresses of all."""
    num_features, num_bags, num_rows = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2)
    n = tl.program_id(0).to(tl.int64) * ITEMS_PER_PROGRAM + tl.arange(0, ITEMS_PER_PROGRAM)
    k, begin, num_items = _find_feature(n, plan, offsets, num_features, num_bags)
    live = n < num_items
    feature = plan + PLAN_WORDS + k * FEATURE_WORDS
    position = tl.load(feature, mask=live, other=0)
    table = plan + tl.load(plan + 4) + tl.load(feature + 1, mask=live, other=0) * tl.load(plan + 5)
    ordinal = n - begin
    at = ordinal + tl.load(offsets + position * num_bags, mask=live, other=0)
    sample = find_last_at_most(offsets, position * num_bags, num_bags, at, live) - position * num_bags

    row = tl.load(ids + at, mask=live, other=0).to(tl.int64)
    fits = live & (row >= 0) & (row < tl.load(table + 2, mask=live, other=0))
    key = tl.where(fits, row + tl.load(table + 3, mask=live, other=0), num_rows)
    tl.store(keys + n, key.to(keys.dtype.element_ty), mask=n < limit)

    matrix = tl.load(feature + 2, mask=live, other=0)
    if gradients.dtype.element_ty == tl.int64:
        address = tl.load(gradients + matrix, mask=live, other=0)
    else:
        address = gradients.to(tl.int64)
    line = tl.where(tl.load(feature + 5, mask=live, other=0) != 0, ordinal, sample)
    element = line * tl.load(feature + 4, mask=live, other=0) + tl.load(feature + 3, mask=live, other=0)
    tl.store(items + 2 * n, address + 4 * element, mask=live)
    block = k * tl.load(plan + 3) + sample // BLOCK_SAMPLES
    if weights is not None:
        is_weighted = tl.load(feature + 6, mask=live, other=0)
        scale = tl.load(weights + at, mask=live & (is_weighted != 0), other=1.0).to(tl.int32, bitcast=True)
        block = block | (scale.to(tl.int64) << 32)
    tl.store(items + 2 * n + 1, block, mask=live)


@triton.jit
@no_type_check
def _find_feature(n, plan, offsets, num_features, num_bags):
    """Return (feature, first contribution of this feature) of contributions `n`, and the number of contributions."""
    num_started, begin = tl.zeros_like(n), tl.zeros_like(n)
    num_items = num_features * 0
    for first in range(0, num_features, FEATURE_BLOCK):
        index = first + tl.arange(0, FEATURE_BLOCK)
        live = index < num_features
        position = tl.load(plan + PLAN_WORDS + index * FEATURE_WORDS, mask=live, other=0)
        start = tl.load(offsets + position * num_bags, mask=live, other=0).to(tl.int64)
        length = tl.load(offsets + (position + 1) * num_bags, mask=live, other=0).to(tl.int64) - start
        begins = num_items + tl.cumsum(length, axis=0) - length
        has_started = live[None, :] & (begins[None, :] <= n[:, None])
        num_started += tl.sum(has_started.to(tl.int64), axis=1)
        begin = tl.maximum(begin, tl.max(tl.where(has_started, begins[None, :], 0), axis=1))
        num_items += tl.sum(length, axis=0)
    return num_started - 1, begin, num_items


@triton.jit(do_not_specialize=["limit"])
@no_type_check
def order_items(ordered, scales, num_keys, items, keys, order, plan, limit):
    """Write items and scales in the order of the sort. Each item then points to the next one.

    `num_keys` [programs] receives the number of items of each program whose key differs from the previous one.
    """
    n = tl.program_id(0).to(tl.int64) * ITEMS_PER_PROGRAM + tl.arange(0, ITEMS_PER_PROGRAM)
    live = n < limit
    key = tl.load(keys + n, mask=live, other=0)
    is_first = live & (key != tl.load(keys + n - 1, mask=live & (n > 0), other=-1))
    tl.store(num_keys + tl.program_id(0), tl.sum(is_first.to(tl.int32), axis=0))
    live = live & (key < tl.load(plan + 2))
    source = tl.load(order + n, mask=live, other=0)
    block = tl.load(items + 2 * source + 1, mask=live, other=0)
    tl.store(ordered + 2 * n, tl.load(items + 2 * source, mask=live, other=0), mask=live)
    tl.store(ordered + 2 * n + 1, (block & 0xFFFFFFFF) | (1 << 32), mask=live)
    if scales is not None:
        tl.store(scales + n, (block >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=live)


@triton.jit(do_not_specialize=["limit"])
@no_type_check
def mark_segments(segments, ranges, keys, num_keys, plan, limit) -> None:
    """Write the first item of each key to `segments`, and the first segment of each group of tables to `ranges`.

    `num_keys` is that of `order_items`. `ranges` ends with the first segment of unused entries.
    """
    first = tl.program_id(0).to(tl.int64) * SEGMENT_ITEMS
    num_before = tl.zeros([SCAN_ITEMS], dtype=tl.int64)
    for start in range(0, first // ITEMS_PER_PROGRAM, SCAN_ITEMS):
        index = start + tl.arange(0, SCAN_ITEMS)
        num_before += tl.load(num_keys + index, mask=index < first // ITEMS_PER_PROGRAM, other=0)
    n = first + tl.arange(0, SEGMENT_ITEMS)
    live = n < limit
    key = tl.load(keys + n, mask=live, other=0).to(tl.int64)
    before = tl.load(keys + n - 1, mask=live & (n > 0), other=-1).to(tl.int64)
    is_first = live & (key != before)
    segment = tl.sum(num_before, axis=0) + tl.cumsum(is_first.to(tl.int64), axis=0)
    is_last = n == limit - 1
    tl.store(segments + segment - 1, n, mask=is_first)
    tl.store(segments + segment, n + 1, mask=is_last)
    bounds = plan + tl.load(plan + 6)
    for group in range(tl.load(plan + 7) + 1):
        bound = tl.load(bounds + group)
        tl.store(ranges + group + tl.zeros_like(n), segment - 1, mask=live & (before < bound) & (bound <= key))
        tl.store(ranges + group + tl.zeros_like(n), segment, mask=is_last & (key < bound))


@triton.jit(do_not_specialize=["limit"])
@no_type_check
def sum_long_runs(sums, items, scales, keys, plan, limit, COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    """Sum long runs, left to right, into `sums` [limit // MIN_LONG_RUN + 1, COLUMNS]. Their first item points there."""
    index = tl.arange(0, RUN_SLOTS * MIN_LONG_RUN)
    n = tl.program_id(0).to(tl.int64) * (RUN_SLOTS * MIN_LONG_RUN) + index
    end = n + MIN_LONG_RUN - 1
    live = end < limit
    key = tl.load(keys + n, mask=live, other=0).to(tl.int64)
    live = live & (key < tl.load(plan + 2))
    live = live & (tl.load(keys + end, mask=live, other=-1) == key)
    block = tl.load(items + 2 * n + 1, mask=live, other=0) & 0xFFFFFFFF
    live = live & ((tl.load(items + 2 * end + 1, mask=live, other=-1) & 0xFFFFFFFF) == block)
    # The previous item may start a run that another program has summed. That changes only its upper 32 bits.
    same_key = tl.load(keys + n - 1, mask=live & (n > 0), other=-1) == key
    same_block = (tl.load(items + 2 * n - 1, mask=live & (n > 0), other=-1) & 0xFFFFFFFF) == block
    waiting = (live & ~(same_key & same_block)).to(tl.int32)
    while tl.max(waiting, axis=0) > 0:
        chosen = tl.min(tl.where(waiting > 0, index, RUN_SLOTS * MIN_LONG_RUN), axis=0)
        waiting = tl.where(index == chosen, 0, waiting)
        first = tl.program_id(0).to(tl.int64) * (RUN_SLOTS * MIN_LONG_RUN) + chosen
        _sum_run(sums, items, scales, plan, first, _run_end(items, keys, first, limit), COLUMNS, VECTOR)


@triton.jit
@no_type_check
def _run_end(items, keys, first, limit):
    key = tl.load(keys + first)
    block = tl.load(items + 2 * first + 1) & 0xFFFFFFFF
    end = first
    step = first * 0 + SCAN_ITEMS
    while step == SCAN_ITEMS:
        n = end + tl.arange(0, SCAN_ITEMS)
        same = (n < limit) & (tl.load(keys + n, mask=n < limit, other=0) == key)
        same = same & ((tl.load(items + 2 * n + 1, mask=same, other=-1) & 0xFFFFFFFF) == block)
        step = tl.sum(same.to(tl.int64), axis=0)
        end += step
    return end


@triton.jit
@no_type_check
def _sum_run(sums, items, scales, plan, first, end, COLUMNS: tl.constexpr, VECTOR: tl.constexpr):
    k = (tl.load(items + 2 * first + 1) & 0xFFFFFFFF) // tl.load(plan + 3)
    table = tl.load(plan + PLAN_WORDS + k * FEATURE_WORDS + 1)
    dim = tl.load(plan + tl.load(plan + 4) + table * tl.load(plan + 5) + 1)
    column = tl.arange(0, COLUMNS)
    # -0.0 is neutral: adding it changes no number, not even the sign of zero.
    total = tl.where(column < 0, 0.0, -0.0)
    for start in range(first, end, PREFETCH_ITEMS):
        for ahead in tl.static_range(PREFETCH_ITEMS):
            n = start + ahead
            line = tl.load(items + 2 * n, mask=n < end, other=0).to(tl.pointer_type(tl.float32))
            width = tl.multiple_of(tl.where(n < end, dim, 0), VECTOR)
            term = tl.load(tl.multiple_of(line, VECTOR * 4) + column, mask=column < width, other=-0.0)
            if scales is not None:
                term = term * tl.load(scales + n, mask=n < end, other=1.0)
            total += term
    line = sums + first // MIN_LONG_RUN * COLUMNS
    tl.store(line + column, total, mask=column < dim)
    tl.store(items + 2 * first, line.to(tl.int64))
    block = tl.load(items + 2 * first + 1) & 0xFFFFFFFF
    tl.store(items + 2 * first + 1, block | ((end - first) << 32))
    if scales is not None:
        tl.store(scales + first, 1.0)
