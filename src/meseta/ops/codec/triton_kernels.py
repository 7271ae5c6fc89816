"""Triton kernels of the codecs. A tile is [ROWS, BLOCKS, 16]."""
# Triton parses the source of these functions, so that no decorator that checks types may wrap them.
#
# VECTOR and CODES are alignments in elements: all moves and blocks begin and end at multiples of VECTOR in float32
# matrices and of CODES in encoded matrices.

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from meseta.ops.triton_shared import low_word, philox

FP16, BF16, FP8, INT8 = (tl.constexpr(index) for index in range(1, 5))
"""Indices of the codecs in meseta.spec.codecs.CODECS."""
ROWS, BLOCKS = tl.constexpr(16), tl.constexpr(4)
"""Number of rows and of blocks per program."""
# Header of a plan: number of blocks, float32 bits of the power of two for fp16, float32 bits of the scale, bytes of an
# encoded row.
HEADER_WORDS = tl.constexpr(4)
# Entry of a block to encode: first column, number of columns, byte offset of its scale, whether a padding byte follows
# its numbers, index of its piece, its first column in the table, position of its parts in the plan, number of parts.
ENCODE_WORDS = tl.constexpr(8)
# Part to encode: source, column of the source for lane 0, row stride in elements, first lane, end of the lanes,
# whether to add.
ENCODE_PART = tl.constexpr(6)
# Entry of a block of the output to decode: first column, whether a part adds, position of its parts in the plan,
# number of parts.
DECODE_WORDS = tl.constexpr(4)
# Part to decode: as for encoding with the row stride in bytes, then the byte offset of its scale.
DECODE_PART = tl.constexpr(7)


@no_type_check
def kernel_variant(codec, drawn, vector, codes):
    """Return a number that identifies the variant of a kernel.

    `drawn` is 0 for rounding to nearest even, 1 if `keys` begins with the number of the first row, and 2 if `rows` has
    the number of each row.
    """
    return codec + 8 * drawn + 32 * vector + 256 * codes


@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def encode_blocks(out, addresses, plan, keys, rows, overflows, num_rows, FORM: tl.constexpr):
    """Encode rows at `addresses` into `out`, uint8 [num_rows, row bytes]. `keys` begins with the first row's number."""
    CODEC: tl.constexpr = FORM % 8
    DRAWN: tl.constexpr = FORM // 8 % 4
    CODES: tl.constexpr = FORM // 256
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < tl.load(plan)
    row_bytes = tl.load(plan + 3)
    words = plan + HEADER_WORDS + block * ENCODE_WORDS
    values = _gather_columns(addresses, plan, words, live, row, num_rows, _load_factor(plan, 2), FORM // 32 % 8)
    lane = tl.arange(0, 16)[None, None, :]
    inside = (row < num_rows)[:, None, None] & live[None, :, None]
    line = out + row[:, None] * row_bytes
    first = tl.load(words, mask=live, other=0)
    width = tl.multiple_of(tl.load(words + 1, mask=live, other=0), CODES)
    inside = inside & (lane < width[None, :, None])
    if CODEC <= BF16:
        codes, beyond = _to_fp16_bits(values, _load_factor(plan, 1)) if CODEC == FP16 else _to_bf16_bits(values)
        to = (line + 2 * first[None, :]).to(tl.pointer_type(tl.uint16))
        to = tl.multiple_of(to, [2 * CODES, 2 * CODES])
        tl.store(to[:, :, None] + lane, codes.to(tl.uint16), mask=inside)
        if overflows is not None:
            tl.atomic_add(overflows, tl.sum(tl.reshape((beyond & inside).to(tl.int64), [ROWS * BLOCKS * 16]), axis=0))
    else:
        LARGEST: tl.constexpr = 448.0 if CODEC == FP8 else 127.0
        quotients, scales = _quotients(values, LARGEST)
        if DRAWN != 0:
            of_rows = row < num_rows
            number = row + tl.load(keys) if DRAWN == 1 else tl.load(rows + row, mask=of_rows, other=0)
            key = tl.load(keys + 1 + tl.load(words + 4, mask=live, other=0), mask=live, other=0)
            column = tl.load(words + 5, mask=live, other=0)
            random = _cell_words(number, key, column)
        else:
            random = None
        codes = _to_e4m3(quotients, random) if CODEC == FP8 else _to_int8(quotients, random)
        to = tl.multiple_of(line + first[None, :], [CODES, CODES])
        tl.store(to[:, :, None] + lane, codes.to(tl.uint8), mask=inside)
        at = tl.load(words + 2, mask=live, other=0)
        there = (row < num_rows)[:, None] & live[None, :]
        tl.store((line + at[None, :]).to(tl.pointer_type(tl.uint16)), scales.to(tl.uint16), mask=there)
        is_odd = tl.load(words + 3, mask=live, other=0) != 0
        tl.store(
            line + (first + width)[None, :], tl.zeros([ROWS, BLOCKS], dtype=tl.uint8), mask=there & is_odd[None, :]
        )


@triton.jit
@no_type_check
def _load_factor(plan, at):
    return tl.load(plan + at).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _gather_columns(addresses, plan, words, live, row, num_rows, scale, VECTOR: tl.constexpr):
    """Return a tile of float32 columns after all moves, applied in order. Cells without a move are 0."""
    ROWS: tl.constexpr = row.shape[0]
    BLOCKS: tl.constexpr = live.shape[0]
    lane = tl.arange(0, 16)[None, None, :]
    begin = tl.load(words + 6, mask=live, other=0)
    count = tl.load(words + 7, mask=live, other=0)
    values = tl.zeros([ROWS, BLOCKS, 16], dtype=tl.float32)
    for k in range(tl.max(count, axis=0)):
        there = k < count
        part = plan + begin + k * ENCODE_PART
        source = tl.load(part, mask=there, other=0)
        start = tl.load(part + 1, mask=there, other=0)
        stride = tl.load(part + 2, mask=there, other=0)
        first = tl.multiple_of(tl.load(part + 3, mask=there, other=0), VECTOR)
        last = tl.multiple_of(tl.load(part + 4, mask=there, other=0), VECTOR)
        adds = tl.load(part + 5, mask=there, other=0) != 0
        address = (
            tl.load(addresses + source, mask=there, other=0)[None, :]
            + (row[:, None] * stride[None, :] + start[None, :]) * 4
        )
        line = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), [VECTOR * 4, VECTOR * 4])
        inside = (row < num_rows)[:, None, None] & (lane >= first[None, :, None]) & (lane < last[None, :, None])
        moved = tl.load(line[:, :, None] + lane, mask=inside, other=0.0) * scale
        values = tl.where(inside, tl.where(adds[None, :, None], values + moved, moved), values)
    return values


