"""Pooled lookup on a GPU: one launch for all features, in which each lane pools a few columns of one bag."""
# A lane adds 16 bytes of each row of its bag in float32, from left to right. Lanes are numbered by (bag, piece of the
# row) within a feature, so that no lane is idle whatever the width of the rows.

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.common import device_constant
from meseta.ops.triton_shared import ROW_TYPES, VECTOR_BYTES, TensorMetadata, tensor_metadata
from meseta.spec import MesetaError

WEIGHTED, MEAN = 1, 2
LANES = tl.constexpr(128)
"""Number of lanes per program."""
PREFETCH_ROWS = tl.constexpr(4)
"""Number of rows of a bag that are loaded before they are added."""
FEATURE_WORDS = tl.constexpr(6)
"""Words per feature: address, rows and columns of its table, first column and row stride of the output, flags."""


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
    words, width, widest, vector = _plan_launch(tensor_metadata(tables), tuple(flags))
    out = torch.empty((num_bags, width), dtype=torch.float32, device=ids.device)
    if out.numel() == 0:
        return out
    lanes = num_bags * widest // vector
    with torch.cuda.device_of(ids):
        _pool[(triton.cdiv(lanes, LANES.value), num_features)](
            out,
            device_constant(words, ids.device),
            ids.contiguous(),
            offsets.contiguous(),
            None if weights is None else weights.to(torch.float32).contiguous(),
            num_bags,
            VECTOR=vector,
            ROW=ROW_TYPES[tables[0].dtype],
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


@lru_cache(maxsize=256)
def _plan_launch(tables: tuple[TensorMetadata, ...], flags: tuple[int, ...]) -> tuple[tuple[int, ...], int, int, int]:
    """Return (words of all features, total columns, columns of the widest table, columns per lane).

    Cached, because tables do not change between steps. Raises MesetaError if tables do not match each other.
    """
    dtype, width = tables[0].dtype, 0
    for f, table in enumerate(tables):
        if table.dtype != dtype or len(table.shape) != 2 or not table.is_contiguous:
            raise MesetaError(
                f"pooled_lookup: table {f} is {table.dtype} {table.shape}, but all tables must be contiguous, "
                f"[rows, D] and {dtype} as the first; convert it"
            )
        width += table.shape[1]
    vector, column, words = VECTOR_BYTES // dtype.itemsize, 0, list[int]()
    for f, table in enumerate(tables):
        vector = gcd(vector, table.shape[1], table.address // dtype.itemsize)
        words += [table.address, *table.shape, column, width, flags[f]]
        column += table.shape[1]
    return tuple(words), width, max(table.shape[1] for table in tables), vector


@triton.jit
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _pool(out, features, ids, offsets, weights, num_bags, VECTOR: tl.constexpr, ROW: tl.constexpr):
    f = tl.program_id(1).to(tl.int64)
    feature = features + f * FEATURE_WORDS
    table = tl.multiple_of(tl.load(feature).to(tl.pointer_type(ROW)), VECTOR * (ROW.primitive_bitwidth // 8))
    num_rows = tl.load(feature + 1)
    dim = tl.multiple_of(tl.load(feature + 2), VECTOR)
    column = tl.multiple_of(tl.load(feature + 3), VECTOR)
    width = tl.multiple_of(tl.load(feature + 4), VECTOR)
    flags = tl.load(feature + 5)

    pieces = dim // VECTOR
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    bag = lane // pieces
    piece = lane % pieces
    live = bag < num_bags
    start = tl.load(offsets + f * num_bags + bag, mask=live, other=0).to(tl.int64)
    length = tl.load(offsets + f * num_bags + bag + 1, mask=live, other=0).to(tl.int64) - start
    weighted_length = length * (flags & 1)
    inside = tl.arange(0, VECTOR)[None, :]
    total = tl.zeros([LANES, VECTOR], dtype=tl.float32)
    for first in range(0, tl.max(length, axis=0), PREFETCH_ROWS):
        for k in tl.static_range(PREFETCH_ROWS):
            is_valid = first + k < length
            at = start + first + k
            row = tl.load(ids + at, mask=is_valid, other=0).to(tl.int64)
            is_valid = is_valid & (row >= 0) & (row < num_rows)
            place = tl.multiple_of(row * dim + piece * VECTOR, VECTOR)
            values = tl.load(table + (place[:, None] + inside), mask=is_valid[:, None], other=0.0).to(tl.float32)
            if weights is not None:
                is_valid = is_valid & (first + k < weighted_length)
                values = values * tl.load(weights + at, mask=is_valid, other=1.0)[:, None]
            total += values
    if (flags & 2) != 0:
        count = tl.maximum(length, 1).to(tl.float32)[:, None] + tl.zeros([LANES, VECTOR], dtype=tl.float32)
        total = tl.div_rn(total, count)
    place = tl.multiple_of(bag * width + column + piece * VECTOR, VECTOR)
    tl.store(out + (place[:, None] + inside), total, mask=live[:, None])
