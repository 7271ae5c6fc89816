"""Definition of row optimizers: three pure functions (init, row_stats, update) on touched rows."""
# The functions run on torch tensors as the reference, and on symbols, from which meseta.ops.row_program.program.trace
# makes the program for the compiled core and GPU kernels. They may use only what both support: + - * / and unary minus,
# > and < inside `where`, the methods sqrt, abs, sign, clamp, maximum and minimum, and ** between plain numbers.

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
"""Number per element [U, D] or per row [U, 1]: a torch tensor in the reference, a symbol during tracing."""
Values: TypeAlias = dict[str, Value]
"""Values by name."""
RowState: TypeAlias = dict[str, Tensor]
"""Stored state by name: [rows, D] per element, or [rows] per row."""


@dataclass(frozen=True)
class Hyper:
    """Numbers of a step and a table. In the reference they are plain numbers."""

    lr: float
    """Learning rate of this step."""
    step: int
    """Global step, starting at 1. Bias correction uses it."""
    embedding_dim: int
    """Number of columns of the whole table. A column shard has fewer."""


RowStats: TypeAlias = Callable[[Value, Value, Values, Values, Hyper], Values]
Update: TypeAlias = Callable[[Value, Value, Values, Values, Hyper], tuple[Value, Values]]


@dataclass(frozen=True)
class RowOptimizer:
    """Optimizer of touched rows. Rows without a contribution and their state are not changed.

    A value has shape [U, D], or [U, 1] if there is one number per row. Arithmetic is in float32, whatever the dtype of
    the rows, or in float64 for float64 rows.
    """

    name: str
    init: Callable[[Tensor], RowState]
    """Function weight [rows, D] -> state by name. It uses `element_state` and `row_state`."""
    update: Update
    """Function (rows, gradient, state, stats, hyper) -> (new rows, new state). The names of the state do not change."""
    row_stats: tuple[RowStats, ...] = ()
    """Stages (rows, gradient, state, stats, hyper) -> summands by name.

    A summand is added over all columns of the row, including those in other column shards. The sum is stats[name] in
    later stages and in `update`.
    """


def element_state(weight: Tensor, fill: float = 0.0) -> Tensor:
    """Create state with one number per element, [rows, D]: float32, or float64 for float64 rows."""
    return empty(weight.shape, compute_dtype(weight.dtype), weight.device, keep=False).fill_(fill)


def row_state(weight: Tensor, fill: float = 0.0) -> Tensor:
    """Create state with one number per row, [rows]: float32, or float64 for float64 rows."""
    return empty(weight.shape[:1], compute_dtype(weight.dtype), weight.device, keep=False).fill_(fill)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of `dtype` are updated and their state is stored."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def where(condition: Value, chosen: Value, other: Value) -> Value:
    """Return `chosen` if the condition (`a > b` or `a < b`) holds, else `other`. One of the two may be a number.

    Raises MesetaError if the condition has another form, or if both choices are numbers.
    """
    if not isinstance(condition, Tensor):
        if not hasattr(type(condition), "choose"):
            kind = type(condition).__name__
            raise MesetaError(f"where: the condition must be 'a > b' or 'a < b' on values of a row, got {kind}")
        return condition.choose(chosen, other)
    if not isinstance(chosen, Tensor) and not isinstance(other, Tensor):
        raise MesetaError(f"where: one choice must be a value of the row, got the numbers {chosen!r} and {other!r}")
    return torch.where(condition, chosen, other)


def sum_in_blocks(values: Tensor) -> Tensor:
    """Sum each block of 16 columns as a fixed tree: [U, D] -> [U, ceil(D / 16)]."""
    padded = functional.pad(values, (0, -values.shape[1] % COLUMN_BLOCK))
    tree = padded.unflatten(1, (-1, COLUMN_BLOCK))
    while tree.shape[-1] > 1:
        half = tree.shape[-1] // 2
        tree = tree[..., :half] + tree[..., half:]
    return tree.squeeze(-1)


def sum_across_blocks(sums: Tensor) -> Tensor:
    """Add the sums of blocks from left to right: [U, blocks] -> [U]."""
    # With this fixed order, column-wise sharding does not change the result.
    total = sums[:, 0]
    for block in range(1, sums.shape[1]):
        total = total + sums[:, block]
    return total


def broadcast_state(state: RowState) -> Values:
    """Convert stored state to values that broadcast: [rows] becomes [rows, 1]."""
    return {name: tensor[:, None] if tensor.dim() == 1 else tensor for name, tensor in state.items()}


def reference_step(
    optimizer: RowOptimizer, rows: Tensor, gradient: Tensor, state: RowState, hyper: Hyper
) -> tuple[Tensor, RowState]:
    """Return rows and state after an update in plain PyTorch. Arguments are not changed.

    Rows and gradient are [U, D]. The result is float32 (float64 for float64 rows). The caller rounds it to 16 bits.
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
    """Update columns [U, D] with given statistics of their whole rows [U, 1]. Returns rows and state as stored."""
    new_w, new_state = optimizer.update(w, g, broadcast_state(state), stats, hyper)
    stored = {name: _shape_like(new_state[name], like=old) for name, old in state.items()}
    return _shape_like(new_w, like=w), stored


def _shape_like(value: Value, like: Tensor) -> Tensor:
    """Expand a value to the shape of a stored tensor: [U, 1] becomes [U] or [U, D], and a number fills it."""
    if not isinstance(value, Tensor):
        return torch.full_like(like, value)
    return value.squeeze(1) if like.dim() == 1 else value.expand_as(like)
