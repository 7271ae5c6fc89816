"""Tests of the probe that detects optimizers whose state can be initialized row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meseta.ops.row_program.optimizer import RowState
from meseta.optim import RowOptimizer, element_state, make_row_optimizer, row_state
from meseta.spec import MesetaError, OptimizerSpec, TableSpec
from meseta.storage.tiered import check_row_init
from optim.specs import every


def table(dim: int = 20, dtype: str = "float32") -> TableSpec:
    return TableSpec(name="users", num_embeddings=1000, embedding_dim=dim, dtype=dtype)


def own(init: Callable[[Tensor], RowState]) -> RowOptimizer:
    return RowOptimizer(name="mine:make", init=init, update=lambda w, g, state, stats, h: (w, state))


@every
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_rows_of_the_optimizers_are_independent(spec: OptimizerSpec, dtype: str) -> None:
    check_row_init(table(7, dtype), make_row_optimizer(spec))


@pytest.mark.parametrize("dim", [1, 16])
def test_a_state_may_follow_from_its_row(dim: int) -> None:
    norms = own(
        lambda weight: {
            "norm": weight.float().norm(dim=1),
            "first": weight.float() * 0.5,
            "nan": torch.full_like(weight, torch.nan),
        }
    )
    check_row_init(table(dim), norms)


BAD_INITS: dict[str, Callable[[Tensor], RowState]] = {
    "mean of all rows": lambda weight: {"s": row_state(weight) + weight.mean()},
    "number of rows": lambda weight: {"s": element_state(weight, 1 / len(weight))},
    "number of the row": lambda weight: {"s": torch.arange(len(weight)).float()},
    "random": lambda weight: {"s": torch.rand_like(weight)},
    "largest row": lambda weight: {"s": (weight.abs().sum(1) == weight.abs().sum(1).max()).float()},
    "one for all": lambda weight: {"s": torch.zeros(1)},
    "other columns": lambda weight: {"s": torch.zeros(len(weight), 1 + (len(weight) > 1))},
    "other type": lambda weight: {
        "s": torch.zeros(len(weight)).to(torch.float64 if len(weight) == 1 else torch.float32)
    },
    "other names": lambda weight: {"s": row_state(weight)} if len(weight) > 1 else {},
}


@pytest.mark.parametrize("init", BAD_INITS.values(), ids=BAD_INITS.keys())
def test_an_init_that_looks_at_several_rows_is_refused(init: Callable[[Tensor], RowState]) -> None:
    message = r"table 'users': .* `init` of optimizer 'mine:make' the state of a row depends on other rows; .* in 'hbm'"
    with pytest.raises(MesetaError, match=message):
        check_row_init(table(), own(init))
