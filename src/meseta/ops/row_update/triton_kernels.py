"""Triton kernels that sort the contributions to rows, and sum long runs of them."""
# Contributions are numbered by (feature as listed, sample, id). A bag is numbered by feature * num_bags + sample.
#
# Each contribution has a key and a bag. Keys ascend by width of the table, table and row. Keys of 16 bits are shifted
# by SHIFT, so that they use the negative numbers too.
#
# A run has the contributions of one block of samples to one row. The first contribution of a long run has the
# complement of its bag, which is negative.
#
# INDEX is the type of the numbers of contributions. Triton parses the source of these functions, so that no decorator
# that checks types may wrap them.

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from meseta.ops.row_update.triton_parts import MIN_LONG_RUN, WIDTH, block_of, find_line, find_matrix, load_tile, neutral
from meseta.ops.triton_shared import find_last_at_most

CHUNK = tl.constexpr(512)
"""Number of contributions per program of `list_keys` and `order_bags`."""
FEATURE_BLOCK = tl.constexpr(32)
"""Number of features among which a program searches at a time."""
# Plan of `list_keys`, int64 words: number of features, of samples and of rows of all tables. Then the position of each
# feature in the offsets, the number of rows of its table, the key of its first row, and whether it is weighted.
KEY_PLAN_WORDS, KEY_WORDS = tl.constexpr(3), tl.constexpr(4)
# At most one long run starts within MIN_LONG_RUN consecutive contributions.
RUN_SLOTS = tl.constexpr(8)
"""Number of sections of MIN_LONG_RUN contributions per program."""
PREFETCH_LINES = tl.constexpr(8)
"""Number of gradients of a run that are loaded before they are added."""
SCAN_ITEMS = tl.constexpr(256)
"""Number of contributions that are searched for the end of a run at a time."""


@triton.jit(do_not_specialize=["limit"])
@no_type_check
def list_keys(out, plan, ids, offsets, weights, limit, SHIFT: tl.constexpr, INDEX: tl.constexpr):
    """Write key, bag and weight of each contribution, and the first contribution of each feature.

    Contributions of ids outside their table, and entries without a contribution, have the number of all rows as key.
    """
    num_features, num_bags, num_rows = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2)
    first = tl.program_id(0).to(INDEX) * CHUNK
    n = first + tl.arange(0, CHUNK)
    k, begin = _find_feature(first, plan, offsets, num_features, num_bags)
    while (k < num_features) & (begin < first + CHUNK):
        feature = plan + KEY_PLAN_WORDS + k * KEY_WORDS
        first_bag = tl.load(feature) * num_bags
        start = tl.load(offsets + first_bag).to(INDEX)
        length = tl.load(offsets + first_bag + num_bags).to(INDEX) - start
        live = (n >= begin) & (n < begin + length) & (n < limit)
        at = start + n - begin
        sample = _find_sample(offsets + first_bag, num_bags.to(INDEX), at, n - begin, length, live)
        row = tl.load(ids + at, mask=live, other=0).to(tl.int64)
        fits = (row >= 0) & (row < tl.load(feature + 1))
        key = tl.where(fits, row + tl.load(feature + 2), num_rows) - SHIFT
        tl.store(out.keys + n, key.to(out.keys.dtype.element_ty), mask=live)
        tl.store(out.bags + n, (k * num_bags + sample).to(out.bags.dtype.element_ty), mask=live)
        if weights is not None:
            is_weighted = tl.load(feature + 3) != 0
            tl.store(out.scales + n, tl.load(weights + at, mask=live & is_weighted, other=1.0), mask=live)
        if out.begins is not None:
            tl.store(out.begins + k, begin.to(tl.int64), mask=begin >= first)
        begin += length
        k += 1
    unused = (n.to(tl.int64) * 0 + num_rows - SHIFT).to(out.keys.dtype.element_ty)
    tl.store(out.keys + n, unused, mask=(n >= begin) & (n < limit))


@triton.jit
@no_type_check
def _find_feature(n, plan, offsets, num_features, num_bags):
    """Return the last feature that starts at or before contribution `n`, and its first contribution."""
    begin, end, num_started = n * 0, n * 0, num_features * 0
    for first in range(0, num_features, FEATURE_BLOCK):
        index = first + tl.arange(0, FEATURE_BLOCK)
        live = index < num_features
        first_bag = tl.load(plan + KEY_PLAN_WORDS + index * KEY_WORDS, mask=live, other=0) * num_bags
        start = tl.load(offsets + first_bag, mask=live, other=0).to(n.dtype)
        length = tl.load(offsets + first_bag + num_bags, mask=live, other=0).to(n.dtype) - start
        begins = end + tl.cumsum(length, axis=0) - length
        has_started = live & (begins <= n)
        num_started += tl.sum(has_started.to(num_started.dtype), axis=0)
        begin = tl.maximum(begin, tl.max(tl.where(has_started, begins, 0), axis=0))
        end += tl.sum(length, axis=0)
    return num_started - 1, begin


@triton.jit
@no_type_check
def _find_sample(offsets, num_bags, at, ordinal, num_ids, live):
    """Return the samples of the ids `at`. `ordinal` are their numbers among the `num_ids` ids of the feature."""
    # Bags of one length need no search.
    sample = ordinal // tl.maximum(tl.cdiv(num_ids, num_bags), 1)
    is_guessed = tl.load(offsets + sample, mask=live, other=0) <= at
    is_guessed = is_guessed & (tl.load(offsets + sample + 1, mask=live, other=0) > at)
    if tl.max((live & ~is_guessed).to(tl.int32), axis=0) > 0:
        sample = find_last_at_most(offsets, tl.zeros_like(sample), num_bags, at, live)
    return sample


