"""Row lookup on a GPU: one launch for all features, in which each lane copies 16 bytes of one row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.common import check_tables, contiguous_ids, device_constant
from meseta.ops.triton_shared import ROW_TYPES, VECTOR_BYTES, padded_address_count, write_addresses
from meseta.spec import MesetaError

LANES = tl.constexpr(256)
"""Number of lanes per program."""
FEATURE_WORDS = tl.constexpr(5)
"""Words per feature: address, rows and columns of its table, its first id, its number of ids."""


def row_lookup(tables: Sequence[Tensor], ids: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Implement `meseta.ops.row_lookup.row_lookup` on a GPU. Ids outside their table return zeros."""
    check_tables("row_lookup", tables)
    ids, device, dtype = contiguous_ids("row_lookup", ids), ids.device, tables[0].dtype
    if any(a > b for a, b in pairwise([0, *bounds, ids.numel()])):
        raise MesetaError(f"row_lookup: bounds {list(bounds)} decrease or exceed the {ids.numel()} ids; correct them")
    sizes = [stop - start for start, stop in pairwise(bounds)]
    columns = [table.shape[1] for table in tables]
    out = [torch.empty(size, dim, dtype=torch.float32, device=device) for size, dim in zip(sizes, columns, strict=True)]
    vector = gcd(VECTOR_BYTES // dtype.itemsize, *columns, *(t.data_ptr() // dtype.itemsize for t in tables))
    lanes = max(rows.numel() for rows in out) // vector
    if lanes == 0:
        return out
    words = [
        word
        for table, start, size in zip(tables, bounds, sizes, strict=False)
        for word in (table.data_ptr(), *table.shape, start, size)
    ]
    with torch.cuda.device_of(ids):
        addresses = torch.empty(padded_address_count(len(out)), dtype=torch.int64, device=device)
        write_addresses(addresses, out)
        grid = (triton.cdiv(lanes, LANES.value), len(tables))
        features = device_constant(tuple(words), device)
        _copy_rows[grid](addresses, features, ids, VECTOR=vector, ROW=ROW_TYPES[dtype], num_warps=4)
    return out


@triton.jit
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _copy_rows(addresses, features, ids, VECTOR: tl.constexpr, ROW: tl.constexpr):
    f = tl.program_id(1).to(tl.int64)
    feature = features + f * FEATURE_WORDS
    table = tl.multiple_of(tl.load(feature).to(tl.pointer_type(ROW)), VECTOR * (ROW.primitive_bitwidth // 8))
    out = tl.multiple_of(tl.load(addresses + f).to(tl.pointer_type(tl.float32)), 16)
    num_rows = tl.load(feature + 1)
    dim = tl.multiple_of(tl.load(feature + 2), VECTOR)
    start = tl.load(feature + 3)
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    at = lane // (dim // VECTOR)
    live = at < tl.load(feature + 4)
    row = tl.load(ids + start + at, mask=live, other=0).to(tl.int64)
    inside = tl.arange(0, VECTOR)[None, :]
    column = lane % (dim // VECTOR) * VECTOR
    fits = live & (row >= 0) & (row < num_rows)
    source = tl.multiple_of(row * dim + column, VECTOR)
    values = tl.load(table + (source[:, None] + inside), mask=fits[:, None], other=0.0).to(tl.float32)
    target = tl.multiple_of(lane * VECTOR, VECTOR)
    tl.store(out + (target[:, None] + inside), values, mask=live[:, None])
