"""Adagrad, with an accumulator per element and with one per row."""

from __future__ import annotations

from torch import Tensor

from meseta.ops.row_optimizer import Hyper, RowOptimizer, RowState, Value, Values, element_state, row_state
from meseta.spec import OptimizerSpec


def adagrad(spec: OptimizerSpec) -> RowOptimizer:
    """sum += g^2; row -= lr * g / (sqrt(sum) + eps). Duchi et al., JMLR 12 (2011), diagonal form."""

    def init(weight: Tensor) -> RowState:
        return {"sum": element_state(weight, spec.initial_accumulator)}

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        total = state["sum"] + g * g
        return w - (g * h.lr) / (total.sqrt() + spec.eps), {"sum": total}

    return RowOptimizer(name="adagrad", init=init, update=update)


def rowwise_adagrad(spec: OptimizerSpec) -> RowOptimizer:
    """sum += mean over the row of g^2; row -= lr * g / (sqrt(sum) + eps): one accumulator per row (arXiv 2104.05158).

    The mean is over the columns of the whole table, which a column shard holds only a part of.
    """

    def init(weight: Tensor) -> RowState:
        return {"sum": row_state(weight, spec.initial_accumulator)}

    def row_stats(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> Values:
        return {"gradient_sq": g * g}

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        total = state["sum"] + stats["gradient_sq"] / h.embedding_dim
        return w - (g * h.lr) / (total.sqrt() + spec.eps), {"sum": total}

    return RowOptimizer(name="rowwise_adagrad", init=init, row_stats=(row_stats,), update=update)