@triton.jit(do_not_specialize=["num_bags", "num_rows", "limit"])
@no_type_check
def order_bags(out, bags, scales, num_bags, num_rows, limit, SHIFT: tl.constexpr, INDEX: tl.constexpr):
    """Write bags and weights in the order of the sort, and list the first contributions of rows."""
    first = tl.program_id(0).to(INDEX) * CHUNK
    lane = tl.arange(0, CHUNK)
    n = first + lane
    key = tl.load(out.keys + n, mask=n < limit, other=0)
    live = (n < limit) & (key.to(tl.int64) + SHIFT != num_rows)
    is_first = live & ((n == 0) | (key != tl.load(out.keys + n - 1, mask=live & (n > 0), other=0)))
    slot = tl.cumsum(is_first.to(tl.int32), axis=0) - 1
    tl.store(out.starts + first + slot, lane.to(tl.int16), mask=is_first)
    is_unused = lane >= tl.sum(is_first.to(tl.int32), axis=0)
    tl.store(out.starts + n, (lane * 0 - 1).to(tl.int16), mask=is_unused)

    source = tl.load(out.order + n, mask=live, other=0)
    bag = tl.load(bags + source, mask=live, other=0)
    if scales is not None:
        tl.store(out.scales + n, tl.load(scales + source, mask=live, other=1.0), mask=live)
    block, end = block_of(bag, num_bags), n + MIN_LONG_RUN - 1
    is_long = live & (end < limit)
    is_long = is_long & (tl.load(out.keys + end, mask=is_long, other=0) == key)
    is_long = is_long & (block_of(_bag_at(bags, out.order, end, is_long), num_bags) == block)
    follows = is_long & ~is_first
    is_long = is_long & ~(follows & (block_of(_bag_at(bags, out.order, n - 1, follows), num_bags) == block))
    tl.store(out.bags + n, tl.where(is_long, ~bag, bag), mask=n < limit)


@triton.jit
@no_type_check
def _bag_at(bags, order, n, live):
    return tl.load(bags + tl.load(order + n, mask=live, other=0), mask=live, other=0)


@triton.jit(do_not_specialize=["num_bags", "limit"])
@no_type_check
def sum_long_runs(sorted_ids, lines, num_bags, limit, FORM: tl.constexpr, INDEX: tl.constexpr):
    """Sum long runs, left to right. A run that starts at n has its sum in `sums` [n // MIN_LONG_RUN, columns], and its
    number of contributions in `lengths` [n // MIN_LONG_RUN]."""
    index = tl.arange(0, RUN_SLOTS * MIN_LONG_RUN)
    section = tl.program_id(0).to(INDEX) * (RUN_SLOTS * MIN_LONG_RUN)
    waiting = (tl.load(sorted_ids.bags + section + index, mask=section + index < limit, other=0) < 0).to(tl.int32)
    while tl.max(waiting, axis=0) > 0:
        chosen = tl.min(tl.where(waiting > 0, index, RUN_SLOTS * MIN_LONG_RUN), axis=0)
        waiting = tl.where(index == chosen, 0, waiting)
        first = section + chosen
        bag = ~tl.load(sorted_ids.bags + first)
        end = _run_end(sorted_ids, first, block_of(bag, num_bags), num_bags, limit)
        tl.store(lines.lengths + first // MIN_LONG_RUN, (end - first).to(tl.int32))
        words = lines.plan + bag // num_bags * FORM[0]
        column = tl.arange(0, FORM[1])
        inside = column < tl.multiple_of(tl.load(words + WIDTH), tl.constexpr(FORM[2]))
        address, stride = find_matrix(lines, words)
        total = tl.zeros_like(column).to(tl.float32) + tl.reshape(neutral(), [1])
        for start in range(first, end, PREFETCH_LINES):
            for ahead in tl.static_range(PREFETCH_LINES):
                # Lanes after the end load the last gradient again, so that loads need no mask.
                n = tl.minimum(start + ahead, end - 1)
                bag = tl.load(sorted_ids.bags + n)
                line = find_line(sorted_ids, words, tl.where(bag < 0, ~bag, bag), n, num_bags)
                line = (address + stride * line).to(tl.pointer_type(tl.float32))
                term = load_tile(tl.multiple_of(line, FORM[2] * 4) + column, None if FORM[4] else inside)
                if sorted_ids.scales is not None:
                    term = term * tl.load(sorted_ids.scales + n)
                total = tl.where(start + ahead < end, total + term, total)
        tl.store(lines.sums + (first // MIN_LONG_RUN).to(tl.int64) * FORM[1] + column, total, mask=inside)


@triton.jit
@no_type_check
def _run_end(sorted_ids, first, block, num_bags, limit):
    """Return the contribution after the run of `block` that starts at `first`."""
    key = tl.load(sorted_ids.keys + first)
    end = first
    step = first * 0 + SCAN_ITEMS
    while step == SCAN_ITEMS:
        n = end + tl.arange(0, SCAN_ITEMS)
        same = (n < limit) & (tl.load(sorted_ids.keys + n, mask=n < limit, other=0) == key)
        same = same & (block_of(tl.load(sorted_ids.bags + n, mask=same, other=0), num_bags) == block)
        step = tl.sum(same.to(tl.int32), axis=0).to(end.dtype)
        end += step
    return end
