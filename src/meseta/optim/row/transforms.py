"""Transforms of row optimizers: gradient clipping, weight decay and L1 penalty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meseta.ops.row_program.optimizer import Hyper, RowOptimizer, RowStats, Value, Values

NORM_EPSILON = 1e-6
"""Added to a norm before division, as in torch.nn.utils.clip_grad_norm_."""


def clip_value(optimizer: RowOptimizer, limit: float) -> RowOptimizer:
    """Clip every element of the gradient to -limit..limit."""
    return _transform_gradient(optimizer, lambda w, g, stats: g.clamp(min=-limit, max=limit))


def clip_norm(optimizer: RowOptimizer, limit: float) -> RowOptimizer:
    """Clip the norm of the gradient of each row to `limit`."""

    def squares(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> Values:
        return {"unclipped_sq": g * g}

    def clipped(w: Value, g: Value, stats: Values) -> Value:
        return g * (limit / (stats["unclipped_sq"].sqrt() + NORM_EPSILON)).clamp(max=1.0)

    changed = _transform_gradient(optimizer, clipped)
    return replace(changed, row_stats=(squares, *changed.row_stats))


def coupled_decay(optimizer: RowOptimizer, weight_decay: float) -> RowOptimizer:
    """Add weight_decay * row to the gradient, the gradient of weight_decay / 2 * |row|^2."""
    return _transform_gradient(optimizer, lambda w, g, stats: g + w * weight_decay)


def l1_penalty(optimizer: RowOptimizer, l1: float) -> RowOptimizer:
    """Add l1 * sign(row) to the gradient, a subgradient of l1 * sum(|row|). It is 0 for elements that are 0."""
    return _transform_gradient(optimizer, lambda w, g, stats: g + w.sign() * l1)


def decoupled_decay(optimizer: RowOptimizer, weight_decay: float) -> RowOptimizer:
    """Subtract lr * weight_decay * row before the step (arXiv 1711.05101, algorithm 2)."""

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        return optimizer.update(w - w * (h.lr * weight_decay), g, state, stats, h)

    return replace(optimizer, update=update)


def _transform_gradient(optimizer: RowOptimizer, change: Callable[[Value, Value, Values], Value]) -> RowOptimizer:
    """Replace the gradient of an optimizer by `change(rows, gradient, stats)`."""

    def changed(stage: RowStats) -> RowStats:
        return lambda w, g, state, stats, h: stage(w, change(w, g, stats), state, stats, h)

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        return optimizer.update(w, change(w, g, stats), state, stats, h)

    return replace(optimizer, row_stats=tuple(map(changed, optimizer.row_stats)), update=update)
