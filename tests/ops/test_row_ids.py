"""Tests of rows in slots of any order: every optimizer, dtype and implementation gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from meseta.ops import row_update as ops
from meseta.ops.row_program.optimizer import Hyper
from meseta.ops.row_update import reference
from meseta.ops.row_update.call import TableRows, UpdateCall
from meseta.ops.row_update.staged import TouchedRows, stage_block_sums, update_with_stats
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError
from optim.specs import SPECS
from sampling import diagonal, product, sample
from triton_cases import TYPES, check_slots, copied, update_case, updated

LEARNING = [name for name in SPECS if name != "frozen"]
TYPES_AND_EXACT = [*TYPES, torch.float64]


def by_the_operator(call: UpdateCall) -> Sequence[Tensor]:
    call_copy = copied(call)
    torch.ops.meseta.row_update(*(getattr(call_copy, name) for name in UpdateCall.__dataclass_fields__))
    return [*call_copy.tables, *call_copy.states]


def by_the_reference(call: UpdateCall) -> Sequence[Tensor]:
    call_copy = copied(call)
    reference.row_update(call_copy)
    return [*call_copy.tables, *call_copy.states]


@pytest.mark.parametrize("case", diagonal(optimizer=LEARNING, dtype=TYPES_AND_EXACT))
def test_the_core_and_the_reference(case: dict[str, Any]) -> None:
    optimizer, dtype = case["optimizer"], case["dtype"]
    exact = None if dtype == torch.float64 else torch.float32
    call = update_case(make_row_optimizer(SPECS[optimizer]), 4, dims=(16, 40, 5), dtype=dtype)
    if exact is None:
        call = copied(call, dtype=torch.float64)
    check_slots(call, by_the_operator)
    check_slots(call, by_the_reference)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # lanes beyond a row's columns divide nothing by nothing
@pytest.mark.parametrize("case", sample(product(optimizer=LEARNING, dtype=TYPES), 4, seed=4))
def test_the_kernels(case: dict[str, Any]) -> None:
    call = update_case(make_row_optimizer(SPECS[case["optimizer"]]), 7, dims=(5, 20, 16), dtype=case["dtype"])
    check_slots(call, lambda one: updated(one, "cpu"))


@pytest.mark.parametrize("dtype", TYPES_AND_EXACT, ids=str)
@pytest.mark.parametrize("optimizer", [name for name in LEARNING if make_row_optimizer(SPECS[name]).row_stats])
def test_stages(optimizer: str, dtype: torch.dtype) -> None:
    record, generator = make_row_optimizer(SPECS[optimizer]), torch.Generator().manual_seed(2)
    weight, rows = torch.randn(30, 32, generator=generator).to(dtype), torch.tensor([1, 4, 5, 17, 29])
    gradient = torch.randn(5, 32, generator=generator, dtype=torch.float32).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    order = torch.randperm(30, generator=generator)
    results = []
    for row_ids in (None, order):
        of_row = torch.arange(30) if row_ids is None else torch.argsort(row_ids)
        slot_weight = weight.clone() if row_ids is None else weight[row_ids].clone()
        table = TableRows(
            slot_weight, record.init(slot_weight), key=99, first_row=1000, first_column=16, row_ids=row_ids
        )
        slots, by_slot = of_row[rows].sort()
        touched = TouchedRows(table, slots, gradient[by_slot], Hyper(0.1, 3, 64))
        stats = gradient.new_empty(0, 5)
        for stage in range(len(record.row_stats)):
            stats = torch.cat([stats, stage_block_sums(record, stage, touched, stats).sum(-1)])
        update_with_stats(record, touched, stats)
        results.append([slot_weight[of_row], *(state[of_row] for state in table.state.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_row_ids_that_do_not_fit_are_named() -> None:
    call = update_case(make_row_optimizer(SPECS["sgd"]), 4, dims=(16,))
    for row_ids, message in (
        ([torch.arange(3)], r"row ids are torch\.int64 \[3\]; pass contiguous int64"),
        ([torch.arange(len(call.tables[0])).int()], "row ids are torch.int32"),
        ([], "for each table, or for none"),
    ):
        with pytest.raises(MesetaError, match=message):
            ops._cpu(
                *(row_ids if name == "row_ids" else getattr(call, name) for name in UpdateCall.__dataclass_fields__)
            )
