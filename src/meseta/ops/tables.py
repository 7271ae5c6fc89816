"""What operators that read several tables check before their addresses go to the compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from meseta.spec import MesetaError

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""How the core calls the types of rows."""


def check_tables(operator: str, tables: Sequence[Tensor]) -> None:
    """Raise MesetaError unless there are tables, all contiguous, two-dimensional and of one type."""
    if not tables:
        raise MesetaError(f"{operator}: no table was given; give one per feature")
    for index, table in enumerate(tables):
        if table.dim() != 2 or not table.is_contiguous() or table.dtype != tables[0].dtype:
            raise MesetaError(
                f"{operator}: table {index} is {table.dtype} {list(table.shape)}, but all tables must be contiguous, "
                f"[rows, D] and {tables[0].dtype} as the first; convert it"
            )


def contiguous_ids(operator: str, ids: Tensor, name: str = "ids") -> Tensor:
    """Contiguous int32 or int64 ids, or whole numbers of another `name`; raises MesetaError for another type."""
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise MesetaError(f"{operator}: {name} are {ids.dtype} {list(ids.shape)}; give a 1-d tensor of int32 or int64")
    return ids.contiguous()


def check_bounds(operator: str, bounds: Sequence[int], limit: int) -> None:
    """Raise MesetaError unless bounds are one number at least, do not fall and lie in 0..limit.

    Before memory is taken for what lies between them.
    """
    if not bounds:
        raise MesetaError(f"{operator}: bounds are empty; there must be one number at least")
    for index, (before, bound) in enumerate(pairwise((0, *bounds))):
        if not before <= bound <= limit:
            raise MesetaError(
                f"{operator}: bounds[{index}] is {bound}; bounds must not fall and must lie in 0..{limit}"
            )


def check_bags(operator: str, tables: Sequence[Tensor], ids: Tensor, offsets: Tensor) -> None:
    """What the core checks, for the references on a CPU: they would read id -1 as the last row.

    Raises MesetaError for tables that are not [rows, D], a wrong number of offsets, offsets that fall or leave the
    ids, and an id outside its table.
    """
    if any(table.dim() != 2 for table in tables) or offsets.dim() != 1 or (offsets.numel() - 1) % len(tables):
        raise MesetaError(f"{operator}: {offsets.numel()} offsets for {len(tables)} tables [rows, D]; give F * B + 1")
    contiguous_ids(operator, ids)
    check_bounds(operator, offsets.tolist(), ids.numel())
    num_bags = (offsets.numel() - 1) // len(tables)
    for f, table in enumerate(tables):
        own = ids[int(offsets[f * num_bags]) : int(offsets[(f + 1) * num_bags])]
        if bool(((own < 0) | (own >= table.shape[0])).any()):
            raise MesetaError(f"{operator}: an id of feature {f} is outside 0..{table.shape[0] - 1}")
