"""The record that every row optimizer is: (init, row_stats, update), three pure functions on touched rows.

The functions are written once and run twice: on torch tensors, which is the reference, and on symbols, from which
`meseta.ops.row_program.program.trace` makes the program that the compiled core and the GPU kernels run. So they may use
what both have, and nothing else: + - * / and unary minus, > and < inside `where`, the methods sqrt, abs, sign, clamp,
maximum and minimum, and ** between plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from meseta.ops.memory import empty
from meseta.spec import COLUMN_BLOCK, MesetaError

Value: TypeAlias = Any
"""A number per element [U, D] or per row [U, 1]: a torch tensor in the reference, a symbol while it is traced."""
Values: TypeAlias = dict[str, Value]
"""Values by name."""
RowState: TypeAlias = dict[str, Tensor]
"""Stored state by name: [rows, D], or [rows] for what a row has one of."""


@dataclass(frozen=True)
class Hyper:
    """What changes from step to step, and the width; plain numbers in the reference."""

    lr: float
    """Learning rate of this step."""
    step: int
    """Global step, counted from 1: bias correction uses it."""
    embedding_dim: int
    """Columns of the whole table, whatever a column shard holds."""


RowStats: TypeAlias = Callable[[Value, Value, Values, Values, Hyper], Values]
Update: TypeAlias = Callable[[Value, Value, Values, Values, Hyper], tuple[Value, Values]]


@dataclass(frozen=True)
class RowOptimizer:
    """How touched rows learn. All row optimizers are lazy: rows without a contribution, and their state, stand still.

    A value is [U, D], or [U, 1] for what a row has one of, so that the two broadcast. Arithmetic is in float32
    (float64 for float64 rows), whatever type the rows are stored in.
    """

    name: str
    init: Callable[[Tensor], RowState]
    """(weight [rows, D]) -> state by name; see `element_state` and `row_state`."""
    update: Update
    """(rows, gradient, state, stats, hyper) -> (new rows, new state); the state has the same names before and after."""
    row_stats: tuple[RowStats, ...] = ()
    """Stages of (rows, gradient, state, stats, hyper) -> summands by name. The sum of a summand over all columns of
    the row, also of those that other column shards hold, is stats[name] in later stages and in `update`."""


def element_state(weight: Tensor, fill: float = 0.0) -> Tensor:
    """[rows, D] of `fill`: state of which every element has one; float32, or float64 beside float64 rows."""
    return empty(weight.shape, compute_dtype(weight.dtype), weight.device, keep=False).fill_(fill)


def row_state(weight: Tensor, fill: float = 0.0) -> Tensor:
    """[rows] of `fill`: state of which every row has one; float32, or float64 beside float64 rows."""
    return empty(weight.shape[:1], compute_dtype(weight.dtype), weight.device, keep=False).fill_(fill)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which rows of `dtype` are updated, and their state is kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def where(condition: Value, chosen: Value, other: Value) -> Value:
    """`chosen` where the condition (`a > b` or `a < b`) holds, `other` elsewhere; one of the two may be a number.

    Raises MesetaError for another condition, and where both are numbers.
    """
    if not isinstance(condition, Tensor):
        if not hasattr(type(condition), "choose"):
            found = type(condition).__name__
            raise MesetaError(f"where: the condition must be 'a > b' or 'a < b' on values of a row, got {found}")
        return condition.choose(chosen, other)
    if not isinstance(chosen, Tensor) and not isinstance(other, Tensor):
        raise MesetaError(f"where: one choice must be a value of the row, got the numbers {chosen!r} and {other!r}")
    return torch.where(condition, chosen, other)


def sum_in_blocks(values: Tensor) -> Tensor:
    """[U, D] -> [U, ceil(D / 16)]: each block of 16 columns added as a fixed tree, whatever the shard's width."""
    padded = functional.pad(values, (0, -values.shape[1] % COLUMN_BLOCK))
    tree = padded.unflatten(1, (-1, COLUMN_BLOCK))
    while tree.shape[-1] > 1:
        half = tree.shape[-1] // 2
        tree = tree[..., :half] + tree[..., half:]
    return tree.squeeze(-1)


def sum_across_blocks(sums: Tensor) -> Tensor:
    """[U, blocks] -> [U]: blocks added from left to right, so that column shards do not change the sum."""
    total = sums[:, 0]
    for block in range(1, sums.shape[1]):
        total = total + sums[:, block]
    return total


def broadcast_state(state: RowState) -> Values:
    """Stored state as values that broadcast: [rows] becomes [rows, 1]."""
    return {name: tensor[:, None] if tensor.dim() == 1 else tensor for name, tensor in state.items()}


def reference_step(
    optimizer: RowOptimizer, rows: Tensor, gradient: Tensor, state: RowState, hyper: Hyper
) -> tuple[Tensor, RowState]:
    """The whole update of whole rows in plain torch; arguments are left as they are.

    Rows and gradient are [U, D], the state is of these rows. Returns rows and state in float32 (float64 for float64
    rows): rounding them to 16 bits is left to the caller.
    """
    dtype = compute_dtype(rows.dtype)
    w, g = rows.to(dtype), gradient.to(dtype)
    stats: Values = {}
    for stage in optimizer.row_stats:
        summands = stage(w, g, broadcast_state(state), dict(stats), hyper)
        stats.update({name: sum_across_blocks(sum_in_blocks(summand))[:, None] for name, summand in summands.items()})
    return apply_update(optimizer, w, g, state, stats, hyper)


def apply_update(
    optimizer: RowOptimizer, w: Tensor, g: Tensor, state: RowState, stats: Values, hyper: Hyper
) -> tuple[Tensor, RowState]:
    """The update of columns [U, D] given the statistics of their whole rows [U, 1], in the shapes that are stored."""
    new_w, new_state = optimizer.update(w, g, broadcast_state(state), stats, hyper)
    stored = {name: _shape_like(new_state[name], like=old) for name, old in state.items()}
    return _shape_like(new_w, like=w), stored


def _shape_like(value: Value, like: Tensor) -> Tensor:
    """A value that may be narrower, as stored: [U, 1] becomes [U] or [U, D], a number fills all."""
    if not isinstance(value, Tensor):
        return torch.full_like(like, value)
    return value.squeeze(1) if like.dim() == 1 else value.expand_as(like)
