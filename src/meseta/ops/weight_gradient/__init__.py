"""Gradient of the per-sample weights of pooled features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.ops.common import DTYPE_CODES, check_bags, check_tables, contiguous_ids, register
from meseta.ops.core import core
from meseta.ops.weight_gradient import reference
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError

WEIGHTED, MEAN = 1, 2


def weight_gradient(
    tables: Sequence[Tensor],
    ids: Int[Tensor, " nnz"],
    offsets: Int[Tensor, " F_times_B_plus_1"],
    gradient: Float[Tensor, "B sum_of_dims"],
    weighted: Sequence[bool],
    mean: Sequence[bool] = (),
) -> Float[Tensor, " nnz"]:
    """Return the gradient of the weight of each id: the dot product of its row and the gradient of its bag.

    Args:
        tables: Table of each feature.
        ids: Ids of all bags, as for `pooled_lookup`. On a GPU all ids must be valid.
        offsets: Start of each bag in `ids`.
        gradient: Gradient of the output of `pooled_lookup`.
        weighted: Whether each feature has weights. The gradient is 0 for ids of other features.
        mean: Whether each feature has mean pooling, which divides the gradient by the number of ids of the bag.

    Returns:
        A float32 gradient, or float64 for float64 tables, which use the reference.

    Raises:
        MesetaError: Tensors do not match each other, offsets decrease or exceed the number of ids, or an id is outside
            its table.
    """
    # Products are summed as a tree over each block of 16 columns, and blocks from left to right. The result therefore
    # depends neither on threads nor on column-wise sharding.
    if not tables or len(weighted) != len(tables) or (mean and len(mean) != len(tables)):
        raise MesetaError(
            f"weight_gradient: {len(weighted)} flags 'weighted' and {len(mean)} flags 'mean' for {len(tables)} tables; "
            "pass at least one table and one flag per table"
        )
    means = mean or [False] * len(tables)
    flags = [WEIGHTED * yes + MEAN * average for yes, average in zip(weighted, means, strict=True)]
    result: Tensor = _operator(list(tables), ids, offsets, gradient, flags)
    return result


def _reference(tables: list[Tensor], ids: Tensor, offsets: Tensor, gradient: Tensor, flags: list[int]) -> Tensor:
    weighted, mean = [bool(flag & WEIGHTED) for flag in flags], [bool(flag & MEAN) for flag in flags]
    return reference.weight_gradient(tables, ids, offsets, gradient, weighted, mean)


def _cpu(tables: list[Tensor], ids: Tensor, offsets: Tensor, gradient: Tensor, flags: list[int]) -> Tensor:
    check_tables("weight_gradient", tables)
    if len(flags) != len(tables):
        raise MesetaError(f"weight_gradient: {len(flags)} flags for {len(tables)} tables; pass one flag per table")
    ids, offsets = (
        contiguous_ids("weight_gradient", ids),
        contiguous_ids("weight_gradient", offsets, "offsets").to(torch.int64),
    )
    num_bags, rest = divmod(offsets.numel() - 1, len(tables))
    width = sum(table.shape[1] for table in tables)
    if rest or offsets.numel() == 0 or list(gradient.shape) != [num_bags, width]:
        raise MesetaError(
            f"weight_gradient: {offsets.numel()} offsets and a gradient {list(gradient.shape)} for {len(tables)} "
            f"tables with {width} columns; pass F * B + 1 offsets and a gradient [B, {width}]"
        )
    if tables[0].dtype not in DTYPE_CODES:
        check_bags("weight_gradient", tables, ids, offsets)
        return _reference(tables, ids, offsets, gradient, flags)
    gradient = gradient.to(torch.float32).contiguous()
    out = torch.zeros(ids.numel(), dtype=torch.float32)
    described = [n for t, flag in zip(tables, flags, strict=True) for n in (t.data_ptr(), t.shape[0], t.shape[1], flag)]
    try:
        core().weight_gradient(
            described,
            DTYPE_CODES[tables[0].dtype],
            [ids.data_ptr(), ids.numel(), int(ids.dtype == torch.int64)],
            [offsets.data_ptr(), num_bags],
            gradient.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"weight_gradient: {error}") from None
    return out


def _gpu(tables: list[Tensor], ids: Tensor, offsets: Tensor, gradient: Tensor, flags: list[int]) -> Tensor:
    if tables[0].dtype not in DTYPE_CODES:
        return _reference(tables, ids, offsets, gradient, flags)
    from meseta.ops.weight_gradient import triton

    return triton.weight_gradient(tables, ids, offsets, gradient, flags)


def _fake(tables: list[Tensor], ids: Tensor, offsets: Tensor, gradient: Tensor, flags: list[int]) -> Tensor:
    dtype = torch.float64 if tables[0].dtype == torch.float64 else torch.float32
    return gradient.new_empty(ids.shape[0], dtype=dtype)


_operator = register(
    "weight_gradient(Tensor[] tables, Tensor ids, Tensor offsets, Tensor gradient, int[] flags) -> Tensor",
    cpu=_cpu,
    cuda=_gpu,
    fake=_fake,
)
