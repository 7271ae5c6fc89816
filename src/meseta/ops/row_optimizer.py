"""The record that every row optimizer is: (init, row_stats, update), three pure functions on touched rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

RowState = dict[str, Tensor]


@dataclass(frozen=True)
class Hyper:
    """What changes from step to step."""

    lr: float
    """Learning rate of this step."""
    step: int
    """Global step, counted from 1: bias correction uses it."""


@dataclass(frozen=True)
class RowOptimizer:
    """How touched rows learn. All row optimizers are lazy: rows without a contribution, and their state, stand
    still."""

    name: str
    init: Callable[[Tensor], RowState]
    """(weight [rows, D]) -> state by name, each [rows, D] or [rows], float32 (float64 for float64 rows)."""
    update: Callable[[Tensor, Tensor, RowState, Tensor | None, Hyper], tuple[Tensor, RowState]]
    """(rows [U, D], gradient [U, D], state of these rows, row_stats [U] or None, hyper) -> (new rows, new state)."""
    row_stats: Callable[[Tensor], Tensor] | None = None
    """(gradient [U, D]) -> one number per row and block of 16 columns [U, ceil(D / 16)]; embedding/ adds the blocks of
    all column shards from left to right, and update gets the sums [U]. None: update needs no sum over the row."""
