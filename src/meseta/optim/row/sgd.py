"""Row optimizers SGD, LARS and frozen."""

from __future__ import annotations

from torch import Tensor

from meseta.ops.row_program.optimizer import Hyper, RowOptimizer, RowState, Value, Values, element_state, where
from meseta.spec import OptimizerSpec


def sgd(spec: OptimizerSpec) -> RowOptimizer:
    """Create SGD: row -= lr * g, or with velocity = momentum * velocity + g instead of g, as in torch.optim.SGD."""

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        return w - g * h.lr, state

    def update_velocity(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        velocity = state["velocity"] * spec.momentum + g
        return w - velocity * h.lr, {"velocity": velocity}

    if spec.momentum == 0.0:
        return RowOptimizer(name="sgd", init=lambda weight: {}, update=update)
    return RowOptimizer(name="sgd", init=lambda weight: {"velocity": element_state(weight)}, update=update_velocity)


def lars(spec: OptimizerSpec) -> RowOptimizer:
    """Create LARS (arXiv 1708.03888, algorithm 1) with norms of rows instead of layers.

    The rate is 1 if its denominator is 0, or if the row is all zeros, because a zero row could not change otherwise.
    """

    # rate = trust_coefficient * |row| / (|g| + weight_decay * |row|)
    # velocity = momentum * velocity + lr * rate * (g + weight_decay * row)
    # row -= velocity

    def init(weight: Tensor) -> RowState:
        return {"velocity": element_state(weight)} if spec.momentum else {}

    def row_stats(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> Values:
        return {"weight_sq": w * w, "gradient_sq": g * g}

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        weight_norm = stats["weight_sq"].sqrt()
        scale = stats["gradient_sq"].sqrt() + weight_norm * spec.weight_decay
        rate = where(weight_norm > 0.0, where(scale > 0.0, weight_norm * spec.trust_coefficient / scale, 1.0), 1.0)
        decayed = g + w * spec.weight_decay if spec.weight_decay else g
        step = decayed * (rate * h.lr)
        if not spec.momentum:
            return w - step, state
        velocity = state["velocity"] * spec.momentum + step
        return w - velocity, {"velocity": velocity}

    return RowOptimizer(name="lars", init=init, row_stats=(row_stats,), update=update)


def frozen(spec: OptimizerSpec) -> RowOptimizer:
    """Create an optimizer that never changes rows."""
    return RowOptimizer(name="frozen", init=lambda weight: {}, update=lambda w, g, state, stats, h: (w, state))
