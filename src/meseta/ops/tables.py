"""What operators that read several tables check before their addresses go to the compiled core."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.spec import MesetaError

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""How the core calls the types of rows."""


def check_tables(operator: str, tables: Sequence[Tensor]) -> None:
    """Raise MesetaError unless all tables are contiguous, two-dimensional and of one type."""
    for index, table in enumerate(tables):
        if table.dim() != 2 or not table.is_contiguous() or table.dtype != tables[0].dtype:
            raise MesetaError(
                f"{operator}: table {index} is {table.dtype} {list(table.shape)}, but all tables must be contiguous, "
                f"[rows, D] and {tables[0].dtype} as the first; convert it"
            )


def plain_ids(operator: str, ids: Tensor) -> Tensor:
    """Contiguous int32 or int64 ids; raises MesetaError for another type."""
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise MesetaError(f"{operator}: ids are {ids.dtype} {list(ids.shape)}; give a 1-d tensor of int32 or int64")
    return ids.contiguous()
