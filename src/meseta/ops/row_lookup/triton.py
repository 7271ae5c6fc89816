"""Row lookup on a GPU: one launch for all features, in which each lane copies 16 bytes of a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.common import check_tables, contiguous_ids, device_constant
from meseta.ops.triton_shared import (
    ROW_TYPES,
    VECTOR_BYTES,
    is_aligned,
    load_row_parts,
    padded_address_count,
    write_addresses,
)
from meseta.spec import MesetaError

LANES = tl.constexpr(128)
"""Number of lanes per program."""
ROWS = tl.constexpr(2)
"""Number of rows that a lane loads before it stores them."""
FEATURE_WORDS = tl.constexpr(6)
"""Words per feature: address, rows and columns of its table, its first id, its number of ids, whether rows are aligned
to 16 bytes."""


def row_lookup(tables: Sequence[Tensor], ids: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Implement `meseta.ops.row_lookup.row_lookup` on a GPU. Ids outside their table return zeros."""
    check_tables("row_lookup", tables)
    ids, device, dtype = contiguous_ids("row_lookup", ids), ids.device, tables[0].dtype
    if any(a > b for a, b in pairwise([0, *bounds, ids.numel()])):
        raise MesetaError(f"row_lookup: bounds {list(bounds)} decrease or exceed the {ids.numel()} ids; correct them")
    sizes = [stop - start for start, stop in pairwise(bounds)]
    columns = [table.shape[1] for table in tables]
    out = [torch.empty(size, dim, dtype=torch.float32, device=device) for size, dim in zip(sizes, columns, strict=True)]
    blocks = [triton.cdiv(size, LANES.value * ROWS.value) for size in sizes]
    parts = [triton.cdiv(dim * dtype.itemsize, VECTOR_BYTES) for dim in columns]
    programs = max(a * b for a, b in zip(blocks, parts, strict=True))
    if programs == 0:
        return out
    aligned = [is_aligned(table.data_ptr(), table.shape[1] * dtype.itemsize) for table in tables]
    words = [
        word
        for table, start, size, is_table_aligned in zip(tables, bounds, sizes, aligned, strict=False)
        for word in (table.data_ptr(), *table.shape, start, size, int(is_table_aligned))
    ]
    with torch.cuda.device_of(ids):
        addresses = torch.empty(padded_address_count(len(out)), dtype=torch.int64, device=device)
        write_addresses(addresses, out)
        features = device_constant(tuple(words), device)
        _copy_rows[(programs, len(tables))](
            addresses, features, ids, ROW=ROW_TYPES[dtype], ALL_ALIGNED=all(aligned), num_warps=4
        )
    return out


@triton.jit
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _copy_rows(addresses, features, ids, ROW: tl.constexpr, ALL_ALIGNED: tl.constexpr):
    SIZE: tl.constexpr = ROW.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // SIZE
    f = tl.program_id(1).to(tl.int64)
    feature = features + f * FEATURE_WORDS
    out = tl.multiple_of(tl.load(addresses + f).to(tl.pointer_type(tl.float32)), 16)
    num_rows, dim = tl.load(feature + 1), tl.load(feature + 2).to(tl.int32)
    parts = (dim + VECTOR - 1) // VECTOR
    lane = tl.program_id(0) % parts * LANES + tl.arange(0, LANES)
    block = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    at = block.to(tl.int64)[:, None] * LANES + (lane // parts)[None, :]
    first_column = (lane % parts * VECTOR)[None, :]
    live = at < tl.load(feature + 4)
    row = tl.load(ids + (tl.load(feature + 3) + at), mask=live, other=0).to(tl.int64)
    fits = live & (row >= 0) & (row < num_rows)
    num_bytes = (dim - first_column) * SIZE
    address = tl.load(feature) + (row * dim + first_column) * SIZE
    if ALL_ALIGNED:
        values = load_row_parts(address, num_bytes, fits, ROW, True)
    elif tl.load(feature + 5) == 0:
        values = load_row_parts(address, num_bytes, fits, ROW, False)
    else:
        values = load_row_parts(address, num_bytes, fits, ROW, True)

    column = first_column[:, :, None] + tl.arange(0, VECTOR)[None, None, :]
    at = at[:, :, None]
    if dim % 4 == 0:
        mask = live[:, :, None] & (column < dim // 4 * 4)
        tl.store(out + (at * (dim // 4) * 4 + column), values, mask=mask)
    else:
        tl.store(out + (at * dim + column), values, mask=live[:, :, None] & (column < dim))
