"""Row optimizers that scale steps by the squares of past gradients."""

from __future__ import annotations

from torch import Tensor

from meseta.ops.row_program.optimizer import (
    Hyper,
    RowOptimizer,
    RowState,
    Value,
    Values,
    compute_dtype,
    element_state,
    row_state,
    where,
)
from meseta.spec import OptimizerSpec


def adagrad(spec: OptimizerSpec) -> RowOptimizer:
    """Create Adagrad: sum += g^2; row -= lr * g / (sqrt(sum) + eps). Duchi et al., JMLR 12 (2011), diagonal form."""

    def init(weight: Tensor) -> RowState:
        return {"sum": element_state(weight, spec.initial_accumulator)}

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        total = state["sum"] + g * g
        return w - (g * h.lr) / (total.sqrt() + spec.eps), {"sum": total}

    return RowOptimizer(name="adagrad", init=init, update=update)


def rowwise_adagrad(spec: OptimizerSpec) -> RowOptimizer:
    """Create Adagrad with one accumulator per row (arXiv 2104.05158).

    It adds the mean of g^2 over all columns of the table: sum += mean(g^2); row -= lr * g / (sqrt(sum) + eps).
    """
    # A column shard has only some columns of a row, so the mean is a statistic.

    def init(weight: Tensor) -> RowState:
        return {"sum": row_state(weight, spec.initial_accumulator)}

    def row_stats(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> Values:
        return {"gradient_sq": g * g}

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        total = state["sum"] + stats["gradient_sq"] / h.embedding_dim
        return w - g * (h.lr / (total.sqrt() + spec.eps)), {"sum": total}

    return RowOptimizer(name="rowwise_adagrad", init=init, row_stats=(row_stats,), update=update)


def rmsprop(spec: OptimizerSpec) -> RowOptimizer:
    """Create RMSprop as in torch.optim, not centered (Tieleman and Hinton, Coursera lecture 6.5, 2012)."""
    # mean_sq = alpha * mean_sq + (1 - alpha) * g^2
    # row -= lr * g / (sqrt(mean_sq) + eps)
    # With momentum, velocity = momentum * velocity + g / (sqrt(mean_sq) + eps) replaces the quotient.

    def init(weight: Tensor) -> RowState:
        names = ("mean_sq", "velocity") if spec.momentum else ("mean_sq",)
        return {name: element_state(weight) for name in names}

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        mean_sq = state["mean_sq"] * spec.alpha + (g * g) * (1 - spec.alpha)
        step = g / (mean_sq.sqrt() + spec.eps)
        if not spec.momentum:
            return w - step * h.lr, {"mean_sq": mean_sq}
        velocity = state["velocity"] * spec.momentum + step
        return w - velocity * h.lr, {"mean_sq": mean_sq, "velocity": velocity}

    return RowOptimizer(name="rmsprop", init=init, update=update)


def ftrl(spec: OptimizerSpec) -> RowOptimizer:
    """Create FTRL-Proximal (McMahan et al., KDD 2013, algorithm 1) with z and n per element and alpha = lr.

    A learning-rate schedule scales gradients only. The penalties use the base rate. z starts with the value that
    reproduces the initial row. For rows of zeros, this is the published start.
    """
    # n' = n + g^2
    # z' = z + g - (sqrt(n') - sqrt(n)) / alpha * row
    # row = 0 if |z'| <= l1, else -(z' - sign(z') l1) / ((beta + sqrt(n')) / alpha + l2)
    #
    # The state has alpha * z, with each gradient multiplied by the learning rate of its step. A change of the learning
    # rate thus does not change the current row.
    threshold, offset = spec.lr * spec.l1, spec.beta + spec.lr * spec.l2

    def init(weight: Tensor) -> RowState:
        w, n = weight.to(compute_dtype(weight.dtype)), element_state(weight, spec.initial_accumulator)
        return {"n": n, "z": -(w * (n.sqrt() + offset) + w.sign() * threshold)}

    def update(w: Value, g: Value, state: Values, stats: Values, h: Hyper) -> tuple[Value, Values]:
        n = state["n"] + g * g
        z = state["z"] + g * h.lr - (n.sqrt() - state["n"].sqrt()) * w
        solved = (z.sign() * threshold - z) / (n.sqrt() + offset)
        return where(z.abs() > threshold, solved, 0.0), {"n": n, "z": z}

    return RowOptimizer(name="ftrl", init=init, update=update)
