"""Triton functions for generated update kernels: sums in the order of the reference, and stochastic rounding."""
# A tile is [BLOCKS, ROWS, 16]: the columns of rows in blocks of 16, the last one padded. Blocks are the first
# dimension, so that a lane has all blocks of its columns. Sums of rows then need no shared memory. Triton parses the
# source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.triton_shared import low_word, philox, sum_16


class Lines(NamedTuple):
    """Device tensors with the gradients of an update."""

    plan: Tensor
    gradients: Tensor
    """The only matrix, or int64 addresses of all matrices."""
    sums: Tensor
    """float32 sums of long runs, see `sum_long_runs`."""
    lengths: Tensor
    """Number of contributions of each long run, int32."""


BLOCK_SAMPLES = tl.constexpr(256)
"""Number of samples per block."""
MIN_LONG_RUN = tl.constexpr(16)
"""Minimum length of a run that is summed before the update."""
# Plan of an update, int64 words per feature: index, first column and stride of its gradient matrix, whether the matrix
# has one row per id, and its table. Then the address, number of columns and first key of the rows of the table, the key
# of its random bits, its first row and column, the addresses of its row ids and marks or 0, and of its states.
GRADIENT, COLUMN, STRIDE, PER_ID, TABLE = (tl.constexpr(word) for word in range(5))
WEIGHT, WIDTH, FIRST_KEY, RANDOM_KEY, FIRST_ROW, FIRST_COLUMN, ROW_IDS, MARKS = (tl.constexpr(w) for w in range(5, 13))
NUM_WORDS = tl.constexpr(13)
"""Number of words per feature, without those of the states."""


