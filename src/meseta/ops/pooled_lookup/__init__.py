"""Look up and add the rows of every bag, all tables of a rank in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.jagged.shapes import Float, Int
from meseta.ops.core import core
from meseta.ops.library import register
from meseta.ops.memory import empty
from meseta.ops.pooled_lookup import reference
from meseta.ops.tables import check_bags, plain_ids
from meseta.spec import MesetaError

WEIGHTED, MEAN = 1, 2
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""How the core calls the types of rows; float64 rows, which are for verification, take the reference."""


def pooled_lookup(
    tables: Sequence[Tensor],
    ids: Int[Tensor, " nnz"],
    offsets: Int[Tensor, " F_times_B_plus_1"],
    weights: Float[Tensor, " nnz"] | None = None,
    weighted: Sequence[bool] = (),
    mean: Sequence[bool] = (),
) -> Float[Tensor, "B sum_of_dims"]:
    """Sum of the rows of each bag for F features side by side; an empty bag gives zeros.

    Feature f reads `tables[f]` [rows_f, D_f], all of one type; float16 and bfloat16 rows are added in float32, which is
    also the type of the result. Bag b of feature f is ids[offsets[f * B + b] : offsets[f * B + b + 1]] (int32 or
    int64), added from left to right. `weighted[f]` multiplies each row by its weight first, `mean[f]` divides the sum
    by the number of ids. Empty `weighted` and `mean` mean that no feature is.

    Raises MesetaError for offsets that fall or leave the ids, and for an id outside its table. On a GPU, where checking
    would stall the device, ids must be valid; meseta.ops.id_policy sees to that.
    """
    if not tables:
        raise MesetaError("pooled_lookup: no table was given; give one table per feature")
    if len(weighted) not in (0, len(tables)) or len(mean) not in (0, len(tables)):
        raise MesetaError(
            f"pooled_lookup: {len(weighted)} flags 'weighted' and {len(mean)} flags 'mean' for {len(tables)} tables; "
            "give one for each, or none"
        )
    flags = [0] * len(tables)
    for f, yes in enumerate(weighted):
        flags[f] |= WEIGHTED * (yes and weights is not None)
    for f, yes in enumerate(mean):
        flags[f] |= MEAN * yes
    return _operator(list(tables), ids, offsets, weights, flags)


def _reference(tables: list[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None, flags: list[int]) -> Tensor:
    weighted, mean = [bool(flag & WEIGHTED) for flag in flags], [bool(flag & MEAN) for flag in flags]
    return reference.pooled_lookup(tables, ids, offsets, weights, weighted, mean)


def _cpu(tables: list[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None, flags: list[int]) -> Tensor:
    if not tables or len(flags) != len(tables):
        raise MesetaError(f"pooled_lookup: {len(flags)} flags for {len(tables)} tables; give one for each")
    dtype = tables[0].dtype
    if weights is not None:
        weights = weights.to(torch.float32 if dtype in KINDS else dtype).contiguous()
    rows = []
    for f, table in enumerate(tables):
        if table.dtype != dtype or table.dim() != 2 or not table.is_contiguous():
            raise MesetaError(
                f"pooled_lookup: table {f} is {table.dtype} {tuple(table.shape)}, but all tables must be contiguous, "
                f"[rows, D] and {dtype} as the first; convert it"
            )
        rows += [table.data_ptr(), table.size(0), table.size(1), flags[f]]
    offsets = plain_ids("pooled_lookup", offsets, "offsets").to(torch.int64)
    num_bags, rest = divmod(offsets.numel() - 1, len(tables))
    if rest or offsets.numel() == 0:
        raise MesetaError(
            f"pooled_lookup: {offsets.numel()} offsets for {len(tables)} features; there must be F * B + 1 of them"
        )
    if weights is not None and weights.numel() != ids.numel():
        raise MesetaError(f"pooled_lookup: {weights.numel()} weights for {ids.numel()} ids; give one per id")
    ids = plain_ids("pooled_lookup", ids)
    if dtype not in KINDS:
        check_bags("pooled_lookup", tables, ids, offsets)
        return _reference(tables, ids, offsets, weights, flags)
    width = sum(rows[2::4])
    out = empty((num_bags, width), torch.float32)
    try:
        core().pooled_lookup(
            rows,
            KINDS[dtype],
            ids.data_ptr(),
            ids.numel(),
            ids.dtype == torch.int64,
            offsets.data_ptr(),
            num_bags,
            0 if weights is None else weights.data_ptr(),
            out.data_ptr(),
            width,
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"pooled_lookup: {error}") from None
    return out


def _gpu(tables: list[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None, flags: list[int]) -> Tensor:
    if tables[0].dtype not in KINDS:
        return _reference(tables, ids, offsets, weights, flags)
    from meseta.ops.pooled_lookup import triton

    return triton.pooled_lookup(tables, ids, offsets, weights, flags)


def _fake(tables: list[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None, flags: list[int]) -> Tensor:
    dtype = torch.float64 if tables[0].dtype == torch.float64 else torch.float32
    width = sum(table.shape[1] for table in tables)
    return tables[0].new_empty((offsets.shape[0] - 1) // len(tables), width, dtype=dtype)


_operator = register(
    "pooled_lookup(Tensor[] tables, Tensor ids, Tensor offsets, Tensor? weights, int[] flags) -> Tensor",
    cpu=_cpu,
    cuda=_gpu,
    fake=_fake,
)
