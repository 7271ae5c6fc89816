"""Tests of `found_inf`, which suppresses an update, for every optimizer, dtype and implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meseta.ops.row_program.optimizer import Hyper
from meseta.ops.row_update import reference
from meseta.ops.row_update.call import ApplyCall, TableRows, UpdateCall
from meseta.ops.row_update.staged import TouchedRows, stage_block_sums, update_with_stats
from meseta.optim import make_row_optimizer
from optim.specs import SPECS
from sampling import diagonal, product, sample
from triton_cases import TYPES, check_found_inf, copied, update_case

NUMBERS = (None, 0.0, 1.0, torch.nan)
TYPES_AND_EXACT = [*TYPES, torch.float64]
LEARNING = [name for name in SPECS if name != "frozen"]


def flag(number: float | None) -> Tensor | None:
    return None if number is None else torch.tensor(number)


def check(run: Callable[[float | None], Sequence[Tensor]], before: Sequence[Tensor]) -> None:
    """Check rows and states returned by `run`: `None` and 0 give the same update, other numbers leave `before`
    unchanged."""
    plain, zero, one, nan = (run(number) for number in NUMBERS)
    assert all(torch.equal(a, b) for a, b in zip(plain, zero, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, before, strict=True))
    for stood in (one, nan):
        assert all(torch.equal(a, b) for a, b in zip(stood, before, strict=True))


@pytest.mark.parametrize("case", diagonal(optimizer=LEARNING, dtype=TYPES_AND_EXACT))
def test_the_fused_update(case: dict[str, Any]) -> None:
    """Covers the operator (compiled and in plain torch) and the reference, neither of which synchronizes with the
    host."""
    dtype = case["dtype"]
    call = update_case(make_row_optimizer(SPECS[case["optimizer"]]), 5, dims=(20,), dtype=dtype)
    if dtype == torch.float64:
        call = copied(call, dtype=torch.float64)
    for update in (operator, reference.row_update):

        def run(number: float | None, update: Callable[[UpdateCall], None] = update) -> Sequence[Tensor]:
            call_copy = replace(copied(call), found_inf=flag(number))
            update(call_copy)
            return (*call_copy.tables, *call_copy.states)

        check(run, (*call.tables, *call.states))


def operator(call: UpdateCall) -> None:
    torch.ops.meseta.row_update(*vars(call).values())


STAGED = [name for name in SPECS if make_row_optimizer(SPECS[name]).row_stats]


@pytest.mark.parametrize("case", diagonal(optimizer=STAGED, dtype=TYPES_AND_EXACT))
def test_the_update_in_stages(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers the operator and its replacement on a GPU."""
    made, dtype = make_row_optimizer(SPECS[case["optimizer"]]), case["dtype"]
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(9, 32, generator=generator, dtype=torch.float64).to(dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    state = {name: torch.rand(value.shape, generator=generator).to(exact) for name, value in made.init(weight).items()}
    gradient = torch.randn(4, 32, generator=generator).to(exact)

    def run(number: float | None) -> Sequence[Tensor]:
        table = TableRows(weight.clone(), {name: value.clone() for name, value in state.items()}, key=5)
        touched = TouchedRows(table, torch.tensor([0, 3, 4, 8]), gradient, Hyper(0.1, 3, 32))
        stats = gradient.new_empty(0, 4)
        for stage in range(len(made.row_stats)):
            stats = torch.cat([stats, stage_block_sums(made, stage, touched, stats).sum(2)])
        update_with_stats(made, touched, stats, flag(number))
        return (table.weight, *table.state.values())

    check(run, (weight, *state.values()))
    plain: Any = lambda *arguments: reference.row_apply(ApplyCall(*arguments))  # noqa: E731
    monkeypatch.setattr("meseta.ops.row_update.staged._operator", plain)
    check(run, (weight, *state.values()))


KERNELS = product(optimizer=LEARNING, dtype=TYPES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here: see tests/gpu")
@pytest.mark.parametrize("case", sample(KERNELS, 5, seed=2))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_kernels_under_the_interpreter(case: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    optimizer = make_row_optimizer(SPECS[case["optimizer"]])
    check_found_inf(update_case(optimizer, 6, dims=(5,), dtype=case["dtype"]), "cpu")
