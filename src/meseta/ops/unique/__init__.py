"""Distinct ids per feature or table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.ops.common import contiguous_ids, register
from meseta.ops.core import core
from meseta.ops.memory import empty
from meseta.ops.unique import reference
from meseta.sparse.shapes import Int
from meseta.spec import MesetaError


@dataclass(frozen=True)
class UniqueIds:
    """Distinct ids of several groups."""

    rows: Int[Tensor, " U"]
    """int64 ids, ordered by group, and ascending within each group."""
    inverse: Int[Tensor, " nnz"]
    """Index in `rows` of each original id."""
    counts: Int[Tensor, " U"]
    """Number of occurrences of each row in its group."""
    bounds: Int[Tensor, " groups_plus_1"]
    """Group g has rows[bounds[g] : bounds[g + 1]]."""


def unique(ids: Int[Tensor, " nnz"], bounds: Sequence[int] | None = None) -> UniqueIds:
    """Return the distinct ids of each group ids[bounds[g] : bounds[g + 1]].

    Groups may be the features of a KeyedJaggedTensor (`bounds=kjt.key_offsets`), or tables whose features are adjacent.
    On a GPU the host waits for the sizes of the result.

    Example: ids [5, 2, 5, 5, 1] and bounds [0, 3, 5] return rows [2, 5, 1, 5], inverse [1, 0, 1, 3, 2], counts
    [1, 2, 1, 1] and bounds [0, 2, 4].

    Args:
        ids: int32 or int64 numbers.
        bounds: Ascending numbers from 0 to the number of ids. By default all ids form one group.

    Raises:
        MesetaError: Bounds decrease or do not cover the ids.
    """
    bounds = [0, ids.numel()] if bounds is None else list(bounds)
    _check_bounds_cover(ids, bounds)
    return UniqueIds(*_operator(ids, bounds))


def _check_bounds_cover(ids: Tensor, bounds: list[int]) -> None:
    if not bounds or bounds[0] != 0 or bounds[-1] != ids.numel():
        raise MesetaError(f"unique: bounds {bounds} must start at 0 and end with {ids.numel()}, the number of ids")


def _cpu(ids: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = contiguous_ids("unique", ids)
    _check_bounds_cover(ids, bounds)
    rows, inverse, counts = (empty((ids.numel(),), torch.int64) for _ in range(3))
    first = torch.empty(len(bounds), dtype=torch.int64)
    try:
        num_rows = core().unique(
            ids.data_ptr(),
            ids.numel(),
            ids.dtype == torch.int64,
            bounds,
            [out.data_ptr() for out in (rows, inverse, counts, first)],
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"unique: {error}") from None
    return rows[:num_rows], inverse, counts[:num_rows], first


def _fake(ids: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = torch.library.get_ctx().new_dynamic_size()
    rows, counts = (ids.new_empty(num_rows, dtype=torch.int64) for _ in range(2))
    return rows, torch.empty_like(ids, dtype=torch.int64), counts, ids.new_empty(len(bounds), dtype=torch.int64)


_operator = register(
    "unique(Tensor ids, int[] bounds) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=reference.unique,
    fake=_fake,
)
