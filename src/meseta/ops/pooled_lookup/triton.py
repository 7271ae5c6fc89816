"""Pooled lookup on a GPU: one launch for all features, in which each lane pools a few columns of a few bags."""
# A lane adds 16 bytes of each row of its bags in float32, from left to right. A program of a large launch is one warp.
# It loops as often as its longest bag needs, without barriers.
#
# Bandwidth B needs B * latency bytes in flight: 4.8 TB/s * 600 ns / 132 multiprocessors = 22 KB on an H200. A lane has
# four loads of 16 bytes in flight, so a warp has 2 KB. At least 16 warps run on a multiprocessor, because lanes have at
# most 128 registers. The ids of the next rows are loaded before the rows.

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.common import device_constant
from meseta.ops.triton_shared import (
    ROW_TYPES,
    VECTOR_BYTES,
    TensorMetadata,
    is_aligned,
    load_row_parts,
    tensor_metadata,
)
from meseta.spec import MesetaError

WEIGHTED, MEAN, ALIGNED, WIDE = 1, 2, 4, 8
"""Flags of a feature: rows have weights; the sum is divided by the length of the bag; rows are aligned to 16 bytes;
the output is aligned to 16 bytes."""
WARP = 32
"""Number of lanes per warp."""
LOADS = tl.constexpr(4)
"""Number of rows that a lane loads before it adds them: of several bags in large launches, else of one bag."""
MAX_COLUMNS_PER_LANE = 16
"""Maximum number of columns, in several bags, that a lane sums. They are in registers."""
MAX_REGISTERS = 128
"""Maximum number of registers per lane. Without this number the assembler saves registers at the cost of loads: it adds
a row before it loads the next one."""
MIN_WARPS = 4096
"""Number of warps that fill a GPU: 32 for each of 128 multiprocessors."""
FEATURE_WORDS = tl.constexpr(7)
"""Words per feature: address, rows and columns of its table, first column and row stride of the output, flags, first
unit."""


class LookupLaunch(NamedTuple):
    """Parameters of a launch.

    A unit is a program of one block of bags. A feature whose rows have n parts of 16 bytes has n units per block.
    """

    words: tuple[int, ...]
    """Feature of each unit, then the words of the features."""
    num_units: int
    width: int
    """Total number of columns."""
    all_aligned: bool