@triton.jit
@no_type_check
def row_pointers(words, offset, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Return pointers [ROWS] to the elements at `offset` [ROWS] from the address stored at `words` [ROWS]."""
    address = tl.load(words) + offset * (TYPE.primitive_bitwidth // 8)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), VECTOR * (TYPE.primitive_bitwidth // 8))


@triton.jit
@no_type_check
def load_tile(pointers, inside):
    """Load a tile. `inside` is `None` if no cell is masked, which lets the compiler keep more loads in flight."""
    return tl.load(pointers) if inside is None else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
@no_type_check
def block_of(bag, num_bags):
    """Return the blocks of samples of bags or their complements, numbered over all features."""
    bag = tl.where(bag < 0, ~bag, bag)
    feature = bag // num_bags
    return feature * tl.cdiv(num_bags, BLOCK_SAMPLES) + (bag - feature * num_bags) // BLOCK_SAMPLES


@triton.jit
@no_type_check
def find_matrix(lines, words):
    """Return the addresses of the first gradients of features, and the bytes between gradients."""
    if lines.gradients.dtype.element_ty == tl.int64:
        address = tl.load(lines.gradients + tl.load(words + GRADIENT))
    else:
        address = lines.gradients.to(tl.int64)
    return address + 4 * tl.load(words + COLUMN), 4 * tl.load(words + STRIDE)


@triton.jit
@no_type_check
def find_line(sorted_ids, words, bag, n, num_bags):
    """Return the rows of gradient matrices that belong to contributions `n`."""
    feature = bag // num_bags
    line = (bag - feature * num_bags).to(tl.int64)
    if sorted_ids.order is not None:
        ordinal = tl.load(sorted_ids.order + n) - tl.load(sorted_ids.begins + feature)
        line = tl.where(tl.load(words + PER_ID) != 0, ordinal, line)
    return line


@triton.jit
@no_type_check
def load_lines(sorted_ids, lines, bag, n, inside, num_bags, FORM: tl.constexpr):
    """Return a tile with the gradients of contributions `n`, or the sums of long runs.

    `FORM` is (number of words per feature, columns of sums, number of elements that are loaded with one instruction,
    blocks of the tile, whether no cell is masked).
    """
    is_long, bag = bag < 0, tl.where(bag < 0, ~bag, bag)
    words = lines.plan + bag // num_bags * FORM[0]
    address, stride = find_matrix(lines, words)
    address += stride * find_line(sorted_ids, words, bag, n, num_bags)
    total = lines.sums.to(tl.int64) + (n // MIN_LONG_RUN).to(tl.int64) * (4 * FORM[1])
    address = tl.where(is_long, total, address).to(tl.pointer_type(tl.float32))
    line = tl.multiple_of(address, FORM[2] * 4)[None, :, None]
    column = tl.arange(0, FORM[3])[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    values = load_tile(line + column, inside)
    if sorted_ids.scales is not None:
        values = values * tl.where(is_long, 1.0, tl.load(sorted_ids.scales + n))[None, :, None]
    return values


@triton.jit
@no_type_check
def sum_lines(sorted_ids, lines, bag, n, live, inside, sizes, FORM: tl.constexpr):
    """Return a tile with the summed gradients of rows, given the bags of their first contributions `n`.

    Gradients are added from left to right within a block of samples, and then the blocks from left to right. `sizes`
    are the numbers of bags and contributions.
    """
    key = tl.load(sorted_ids.keys + n)
    # Most rows have one contribution, which needs no loop. The loop loads a gradient before it adds the previous one.
    # Rows without another contribution load their first gradient again, so that loads need no mask.
    first, is_added = n, live
    term = load_lines(sorted_ids, lines, bag, n, inside, sizes[0], FORM)
    part = tl.zeros_like(term) + neutral()
    total = part
    block = block_of(bag, sizes[0])
    n, live = next_contribution(sorted_ids, lines, key, bag, n, live, sizes[1])
    while tl.max(live.to(tl.int32), axis=0) > 0:
        at = tl.where(live, n, first)
        bag = tl.load(sorted_ids.bags + at)
        next_term = load_lines(sorted_ids, lines, bag, at, inside, sizes[0], FORM)
        is_new = live & (block_of(bag, sizes[0]) != block)
        block = tl.where(is_new, block_of(bag, sizes[0]), block)
        part = tl.where(is_added[None, :, None], part + term, part)
        total = tl.where(is_new[None, :, None], total + part, total)
        part = tl.where(is_new[None, :, None], neutral(), part)
        term, is_added = next_term, live
        n, live = next_contribution(sorted_ids, lines, key, bag, n, live, sizes[1])
    return total + tl.where(is_added[None, :, None], part + term, part)


@triton.jit
@no_type_check
def neutral():
    """Return -0.0, which changes no number that it is added to, not even the sign of zero."""
    # Triton compiles the literal -0.0 to 0.0.
    return tl.full([1, 1, 1], -(2**31), tl.int32).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def next_contribution(sorted_ids, lines, key, bag, n, live, limit):
    """Return the contributions to the same rows after `n` or after the long runs that start there, and whether there
    are any."""
    n += tl.load(lines.lengths + n // MIN_LONG_RUN, mask=live & (bag < 0), other=1)
    live = live & (n < limit)
    return n, live & (tl.load(sorted_ids.keys + n, mask=live, other=0) == key)


@triton.jit
@no_type_check
def sum_columns(values):
    """Sum the columns of each row, [ROWS]: a fixed tree within blocks of 16, and blocks from left to right."""
    BLOCKS: tl.constexpr = values.shape[0]
    ROWS: tl.constexpr = values.shape[1]
    sums = tl.reshape(sum_16(tl.reshape(values, [BLOCKS * ROWS, 16])), [BLOCKS, ROWS])
    index = tl.arange(0, BLOCKS)[:, None]
    nothing = tl.reshape(neutral(), [1, 1])
    total = tl.sum(tl.where(index == 0, sums, nothing), axis=0)
    for block in tl.static_range(1, BLOCKS):
        total += tl.sum(tl.where(index == block, sums, nothing), axis=0)
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
    ids = tl.load(words + ROW_IDS, mask=live, other=0)
    moved = tl.load((ids + row * 8).to(tl.pointer_type(tl.int64)), mask=live & (ids != 0), other=0)
    return tl.where(ids != 0, moved, row)


@triton.jit
@no_type_check
def mark_rows(words, live, row):
    """Mark rows for all consumers, see `meseta.ops.row_marks`."""
    # Atomic, because other programs may mark rows in the same words.
    marks = tl.load(words + MARKS, mask=live, other=0)
    is_kept = live & (marks != 0)
    changed = shard_rows(words, live, row)
    word = (marks + changed // 16 * 4).to(tl.pointer_type(tl.int32))
    bits = (3 << (changed % 16 * 2)).to(tl.int32)
    is_new = is_kept & ((tl.load(word, mask=is_kept, other=0) & bits) != bits)
    tl.atomic_or(word, bits, mask=is_new, sem="relaxed")


@triton.jit
@no_type_check
def store_rows(weight, values, stored, words, live, row, steps):
    """Store a tile of new rows. Rows of 16 bits are rounded. `steps` [ROWS] points to the number of the step."""
    TYPE: tl.constexpr = weight.dtype.element_ty
    if TYPE.primitive_bitwidth == 32:
        tl.store(weight, values, mask=stored)
    else:
        BLOCKS: tl.constexpr = values.shape[0]
        step = tl.load(steps, mask=live, other=0).to(tl.int64)
        random = random_16_bits(words, live, row, step, BLOCKS)
        cut = round_to_fp16(values, random) if TYPE.is_fp16() else round_to_bf16(values, random)
        tl.store(weight, cut.to(tl.uint16).to(TYPE, bitcast=True), mask=stored)


@triton.jit
@no_type_check
def random_16_bits(words, live, row, step, BLOCKS: tl.constexpr):
    """Return a tile with 16 random bits per cell as uint32. Four words of the generator serve eight columns."""
    NUM_ROWS: tl.constexpr = row.shape[0]
    key = tl.load(words + RANDOM_KEY, mask=live, other=0)
    logical = shard_rows(words, live, row) + tl.load(words + FIRST_ROW, mask=live, other=0)
    first_column = tl.load(words + FIRST_COLUMN, mask=live, other=0)
    zeros = tl.zeros([BLOCKS, NUM_ROWS, 2], dtype=tl.uint32)
    group = tl.arange(0, BLOCKS)[:, None, None] * 2 + tl.arange(0, 2)[None, None, :]
    c0 = low_word(logical)[None, :, None] + zeros
    c1 = low_word(logical >> 32)[None, :, None] + zeros
    c2 = (low_word(first_column // 8)[None, :, None] + group.to(tl.uint32)) + zeros
    c3 = low_word(step)[None, :, None] + zeros
    k0 = low_word(key)[None, :, None] + zeros
    k1 = low_word(key >> 32)[None, :, None] + zeros
    c0, c1, c2, c3 = philox(c0, c1, c2, c3, k0, k1)
    chosen = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [..., word // 2, word % 2]
    return tl.reshape(tl.join(chosen & 0xFFFF, chosen >> 16), [BLOCKS, NUM_ROWS, 16])


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
