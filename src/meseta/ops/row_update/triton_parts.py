"""Triton functions for generated update kernels: sums in the order of the reference, and stochastic rounding."""
# A tile is [ROWS, BLOCKS, 16]: the columns of a row in blocks of 16, the last one padded. Triton parses the source of
# these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from meseta.ops.triton_shared import low_word, philox, sum_16

# Header of the plan: number of features, samples, rows of all tables, blocks of samples, position of the tables in the
# plan, words per table, position of the first keys of the groups, number of groups.
PLAN_WORDS = tl.constexpr(8)
# Table: address, columns, rows, first key, key of its random bits, first row, first column, address of its row ids or
# 0, address of its marks or 0. The addresses of its states follow.
TABLE_WORDS = tl.constexpr(9)
# Feature: position in the offsets, table, gradient matrix, first column and stride of the gradient, per_id, weighted.
FEATURE_WORDS = tl.constexpr(7)


@triton.jit
@no_type_check
def row_pointers(words, offset, live, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Return pointers [ROWS] to the elements at `offset` [ROWS] from the address stored at `words` [ROWS]."""
    address = tl.load(words, mask=live, other=0) + offset * (TYPE.primitive_bitwidth // 8)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), VECTOR * (TYPE.primitive_bitwidth // 8))


@triton.jit
@no_type_check
def sum_lines(items, scales, begin, end, inside, VECTOR: tl.constexpr):
    """Return a tile with the summed gradients of rows whose items are [begin, end).

    Gradients are added from left to right within a block of samples, and then the blocks from left to right.
    """
    BLOCKS: tl.constexpr = inside.shape[1]
    column = (tl.arange(0, BLOCKS)[:, None] * 16 + tl.arange(0, 16)[None, :])[None, :, :]
    # -0.0 is neutral: adding it changes no number, not even the sign of zero.
    total = tl.where(inside, -0.0, -0.0)
    part = total
    at = begin
    block = begin * 0 - 1
    while tl.max(end - at, axis=0) > 0:
        live = at < end
        word = tl.load(items + 2 * at + 1, mask=live, other=0)
        is_new = live & ((word & 0xFFFFFFFF) != block)
        block = word & 0xFFFFFFFF
        total = tl.where(is_new[:, None, None], total + part, total)
        part = tl.where(is_new[:, None, None], -0.0, part)
        line = row_pointers(items + 2 * at, at * 0, live, tl.float32, VECTOR)
        term = tl.load(line[:, None, None] + column, mask=inside & live[:, None, None], other=-0.0)
        if scales is not None:
            term = term * tl.load(scales + at, mask=live, other=1.0)[:, None, None]
        part = part + term
        at = at + (word >> 32)
    return total + part


@triton.jit
@no_type_check
def sum_columns(values):
    """Sum the columns of each row, [ROWS]: a fixed tree within blocks of 16, and blocks from left to right."""
    ROWS: tl.constexpr = values.shape[0]
    BLOCKS: tl.constexpr = values.shape[1]
    sums = tl.reshape(sum_16(tl.reshape(values, [ROWS * BLOCKS, 16])), [ROWS, BLOCKS])
    index = tl.arange(0, BLOCKS)[None, :]
    total = tl.sum(tl.where(index == 0, sums, 0.0), axis=1)
    for block in range(1, BLOCKS):
        total += tl.sum(tl.where(index == block, sums, 0.0), axis=1)
    return total


@triton.jit
@no_type_check
def sign(value):
    """Return -1, 0 or 1. The sign of NaN is 0."""
    return tl.where(value > 0, 1.0, 0.0) - tl.where(value < 0, 1.0, 0.0)


@triton.jit
@no_type_check
def shard_rows(words, live, row):
    """Return the rows of the shard, [ROWS], that are stored at `row`."""
    ids = tl.load(words + 7, mask=live, other=0)
    moved = tl.load((ids + row * 8).to(tl.pointer_type(tl.int64)), mask=live & (ids != 0), other=0)
    return tl.where(ids != 0, moved, row)


@triton.jit
@no_type_check
def mark_rows(words, live, row):
    """Mark rows for all consumers, see `meseta.ops.row_marks`."""
    # Atomic, because other programs may mark rows in the same words.
    marks = tl.load(words + 8, mask=live, other=0)
    is_kept = live & (marks != 0)
    changed = shard_rows(words, live, row)
    word = (marks + changed // 16 * 4).to(tl.pointer_type(tl.int32))
    bits = (3 << (changed % 16 * 2)).to(tl.int32)
    is_new = is_kept & ((tl.load(word, mask=is_kept, other=0) & bits) != bits)
    tl.atomic_or(word, bits, mask=is_new, sem="relaxed")


@triton.jit
@no_type_check
def store_rows(weight, values, inside, words, live, row, steps):
    """Store a tile of new rows. Rows of 16 bits are rounded. `steps` [ROWS] points to the number of the step."""
    TYPE: tl.constexpr = weight.dtype.element_ty
    if TYPE.primitive_bitwidth == 32:
        tl.store(weight, values, mask=inside)
    else:
        BLOCKS: tl.constexpr = values.shape[1]
        step = tl.load(steps, mask=live, other=0).to(tl.int64)
        random = random_16_bits(words, live, row, step, BLOCKS)
        cut = round_to_fp16(values, random) if TYPE.is_fp16() else round_to_bf16(values, random)
        tl.store(weight, cut.to(tl.uint16).to(TYPE, bitcast=True), mask=inside)


@triton.jit
@no_type_check
def random_16_bits(words, live, row, step, BLOCKS: tl.constexpr):
    """Return a tile with 16 random bits per cell as uint32. Four words of the generator serve eight columns."""
    ROWS: tl.constexpr = row.shape[0]
    key = tl.load(words + 4, mask=live, other=0)
    logical = shard_rows(words, live, row) + tl.load(words + 5, mask=live, other=0)
    first_column = tl.load(words + 6, mask=live, other=0)
    zeros = tl.zeros([ROWS, BLOCKS, 2], dtype=tl.uint32)
    group = (tl.arange(0, BLOCKS)[:, None] * 2 + tl.arange(0, 2)[None, :])[None, :, :]
    c0 = low_word(logical)[:, None, None] + zeros
    c1 = low_word(logical >> 32)[:, None, None] + zeros
    c2 = (low_word(first_column // 8)[:, None, None] + group.to(tl.uint32)) + zeros
    c3 = low_word(step)[:, None, None] + zeros
    k0 = low_word(key)[:, None, None] + zeros
    k1 = low_word(key >> 32)[:, None, None] + zeros
    c0, c1, c2, c3 = philox(c0, c1, c2, c3, k0, k1)
    chosen = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [..., word // 2, word % 2]
    return tl.reshape(tl.join(chosen & 0xFFFF, chosen >> 16), [ROWS, BLOCKS, 16])


@triton.jit
@no_type_check
def round_to_bf16(values, random):
    """Return the bits of stochastically rounded bfloat16. Infinities and NaN are kept."""
    # Adding random bits below the mantissa and truncating rounds up with the right probability.
    bits = values.to(tl.uint32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    whole = tl.where(is_nan, (bits >> 16) | 0x40, bits >> 16)
    return tl.where((bits & 0x7F800000) == 0x7F800000, whole, (bits + random) >> 16)


@triton.jit
@no_type_check
def round_to_fp16(values, random):
    """Return the bits of stochastically rounded float16. Infinities and NaN are kept."""
    # float16 drops 13 bits of the mantissa, and more if it is subnormal.
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    chance = random >> 3
    normal = tl.minimum((magnitude + chance - 0x38000000) >> 13, 0x7C00)
    # Subnormal float16 numbers are multiples of 2^-24.
    small = tl.minimum(magnitude, 0x38800000).to(tl.float32, bitcast=True)
    subnormal = (small * 16777216.0 + chance.to(tl.float32) * 0.0001220703125).to(tl.int32).to(tl.uint32)
    finite = tl.where(magnitude < 0x38800000, subnormal, normal)
    special = tl.where(magnitude > 0x7F800000, 0x7E00, 0x7C00)
    return (bits >> 16 & 0x8000) | tl.where(magnitude >= 0x7F800000, special.to(tl.uint32), finite)