def pooled_lookup(
    tables: Sequence[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None, flags: Sequence[int]
) -> Tensor:
    """Implement `meseta.ops.pooled_lookup.pooled_lookup` on a GPU. flags[f] combines WEIGHTED and MEAN of feature f.

    The host does not wait for the device. Offsets are therefore not checked, and an id outside its table adds nothing.
    """
    num_features = len(tables)
    num_bags, rest = divmod(offsets.numel() - 1, num_features)
    if rest or offsets.numel() == 0:
        raise MesetaError(
            f"pooled_lookup: {offsets.numel()} offsets for {num_features} features; pass F * B + 1 offsets"
        )
    if any(table.device != ids.device for table in tables):
        raise MesetaError(f"pooled_lookup: all tables must be on {ids.device}, the device of the ids; move them there")
    plan = _plan_launch(tensor_metadata(tables), tuple(flags))
    out = torch.empty((num_bags, plan.width), dtype=torch.float32, device=ids.device)
    if out.numel() == 0:
        return out
    lanes, bags_per_lane = WARP, MAX_COLUMNS_PER_LANE // (VECTOR_BYTES // tables[0].dtype.itemsize)
    if plan.num_units * num_bags < MIN_WARPS * WARP * bags_per_lane:
        lanes, bags_per_lane = 4 * WARP, 1
    with torch.cuda.device_of(ids):
        _pool[(triton.cdiv(num_bags, lanes * bags_per_lane) * plan.num_units,)](
            out,
            device_constant(plan.words, ids.device),
            ids.contiguous(),
            offsets.contiguous(),
            None if weights is None else weights.to(torch.float32).contiguous(),
            num_bags,
            plan.num_units,
            FORM=(ROW_TYPES[tables[0].dtype], lanes, bags_per_lane, plan.all_aligned),
            num_warps=lanes // WARP,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=False,
        )
    return out


@lru_cache(maxsize=256)
def _plan_launch(tables: tuple[TensorMetadata, ...], flags: tuple[int, ...]) -> LookupLaunch:
    """Return the parameters of a launch. They are cached, because tables do not change between steps.

    Raises MesetaError if tables do not match each other.
    """
    dtype, width = tables[0].dtype, 0
    for f, table in enumerate(tables):
        if table.dtype != dtype or len(table.shape) != 2 or not table.is_contiguous:
            raise MesetaError(
                f"pooled_lookup: table {f} is {table.dtype} {table.shape}, but all tables must be contiguous, "
                f"[rows, D] and {dtype} as the first; convert it"
            )
        width += table.shape[1]
    units, words, column = list[int](), list[int](), 0
    all_aligned = True
    for f, table in enumerate(tables):
        dim = table.shape[1]
        has_aligned_rows = is_aligned(table.address, dim * dtype.itemsize)
        kind = flags[f] | ALIGNED * has_aligned_rows | WIDE * is_aligned(4 * dim, 4 * column, 4 * width)
        words += [table.address, *table.shape, column, width, kind, len(units)]
        units += [f] * triton.cdiv(dim * dtype.itemsize, VECTOR_BYTES)
        column += dim
        all_aligned &= has_aligned_rows
    return LookupLaunch((*units, *words), len(units), width, all_aligned)


@triton.jit(do_not_specialize=["num_bags", "num_units"])
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _pool(out, words, ids, offsets, weights, num_bags, num_units, FORM: tl.constexpr):
    """FORM has the type of rows, numbers of lanes and bags per lane, and whether the rows of all tables are aligned."""
    ROW: tl.constexpr = FORM[0]
    LANES: tl.constexpr = FORM[1]
    BAGS: tl.constexpr = FORM[2]
    VECTOR: tl.constexpr = 128 // ROW.primitive_bitwidth
    # Programs of all features handle the same bags at about the same time, so that long features do not run alone.
    unit = tl.program_id(0) % num_units
    f = tl.load(words + unit)
    feature = words + num_units + f * FEATURE_WORDS
    dim = tl.load(feature + 2).to(tl.int32)
    flags = tl.load(feature + 5).to(tl.int32)
    parts = (dim + VECTOR - 1) // VECTOR
    lane = (unit - tl.load(feature + 6).to(tl.int32)) * LANES + tl.arange(0, LANES)
    block = tl.program_id(0) // num_units * BAGS + tl.arange(0, BAGS)
    bag = block[:, None] * LANES + (lane // parts)[None, :]
    first_column = (lane % parts * VECTOR)[None, :]
    live = bag < num_bags
    offsets += f * num_bags + bag
    start = tl.load(offsets, mask=live, other=0)
    length = (tl.load(offsets + 1, mask=live, other=0) - start).to(tl.int32)

    if FORM[3]:
        total = _sum_rows(feature, ids, weights, start, length, first_column, ROW, True)
    elif (flags & 4) == 0:
        total = _sum_rows(feature, ids, weights, start, length, first_column, ROW, False)
    else:
        total = _sum_rows(feature, ids, weights, start, length, first_column, ROW, True)
    if (flags & 2) != 0:
        count = tl.maximum(length, 1).to(tl.float32)[:, :, None]
        total = tl.div_rn(total, tl.broadcast_to(count, total.shape))

    column = first_column[:, :, None] + tl.arange(0, VECTOR)[None, None, :]
    bag = bag.to(tl.int64)[:, :, None]
    if (flags & 8) != 0:
        place = (bag * (tl.load(feature + 4) // 4) + tl.load(feature + 3) // 4) * 4 + column
        tl.store(out + place, total, mask=live[:, :, None] & (column < dim // 4 * 4))
    else:
        place = bag * tl.load(feature + 4) + tl.load(feature + 3) + column
        tl.store(out + place, total, mask=live[:, :, None] & (column < dim))


@triton.jit
@no_type_check
def _sum_rows(feature, ids, weights, start, length, first_column, ROW: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return the sums of bags, [BAGS, LANES, VECTOR], from `first_column` on."""
    SIZE: tl.constexpr = ROW.primitive_bitwidth // 8
    BAGS: tl.constexpr = length.shape[0]
    LANES: tl.constexpr = length.shape[1]
    ROWS: tl.constexpr = LOADS // BAGS
    num_rows, row_bytes = tl.load(feature + 1), tl.load(feature + 2) * SIZE
    is_weighted = (tl.load(feature + 5) & 1) != 0
    first_byte = first_column * SIZE
    table = tl.load(feature) + first_byte
    # Slot s of a lane holds rows s % ROWS, s % ROWS + ROWS, ... of its bag s // ROWS. `left` is the number of ids from
    # the first of these rows to the end of the bag. Pointers advance, because an offset would need 64 bits.
    step = tl.arange(0, ROWS)[None, :, None]
    left = tl.reshape(length[:, None, :] - step, [LOADS, LANES])
    place = tl.reshape(start[:, None, :] + step, [LOADS, LANES])
    ids += place
    row = tl.load(ids, mask=left > 0, other=-1).to(tl.int64)
    total = tl.full([BAGS, LANES, 16 // SIZE], 0.0, dtype=tl.float32)
    for first in range(0, tl.max(length), ROWS):
        # Ids are checked one iteration after their load, so that nothing waits for them before.
        ids += ROWS
        next_row = tl.load(ids, mask=first + ROWS < left, other=-1).to(tl.int64)
        is_valid = (row >= 0) & (row < num_rows)
        values = load_row_parts(table + row * row_bytes, row_bytes - first_byte, is_valid, ROW, IS_ALIGNED)
        if weights is not None:
            values *= tl.load(weights + (place + first), mask=is_valid & is_weighted, other=1.0)[:, :, None]
        total = _add_slots(total, values)
        row = next_row
    return total


@triton.jit
@no_type_check
def _add_slots(total, values):
    """Add the slots [LOADS, LANES, VECTOR] of each bag to its sum, from left to right."""
    BAGS: tl.constexpr = total.shape[0]
    LANES: tl.constexpr = total.shape[1]
    VECTOR: tl.constexpr = total.shape[2]
    ROWS: tl.constexpr = values.shape[0] // BAGS
    rows = tl.permute(tl.reshape(values, [BAGS, ROWS, LANES, VECTOR]), [0, 2, 3, 1])
    if ROWS == 1:
        total += values
    elif ROWS == 2:
        a, b = tl.split(rows)
        total = total + a + b
    else:
        even, odd = tl.split(tl.reshape(rows, [BAGS, LANES, VECTOR, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        total = total + a + b + c + d
    return total
