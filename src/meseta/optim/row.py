"""The row optimizers.

Every product is rounded before it is added: a fused multiply-add in one place only (the tail of a vector loop, another
shard's column) would cost the contract's equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from meseta.ops.row_optimizer import Hyper, RowOptimizer, RowState
from meseta.spec import COLUMN_BLOCK, OptimizerSpec


def make_row_optimizer(spec: OptimizerSpec, embedding_dim: int) -> RowOptimizer:
    """The record for a spec, for rows of `embedding_dim` columns (of the whole table, whatever a shard holds)."""
    if spec.name == "rowwise_adagrad":
        return rowwise_adagrad(spec, embedding_dim)
    return {"sgd": sgd, "adagrad": adagrad, "adam": adam}[spec.name](spec)


def sgd(spec: OptimizerSpec) -> RowOptimizer:
    """row -= lr * g."""

    def update(rows: Tensor, g: Tensor, state: RowState, _: Tensor | None, hyper: Hyper) -> tuple[Tensor, RowState]:
        return rows - g * hyper.lr, state

    return RowOptimizer(name="sgd", init=lambda weight: {}, update=update)


def adagrad(spec: OptimizerSpec) -> RowOptimizer:
    """sum += g^2; row -= lr * g / (sqrt(sum) + eps). Duchi et al., JMLR 12 (2011), diagonal form."""

    def init(weight: Tensor) -> RowState:
        return {"sum": torch.full_like(weight, spec.initial_accumulator)}

    def update(rows: Tensor, g: Tensor, state: RowState, _: Tensor | None, hyper: Hyper) -> tuple[Tensor, RowState]:
        total = state["sum"] + g * g
        return rows - (g * hyper.lr) / (total.sqrt() + spec.eps), {"sum": total}

    return RowOptimizer(name="adagrad", init=init, update=update)


def rowwise_adagrad(spec: OptimizerSpec, embedding_dim: int) -> RowOptimizer:
    """sum += mean over the row of g^2; row -= lr * g / (sqrt(sum) + eps): one accumulator per row (arXiv 2104.05158).

    The mean is over the columns of the whole table, which a column shard holds only a part of.
    """

    def init(weight: Tensor) -> RowState:
        return {"sum": weight.new_full((weight.shape[0],), spec.initial_accumulator)}

    def row_stats(g: Tensor) -> Tensor:
        return block_sums(g * g)

    def update(
        rows: Tensor, g: Tensor, state: RowState, sum_sq: Tensor | None, hyper: Hyper
    ) -> tuple[Tensor, RowState]:
        assert sum_sq is not None
        total = state["sum"] + sum_sq / embedding_dim
        return rows - (g * hyper.lr) / (total.sqrt() + spec.eps)[:, None], {"sum": total}

    return RowOptimizer(name="rowwise_adagrad", init=init, row_stats=row_stats, update=update)


def adam(spec: OptimizerSpec) -> RowOptimizer:
    """Adam (arXiv 1412.6980, algorithm 1) on touched rows only; bias correction uses the global step."""

    def init(weight: Tensor) -> RowState:
        return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def update(rows: Tensor, g: Tensor, state: RowState, _: Tensor | None, hyper: Hyper) -> tuple[Tensor, RowState]:
        first = state["exp_avg"] * spec.beta1 + g * (1 - spec.beta1)
        second = state["exp_avg_sq"] * spec.beta2 + (g * g) * (1 - spec.beta2)
        corrected = (first / (1 - spec.beta1**hyper.step)) * hyper.lr
        root = (second / (1 - spec.beta2**hyper.step)).sqrt()
        return rows - corrected / (root + spec.eps), {"exp_avg": first, "exp_avg_sq": second}

    return RowOptimizer(name="adam", init=init, update=update)


def block_sums(values: Tensor) -> Tensor:
    """[U, D] -> [U, ceil(D / 16)]: each block of 16 columns added as a fixed tree, whatever the shard's width."""
    padded = functional.pad(values, (0, -values.shape[1] % COLUMN_BLOCK))
    tree = padded.unflatten(1, (-1, COLUMN_BLOCK))
    while tree.shape[-1] > 1:
        half = tree.shape[-1] // 2
        tree = tree[..., :half] + tree[..., half:]
    return tree.squeeze(-1)