@triton.jit
@no_type_check
def _quotients(values, LARGEST: tl.constexpr):
    """Return the values divided by the scale of their block, and the bfloat16 bits of the scales [ROWS, BLOCKS]."""
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, axis=2)
    good = (largest > 0) & (largest < 0x7F800000)
    exact = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, LARGEST, tl.float32))
    # Round up to a bfloat16, at least the smallest subnormal one.
    up = tl.maximum((exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16, 1)
    unit = tl.where(good, (up << 16).to(tl.float32, bitcast=True), 1.0)
    whole = tl.where(good[:, :, None], values, 0.0)
    quotients = tl.div_rn(whole, tl.broadcast_to(unit[:, :, None], whole.shape))
    return quotients, tl.where(good, up, tl.where(largest == 0, 0, 0x7FC0))


@triton.jit
@no_type_check
def _round(value, random):
    """Round to nearest even, or stochastically with the upper 24 bits of `random`. `value` is within 2^22."""
    # Adding and subtracting 1.5 * 2^23 rounds to an integer.
    if random is None:
        rounded = (value + 12582912.0) - 12582912.0
    else:
        down = tl.floor(value)
        is_up = (random >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 < value - down
        rounded = tl.where(is_up, down + 1.0, down)
    return rounded


@triton.jit
@no_type_check
def _to_int8(quotients, random):
    code = _round(quotients, random).to(tl.int32)
    return tl.minimum(tl.maximum(code, -127), 127) & 0xFF


@triton.jit
@no_type_check
def _to_e4m3(quotients, random):
    bits = quotients.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 121)  # Biased exponent, at least that of 2^-6.
    shift = ((257 - exponent) << 23).to(tl.float32, bitcast=True)  # Leaves three bits after the leading one.
    whole = _round(tl.abs(quotients) * shift, random).to(tl.int32)
    code = tl.minimum(((exponent - 121) << 3) + whole, 0x7E)
    return code | ((bits >> 24) & 0x80)


@triton.jit
@no_type_check
def _to_fp16_bits(values, power):
    """Return the bits of float16 numbers, and whether each value was finite but too large."""
    scaled = values * power
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    beyond = (magnitude < 0x7F800000) & (tl.abs(scaled) > 65504.0)
    most = tl.where(bits < 0, -65504.0, 65504.0)
    codes = tl.where(beyond, most, scaled).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(magnitude > 0x7F800000, 0x7E00, codes & 0xFFFF), beyond


@triton.jit
@no_type_check
def _to_bf16_bits(values):
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FC0, rounded.to(tl.int32)), is_nan


