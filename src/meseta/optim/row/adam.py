"""Adam on touched rows only; bias correction uses the global step."""

from __future__ import annotations

from torch import Tensor

from meseta.ops.row_optimizer import Hyper, RowOptimizer, RowState, Value, Values, element_state
from meseta.spec import OptimizerSpec


def adam(spec: OptimizerSpec) -> RowOptimizer:
    """Adam (arXiv 1412.6980, algorithm 1)."""

    def init(weight: Tensor) -> RowState:
        return {"exp_avg": element_state(weight), "exp_avg_sq": element_state(weight)}

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        first = state["exp_avg"] * spec.beta1 + g * (1 - spec.beta1)
        second = state["exp_avg_sq"] * spec.beta2 + (g * g) * (1 - spec.beta2)
        corrected = (first / (1 - spec.beta1**h.step)) * h.lr
        root = (second / (1 - spec.beta2**h.step)).sqrt()
        return w - corrected / (root + spec.eps), {"exp_avg": first, "exp_avg_sq": second}

    return RowOptimizer(name="adam", init=init, update=update)
