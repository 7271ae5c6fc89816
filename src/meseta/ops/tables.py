"""Checks of embedding tables, ids and offsets, before their addresses are passed to the compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from meseta.spec import MesetaError

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Codes by which the core identifies the dtype of rows."""


def check_tables(operator: str, tables: Sequence[Tensor]) -> None:
    """Raise MesetaError if there are no tables, or if one is not contiguous, 2-d and of the dtype of the first."""
    if not tables:
        raise MesetaError(f"{operator}: no table was given; pass one table per feature")
    for index, table in enumerate(tables):
        if table.dim() != 2 or not table.is_contiguous() or table.dtype != tables[0].dtype:
            raise MesetaError(
                f"{operator}: table {index} is {table.dtype} {list(table.shape)}, but all tables must be contiguous, "
                f"[rows, D] and {tables[0].dtype} as the first; convert it"
            )


def contiguous_ids(operator: str, ids: Tensor, name: str = "ids") -> Tensor:
    """Return 1-d int32 or int64 `ids` as a contiguous tensor. Messages call them `name`.

    Raises MesetaError if they have another shape or dtype.
    """
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise MesetaError(f"{operator}: {name} are {ids.dtype} {list(ids.shape)}; give a 1-d tensor of int32 or int64")
    return ids.contiguous()


def check_bounds(operator: str, bounds: Sequence[int], limit: int) -> None:
    """Raise MesetaError if bounds are empty, decreasing or outside 0..limit."""
    if not bounds:
        raise MesetaError(f"{operator}: bounds are empty; pass at least one number")
    for index, (before, bound) in enumerate(pairwise((0, *bounds))):
        if not before <= bound <= limit:
            raise MesetaError(
                f"{operator}: bounds[{index}] is {bound}; bounds must not decrease and must be in 0..{limit}"
            )


def check_bags(operator: str, tables: Sequence[Tensor], ids: Tensor, offsets: Tensor) -> None:
    """Check bags on a CPU as the compiled core does, for the references.

    Raises MesetaError if a table is not [rows, D], the number of offsets is wrong, offsets decrease or exceed the
    number of ids, or an id is outside its table.
    """
    # Without this check the references would read id -1 as the last row.
    if any(table.dim() != 2 for table in tables) or offsets.dim() != 1 or (offsets.numel() - 1) % len(tables):
        raise MesetaError(f"{operator}: {offsets.numel()} offsets for {len(tables)} tables [rows, D]; give F * B + 1")
    contiguous_ids(operator, ids)
    check_bounds(operator, offsets.tolist(), ids.numel())
    num_bags = (offsets.numel() - 1) // len(tables)
    for f, table in enumerate(tables):
        feature_ids = ids[int(offsets[f * num_bags]) : int(offsets[(f + 1) * num_bags])]
        if bool(((feature_ids < 0) | (feature_ids >= table.shape[0])).any()):
            raise MesetaError(f"{operator}: an id of feature {f} is outside 0..{table.shape[0] - 1}")
