"""Adam and LAMB row optimizers, with a second moment per element or per row."""
# Bias correction uses the global step.

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meseta.ops.row_program.optimizer import (
    Hyper,
    RowOptimizer,
    RowState,
    Value,
    Values,
    element_state,
    row_state,
    where,
)
from meseta.spec import OptimizerSpec

SecondMomentInit = Callable[[Tensor], Tensor]


def adam(spec: OptimizerSpec) -> RowOptimizer:
    """Create Adam (arXiv 1412.6980, algorithm 1)."""

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        mean, root, moments = _moments(spec, g, g * g, state, h)
        return w - (mean * h.lr) / (root + spec.eps), moments

    return RowOptimizer(name=spec.name, init=_make_init(element_state), update=update)


def rowwise_adam(spec: OptimizerSpec) -> RowOptimizer:
    """Create Adam with one second moment per row, that of the mean of g^2 over the row."""

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        mean, root, moments = _moments(spec, g, stats["gradient_sq"] / h.embedding_dim, state, h)
        return w - (mean * h.lr) / (root + spec.eps), moments

    return RowOptimizer(name="rowwise_adam", init=_make_init(row_state), row_stats=(_gradient_sq,), update=update)


def lamb(spec: OptimizerSpec) -> RowOptimizer:
    """Create LAMB (arXiv 1904.00962, algorithm 2) with norms of rows instead of layers.

    The ratio of norms is not transformed (phi(x) = x). It is 1 if a norm is 0, as in the authors' code.
    """

    # direction = Adam's mean / (root + eps) + weight_decay * row
    # row -= lr * |row| / |direction| * direction

    def direction(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        mean, root, moments = _moments(spec, g, g * g, state, h)
        return _apply_decay(mean / (root + spec.eps), w, spec), moments

    return RowOptimizer(
        name="lamb",
        init=_make_init(element_state),
        row_stats=(_make_norm_stats(direction),),
        update=_make_scaled_update(direction),
    )


def rowwise_lamb(spec: OptimizerSpec) -> RowOptimizer:
    """Create LAMB with the second moment of `rowwise_adam`."""

    def direction(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        mean, root, moments = _moments(spec, g, stats["gradient_sq"] / h.embedding_dim, state, h)
        return _apply_decay(mean / (root + spec.eps), w, spec), moments

    return RowOptimizer(
        name="rowwise_lamb",
        init=_make_init(row_state),
        row_stats=(_gradient_sq, _make_norm_stats(direction)),
        update=_make_scaled_update(direction),
    )


def _make_init(second_state: SecondMomentInit) -> Callable[[Tensor], RowState]:
    return lambda weight: {"exp_avg": element_state(weight), "exp_avg_sq": second_state(weight)}


def _moments(spec: OptimizerSpec, g: Value, square: Value, state: Values, h: Hyper) -> tuple[Value, Value, Values]:
    """Return bias-corrected (first moment, root of second moment), and the new state."""
    first = state["exp_avg"] * spec.beta1 + g * (1 - spec.beta1)
    second = state["exp_avg_sq"] * spec.beta2 + square * (1 - spec.beta2)
    mean = first / (1 - spec.beta1**h.step)
    root = (second / (1 - spec.beta2**h.step)).sqrt()
    return mean, root, {"exp_avg": first, "exp_avg_sq": second}


def _apply_decay(direction: Value, w: Value, spec: OptimizerSpec) -> Value:
    return direction + w * spec.weight_decay if spec.weight_decay else direction


def _gradient_sq(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> Values:
    return {"gradient_sq": g * g}


DirectionFunction = Callable[[Value, Value, Values, Values, Hyper], tuple[Value, Values]]


def _make_norm_stats(direction: DirectionFunction) -> Callable[[Value, Value, Values, Values, Hyper], Values]:
    def row_stats(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> Values:
        along, _ = direction(w, g, state, stats, h)
        return {"weight_sq": w * w, "direction_sq": along * along}

    return row_stats


def _make_scaled_update(direction: DirectionFunction) -> DirectionFunction:
    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        along, moments = direction(w, g, state, stats, h)
        quotient = stats["weight_sq"].sqrt() / stats["direction_sq"].sqrt()
        rate = where(stats["weight_sq"] > 0.0, where(stats["direction_sq"] > 0.0, quotient, 1.0), 1.0)
        return w - along * (rate * h.lr), moments

    return update