@triton.jit
@no_type_check
def _cell_words(row, key, column):
    """Return the words of `meseta.ops.random_rows.random_bits` for a tile of cells, as uint32."""
    ROWS: tl.constexpr = row.shape[0]
    BLOCKS: tl.constexpr = key.shape[0]
    zeros = tl.zeros([ROWS, BLOCKS, 4], dtype=tl.uint32)
    group = (low_word(column // 4)[:, None] + tl.arange(0, 4)[None, :].to(tl.uint32))[None, :, :]
    c0 = low_word(row)[:, None, None] + zeros
    c1 = low_word(row >> 32)[:, None, None] + zeros
    k0 = low_word(key)[None, :, None] + zeros
    k1 = low_word(key >> 32)[None, :, None] + zeros
    c0, c1, c2, c3 = philox(c0, c1, group + zeros, zeros, k0, k1)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [ROWS, BLOCKS, 16])


@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def decode_blocks(out, addresses, plan, num_rows, stride, FORM: tl.constexpr):
    """Decode into float32 rows with row stride `stride`. `addresses` has the addresses of the encoded matrices."""
    CODEC: tl.constexpr = FORM % 8
    VECTOR: tl.constexpr = FORM // 32 % 8
    CODES: tl.constexpr = FORM // 256
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < tl.load(plan)
    words = plan + HEADER_WORDS + block * DECODE_WORDS
    lane = tl.arange(0, 16)[None, None, :]
    first = tl.load(words, mask=live, other=0)
    adds = tl.load(words + 1, mask=live, other=0) != 0
    to = tl.multiple_of(out + row[:, None] * stride + first[None, :], [VECTOR * 4, VECTOR * 4])[:, :, None] + lane
    begin = tl.load(words + 2, mask=live, other=0)
    count = tl.load(words + 3, mask=live, other=0)
    is_row = (row < num_rows)[:, None, None]
    # Lanes after the last column may be outside the output, so access only lanes that are part of a move.
    touched = _touched_lanes(plan, begin, count, VECTOR) & is_row
    values = tl.load(to, mask=touched & adds[None, :, None], other=0.0)
    for k in range(tl.max(count, axis=0)):
        there = k < count
        part = plan + begin + k * DECODE_PART
        start = tl.load(part + 1, mask=there, other=0)
        behind = tl.load(part + 2, mask=there, other=0)
        inside = is_row & _part_lanes(part, there, CODES)
        base = tl.load(addresses + tl.load(part, mask=there, other=0), mask=there, other=0)
        line = base[None, :] + row[:, None] * behind[None, :]
        number = _load_numbers(line + start[None, :] * (2 if CODEC <= BF16 else 1), lane, inside, CODEC, CODES)
        if CODEC <= BF16:
            number = number * _load_factor(plan, 1)
        else:
            at = line + tl.load(part + 6, mask=there, other=0)[None, :]
            is_in_part = (row < num_rows)[:, None] & there[None, :]
            unit = tl.load(at.to(tl.pointer_type(tl.uint16)), mask=is_in_part, other=0).to(tl.uint32) << 16
            number = number * unit.to(tl.float32, bitcast=True)[:, :, None]
        number = number * _load_factor(plan, 2)
        sums = tl.load(part + 5, mask=there, other=0) != 0
        values = tl.where(inside, tl.where(sums[None, :, None], values + number, number), values)
    tl.store(to, values, mask=touched)


@triton.jit
@no_type_check
def _part_lanes(part, there, VECTOR: tl.constexpr):
    """Return a mask [1, BLOCKS, 16] of the lanes of a part."""
    lane = tl.arange(0, 16)[None, None, :]
    first = tl.multiple_of(tl.load(part + 3, mask=there, other=0), VECTOR)
    last = tl.multiple_of(tl.load(part + 4, mask=there, other=0), VECTOR)
    return (lane >= first[None, :, None]) & (lane < last[None, :, None])


@triton.jit
@no_type_check
def _touched_lanes(plan, begin, count, VECTOR: tl.constexpr):
    lanes = _part_lanes(plan + begin, count > 0, VECTOR)
    for k in range(1, tl.max(count, axis=0)):
        lanes = lanes | _part_lanes(plan + begin + k * DECODE_PART, k < count, VECTOR)
    return lanes


@triton.jit
@no_type_check
def _load_numbers(line, lane, inside, CODEC: tl.constexpr, CODES: tl.constexpr):
    """Load a tile of encoded numbers as float32. `line` [ROWS, BLOCKS] has the address of lane 0."""
    if CODEC <= BF16:
        halves = tl.multiple_of(line.to(tl.pointer_type(tl.uint16)), [2 * CODES, 2 * CODES])
        code = tl.load(halves[:, :, None] + lane, mask=inside, other=0)
    else:
        signed = tl.multiple_of(line.to(tl.pointer_type(tl.int8)), [CODES, CODES])
        code = tl.load(signed[:, :, None] + lane, mask=inside, other=0).to(tl.int32)
    if CODEC == FP16:
        number = code.to(tl.float16, bitcast=True).to(tl.float32)
    elif CODEC == BF16:
        number = (code.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif CODEC == INT8:
        number = code.to(tl.float32)
    else:
        magnitude = code & 0x7F
        normal = (magnitude << 20) + 0x3C000000
        small = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, tl.where(magnitude >= 8, normal, small))
        number = (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    return number
