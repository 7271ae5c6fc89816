"""Gradient descent."""

from __future__ import annotations

from meseta.ops.row_optimizer import Hyper, RowOptimizer, Value, Values
from meseta.spec import OptimizerSpec


def sgd(spec: OptimizerSpec) -> RowOptimizer:
    """row -= lr * g."""

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        return w - g * h.lr, state

    return RowOptimizer(name="sgd", init=lambda weight: {}, update=update)
