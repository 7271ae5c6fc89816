"""Lookup and pooling of the rows of bags, for all tables of a rank in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meseta.ops.common import DTYPE_CODES, can_bypass_dispatcher, check_bags, contiguous_ids, register
from meseta.ops.core import core
from meseta.ops.memory import empty
from meseta.ops.pooled_lookup import reference
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError

WEIGHTED, MEAN = 1, 2


@dataclass(frozen=True)
class LookupGroup:
    """Tables of several features, prepared once for many lookups."""

    tables: tuple[Tensor, ...]
    weighted: tuple[bool, ...] = ()
    """Whether each feature has weights. Empty means that none has."""
    mean: tuple[bool, ...] = ()
    """Whether each feature has mean pooling. Empty means that none has."""

    @cached_property
    def core_fields(self) -> tuple[list[int], int]:
        """Description of the tables for the core, and the total number of columns."""
        return _pack_tables(self.tables, _flags(self.tables, self.weighted, self.mean))


def lookup_group(
    group: LookupGroup,
    ids: Int[Tensor, " nnz"],
    offsets: Int[Tensor, " F_times_B_plus_1"],
    weights: Float[Tensor, " nnz"] | None = None,
) -> Float[Tensor, "B sum_of_dims"]:
    """Pool rows as `pooled_lookup` does, for prepared tables. Faster for small batches."""
    if can_bypass_dispatcher(ids) and group.tables[0].dtype in DTYPE_CODES:
        return _run_core(group.core_fields, DTYPE_CODES[group.tables[0].dtype], ids, offsets, weights)
    return pooled_lookup(group.tables, ids, offsets, weights, group.weighted, group.mean)


def pooled_lookup(
    tables: Sequence[Tensor],
    ids: Int[Tensor, " nnz"],
    offsets: Int[Tensor, " F_times_B_plus_1"],
    weights: Float[Tensor, " nnz"] | None = None,
    weighted: Sequence[bool] = (),
    mean: Sequence[bool] = (),
) -> Float[Tensor, "B sum_of_dims"]:
    """Return the pooled rows of F features, concatenated. An empty bag has zeros.

    Rows of a bag are added from left to right. The result is float32, or float64 for float64 tables.

    Args:
        tables: Table [rows_f, D_f] of each feature, all of one dtype. Rows of float16 and bfloat16 are added in
            float32.
        ids: int32 or int64 row ids. On a GPU they must be valid, because a check would stall the device. Apply
            `meseta.ops.id_policy` first.
        offsets: Bag b of feature f has ids[offsets[f * B + b] : offsets[f * B + b + 1]].
        weights: Weight of each id.
        weighted: Whether rows of each feature are multiplied by their weights. Empty means that none are.
        mean: Whether the sum of each feature is divided by the number of ids. Empty means that none are.

    Raises:
        MesetaError: Offsets decrease or exceed the number of ids, or an id is outside its table.
    """
    return _operator(list(tables), ids, offsets, weights, _flags(tables, weighted if weights is not None else (), mean))


def _flags(tables: Sequence[Tensor], weighted: Sequence[bool], mean: Sequence[bool]) -> list[int]:
    if not tables:
        raise MesetaError("pooled_lookup: no table was given; pass one table per feature")
    if len(weighted) not in (0, len(tables)) or len(mean) not in (0, len(tables)):
        raise MesetaError(
            f"pooled_lookup: {len(weighted)} flags 'weighted' and {len(mean)} flags 'mean' for {len(tables)} tables; "
            "pass one flag per table, or none"
        )
    flags = [0] * len(tables)
    for f, yes in enumerate(weighted):
        flags[f] |= WEIGHTED * yes
    for f, yes in enumerate(mean):
        flags[f] |= MEAN * yes
    return flags


def _reference(tables: list[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None, flags: list[int]) -> Tensor:
    weighted, mean = [bool(flag & WEIGHTED) for flag in flags], [bool(flag & MEAN) for flag in flags]
    return reference.pooled_lookup(tables, ids, offsets, weights, weighted, mean)


def _cpu(tables: list[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None, flags: list[int]) -> Tensor:
    if not tables or len(flags) != len(tables):
        raise MesetaError(f"pooled_lookup: {len(flags)} flags for {len(tables)} tables; pass one flag per table")
    fields, dtype = _pack_tables(tables, flags), tables[0].dtype
    if not tables[0].is_floating_point():
        raise MesetaError(f"pooled_lookup: rows are {dtype}; pass float16, bfloat16, float32 or float64")
    if dtype in DTYPE_CODES:
        return _run_core(fields, DTYPE_CODES[dtype], ids, offsets, weights)
    # float64 is used for verification only, so the core does not support it.
    ids, offsets, weights, _ = _check_inputs(len(tables), ids, offsets, weights, dtype)
    check_bags("pooled_lookup", tables, ids, offsets)
    return _reference(tables, ids, offsets, weights, flags)


def _check_inputs(
    num_features: int, ids: Tensor, offsets: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Return contiguous ids, int64 offsets, weights of `dtype`, and the number of bags per feature."""
    offsets = contiguous_ids("pooled_lookup", offsets, "offsets").to(torch.int64)
    num_bags, rest = divmod(offsets.numel() - 1, num_features)
    if rest or offsets.numel() == 0:
        raise MesetaError(
            f"pooled_lookup: {offsets.numel()} offsets for {num_features} features; pass F * B + 1 offsets"
        )
    if weights is not None:
        weights = weights.to(dtype).contiguous()
        if weights.shape != ids.shape:
            raise MesetaError(
                f"pooled_lookup: weights {list(weights.shape)} for ids {list(ids.shape)}; pass one weight per id"
            )
    return contiguous_ids("pooled_lookup", ids), offsets, weights, num_bags


def _run_core(fields: tuple[list[int], int], kind: int, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    rows, width = fields
    ids, offsets, weights, num_bags = _check_inputs(len(rows) // 4, ids, offsets, weights, torch.float32)
    out = empty((num_bags, width), torch.float32)
    try:
        core().pooled_lookup(
            rows,
            kind,
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


def _pack_tables(tables: Sequence[Tensor], flags: list[int]) -> tuple[list[int], int]:
    """Return (address, rows, columns, flags) of each table in a flat list, and the total number of columns."""
    rows = []
    for f, table in enumerate(tables):
        if table.dtype != tables[0].dtype or table.dim() != 2 or not table.is_contiguous():
            raise MesetaError(
                f"pooled_lookup: table {f} is {table.dtype} {tuple(table.shape)}, but all tables must be contiguous, "
                f"[rows, D] and {tables[0].dtype} as the first; convert it"
            )
        rows += [table.data_ptr(), table.size(0), table.size(1), flags[f]]
    return rows, sum(rows[2::4])


def _gpu(tables: list[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None, flags: list[int]) -> Tensor:
    if tables[0].dtype not in DTYPE_CODES:
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
