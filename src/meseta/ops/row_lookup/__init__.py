"""Lookup of rows without pooling, for all tables of a rank in one call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from meseta.ops.common import DTYPE_CODES, check_bags, check_bounds, check_tables, contiguous_ids, register
from meseta.ops.core import core
from meseta.ops.memory import empty
from meseta.ops.row_lookup import reference
from meseta.sparse.shapes import Int
from meseta.spec import MesetaError


def row_lookup(tables: Sequence[Tensor], ids: Int[Tensor, " nnz"], bounds: Sequence[int]) -> list[Tensor]:
    """Return the rows tables[f][ids[bounds[f] : bounds[f + 1]]] of each feature f, [nnz_f, D_f].

    Example: tables [[[1, 2], [3, 4]], [[5]]], ids [1, 0, 0] and bounds [0, 2, 3] return [[3, 4], [1, 2]] and [[5]].

    Args:
        tables: Contiguous tables [rows_f, D_f] of one dtype. float64 tables use the reference and return float64, all
            others return float32.
        ids: int32 or int64 row ids. On a GPU they must be valid, because a check would stall the device. Apply
            `meseta.ops.id_policy` first.
        bounds: First id of each feature, and the end of the last one.

    Raises:
        MesetaError: Bounds decrease or exceed the number of ids, or an id is outside its table.
    """
    if len(bounds) != len(tables) + 1:
        raise MesetaError(f"row_lookup: {len(bounds)} bounds for {len(tables)} tables; pass F + 1 bounds")
    rows: list[Tensor] = _operator(list(tables), ids, list(bounds)) if tables else []
    return rows


def _cpu(tables: list[Tensor], ids: Tensor, bounds: list[int]) -> list[Tensor]:
    check_tables("row_lookup", tables)
    ids = contiguous_ids("row_lookup", ids)
    check_bounds("row_lookup", bounds, ids.numel())
    if len(bounds) != len(tables) + 1:
        raise MesetaError(f"row_lookup: {len(bounds)} bounds for {len(tables)} tables; pass F + 1 bounds")
    # The core has no float64, which is used for verification.
    if tables[0].dtype not in DTYPE_CODES:
        check_bags("row_lookup", tables, ids, torch.tensor(bounds))
        return reference.row_lookup(tables, ids, bounds)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    out = [empty((size, table.shape[1]), torch.float32) for size, table in zip(sizes, tables, strict=True)]
    described = [
        number
        for table, rows in zip(tables, out, strict=True)
        for number in (table.data_ptr(), table.shape[0], table.shape[1], rows.data_ptr())
    ]
    try:
        core().row_lookup(
            described,
            DTYPE_CODES[tables[0].dtype],
            ids.data_ptr(),
            ids.numel(),
            ids.dtype == torch.int64,
            bounds,
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"row_lookup: {error}") from None
    return out


def _gpu(tables: list[Tensor], ids: Tensor, bounds: list[int]) -> list[Tensor]:
    if tables[0].dtype not in DTYPE_CODES:
        return reference.row_lookup(tables, ids, bounds)
    from meseta.ops.row_lookup import triton

    return triton.row_lookup(tables, ids, bounds)


def _fake(tables: list[Tensor], ids: Tensor, bounds: list[int]) -> list[Tensor]:
    dtype = torch.float64 if tables[0].dtype == torch.float64 else torch.float32
    sizes = [stop - start for start, stop in pairwise(bounds)]
    return [t.new_empty(size, t.shape[1], dtype=dtype) for size, t in zip(sizes, tables, strict=True)]


_operator = register(
    "row_lookup(Tensor[] tables, Tensor ids, int[] bounds) -> Tensor[]",
    cpu=_cpu,
    cuda=_gpu,
    fake=_fake,
)
