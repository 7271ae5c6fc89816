"""Tests of the fused update against its reference, a dense gradient in torch, and numpy in float64."""

from __future__ import annotations

import runpy
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meseta.ops.row_program.lowering import UNUSED, RowCode
from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_program.program import trace
from meseta.ops.row_program.symbols import Op
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, reference, row_update
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, OptimizerSpec
from sampling import diagonal
from source_tree import ROOT

OPTIMIZERS = {
    name: OptimizerSpec(name=name, lr=0.1)
    for name in ("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb", "rowwise_lamb", "lars", "ftrl")
}
OPTIMIZERS |= {
    "rmsprop": OptimizerSpec(name="rmsprop", lr=0.1),
    "momentum": OptimizerSpec(name="sgd", lr=0.1, momentum=0.9),
    "adamw": OptimizerSpec(name="adamw", lr=0.1, weight_decay=0.1),
    "decay": OptimizerSpec(name="rowwise_adagrad", lr=0.1, weight_decay=0.1),
    "clipped": OptimizerSpec(name="rowwise_adam", lr=0.1, weight_decay=0.1, clip_norm=0.5),
}
TYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Problem:
    """Arguments of row_update."""

    optimizer: RowOptimizer
    tables: list[TableRows]
    features: list[FeatureGradient]
    bags: Bags
    gradients: list[Tensor]

    def run(self) -> list[Tensor]:
        """Return updated copies of all rows and states, and leave the problem unchanged."""
        tables = [
            replace(t, weight=t.weight.clone(), state={name: s.clone() for name, s in t.state.items()})
            for t in self.tables
        ]
        dims = tuple(table.weight.shape[1] for table in tables)
        group = UpdateGroup(self.optimizer, tuple(tables), dims, tuple(self.features))
        row_update(group, 0.1, 3, self.bags, self.gradients)
        return [tensor for t in tables for tensor in (t.weight, *t.state.values())]

    def as_float64(self) -> Problem:
        tables = [
            replace(t, weight=t.weight.double(), state={n: s.double() for n, s in t.state.items()}) for t in self.tables
        ]
        return replace(self, tables=tables, gradients=[g.double() for g in self.gradients])


def make_problem(
    seed: int,
    optimizer: str = "rowwise_adagrad",
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, ...] = (16, 40),
    num_samples: int = 9,
    kinds: str = "pwn",
    max_length: int = 6,
) -> Problem:
    """Return a problem with two features per table, each 'p'ooled, 'w'eighted or 'n'ot pooled. About a third of the
    bags are empty."""
    random = np.random.default_rng(seed)
    record = make_row_optimizer(OPTIMIZERS[optimizer])
    tables, features, ids, lengths, gradients = [], [], [], [], []
    column = 0
    width = 2 * sum(dims)
    for t, dim in enumerate(dims):
        weight = torch.from_numpy(random.normal(size=(int(random.integers(1, 30)), dim))).to(dtype)
        state = {n: s + torch.from_numpy(random.random(s.shape)).to(s) for n, s in record.init(weight).items()}
        tables.append(TableRows(weight=weight, state=state, key=int(random.integers(2**63))))
        for k in range(2):
            position = 2 * t + k
            length = random.integers(0, max_length + 1, num_samples) * random.integers(0, 2, num_samples)
            lengths.append(length)
            ids.append(random.integers(0, weight.shape[0], length.sum()))
            kind = kinds[int(random.integers(len(kinds)))]
            if kind == "n":
                gradients.append(torch.from_numpy(random.normal(size=(length.sum(), dim))).float())
                features.append(FeatureGradient(position, t, len(gradients), per_id=True))
            else:
                features.append(FeatureGradient(position, t, 0, column, weighted=kind == "w"))
                column += dim
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64))
    values = torch.from_numpy(np.concatenate(ids).astype(np.int64))
    pooled = torch.from_numpy(random.normal(size=(num_samples, width))).float()
    weights = torch.from_numpy(random.normal(size=values.numel())).float()
    return Problem(record, tables, features, Bags(values, offsets, num_samples, weights), [pooled, *gradients])


def step_sgd(table: TableRows, bags: Bags, gradient: Tensor, lr: float = 0.1) -> None:
    """Take an SGD step of one table with one feature."""
    sgd = make_row_optimizer(OptimizerSpec(name="sgd"))
    group = UpdateGroup(sgd, (table,), (table.weight.shape[1],), (FeatureGradient(0, 0, 0),))
    row_update(group, lr, 1, bags, [gradient])


def by_reference(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Run the problem by the reference for any dtype of rows."""
    with monkeypatch.context() as patch:
        patch.setattr("meseta.ops.row_update.DTYPE_CODES", {})
        return problem.run()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", diagonal(optimizer=[*OPTIMIZERS], dtype=TYPES, seed=[0, 1]))
def test_the_core_has_the_bits_of_the_reference(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(**case, dims=(16, 1, 40, 128, 150, 5, 10, 12))
    assert same(problem.run(), by_reference(problem, monkeypatch))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_that_were_compiled_have_the_bits_of_those_that_are_interpreted(
    optimizer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(2, optimizer, dtype, dims=(16, 7, 64, 2064))
    compiled, code = problem.run(), trace(problem.optimizer).fused_update
    # An additional load of an unused value gives a program that is not compiled into the core.
    load = torch.tensor([[Op.LOAD_WEIGHT, code.num_element_registers, UNUSED, UNUSED, UNUSED]], dtype=torch.int32)
    longer = replace(trace(problem.optimizer), fused_update=RowCode(torch.cat([load, code.instructions]), 0, 0))
    monkeypatch.setattr("meseta.ops.row_update.call.trace", lambda _: longer)
    assert same(problem.run(), compiled)


def test_the_compiled_programs_are_those_of_the_optimizers() -> None:
    """After a failure run `python tools/fused_programs.py > src/meseta/ops/row_update/programs.h`."""
    made = StringIO()
    with redirect_stdout(made):
        runpy.run_path(str(ROOT / "tools" / "fused_programs.py"), run_name="__main__")
    assert made.getvalue() == (ROOT / "src/meseta/ops/row_update/programs.h").read_text()


@given(
    seed=st.integers(0, 2**32),
    dims=st.lists(st.sampled_from([1, 3, 6, 10, 12, 16, 20, 33, 130]), min_size=1, max_size=3).map(tuple),
    num_samples=st.integers(0, 9),
    dtype=st.sampled_from(TYPES),
    kinds=st.sampled_from(["p", "w", "n", "pwn"]),
)
def test_ragged_batches_against_float64(
    seed: int, dims: tuple[int, ...], num_samples: int, dtype: torch.dtype, kinds: str
) -> None:
    problem = make_problem(seed, "rowwise_adagrad", torch.float32, dims, num_samples, kinds)
    got, exact = problem.run(), problem.as_float64().run()
    for result, true in zip(got, exact, strict=True):
        torch.testing.assert_close(result.double(), true, rtol=1e-5, atol=1e-5)


def test_sgd_equals_a_dense_gradient_in_torch() -> None:
    problem = make_problem(3, "sgd", dims=(20,), kinds="pw").as_float64()
    weight = problem.tables[0].weight.clone().requires_grad_()
    bags = problem.bags
    loss: Any = 0.0
    for f, feature in enumerate(problem.features):
        for b in range(bags.num_samples):
            start, stop = bags.offsets[f * bags.num_samples + b : f * bags.num_samples + b + 2].tolist()
            rows = weight[bags.ids[start:stop]]
            if feature.weighted:
                assert bags.weights is not None
                rows = rows * bags.weights[start:stop, None].double()
            loss = loss + (rows.sum(0) * problem.gradients[0][b, feature.column : feature.column + 20]).sum()
    loss.backward()
    assert weight.grad is not None
    torch.testing.assert_close(problem.run()[0], problem.tables[0].weight - 0.1 * weight.grad)


def test_contributions_are_summed_in_blocks_of_256_samples() -> None:
    # 1 + 2^-24 is 1 in float32: the order shows in the result. Two blocks: (1, then 255 tiny ones), (256 tiny ones).
    tiny = 2.0**-24
    gradient = torch.full((512, 1), tiny)
    gradient[0] = 1.0
    table = TableRows(weight=torch.zeros(1, 1), state={})
    step_sgd(table, Bags(torch.zeros(512, dtype=torch.int64), torch.arange(513), 512), gradient, lr=1.0)
    assert table.weight.item() == -(1.0 + 256 * tiny)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_threads_and_id_types_do_not_change_a_bit(dtype: torch.dtype) -> None:
    problem = make_problem(5, dtype=dtype, dims=(16, 64), num_samples=3000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = problem.run()
        torch.set_num_threads(3)
        assert same(one, problem.run())
        assert same(one, replace(problem, bags=replace(problem.bags, ids=problem.bags.ids.int())).run())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_stochastic_rounding_gives_a_neighbour_and_the_mean(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-28, 14, (64,), generator=generator)
    values = torch.rand(64, generator=generator).mul_(2.0).sub_(1.0) * 2.0**exponents
    num_draws = 4096
    rows = torch.arange(num_draws)
    rounded = reference.round_rows(values.expand(num_draws, 64), dtype, rows, 0, 7, 1).float()
    below = values.to(dtype).float()
    step = torch.where(below > values, -1.0, 1.0).to(dtype)
    toward = torch.nextafter(below.to(dtype), torch.full((64,), torch.inf, dtype=dtype) * step).float()
    low, high = torch.minimum(below, toward), torch.maximum(below, toward)
    assert ((rounded >= low) & (rounded <= high)).all()
    # The mean of draws between two neighbours, one `gap` apart, strays less than 4 gap / (2 sqrt(draws)).
    assert ((rounded.double().mean(0) - values).abs() <= 4 * (high - low) / (2 * num_draws**0.5)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_special_values_survive_rounding(dtype: torch.dtype) -> None:
    special = torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -2.5, 2.0**-24]])
    table = TableRows(weight=special.to(dtype), state={})
    step_sgd(table, Bags(torch.tensor([0]), torch.tensor([0, 1]), 1), torch.zeros(1, 8))
    torch.testing.assert_close(table.weight, special.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [-1, 5, 2**40, -(2**63)])
def test_an_id_outside_is_refused(bad: int) -> None:
    table = TableRows(weight=torch.zeros(5, 4), state={})
    with pytest.raises(MesetaError, match=r"outside 0\.\.4"):
        step_sgd(table, Bags(torch.tensor([bad]), torch.tensor([0, 1]), 1), torch.ones(1, 4))
    assert not table.weight.any()


@pytest.mark.parametrize("offsets", [[0, 2], [0, -1], [2, 1], [-5, 1]])
def test_offsets_that_leave_the_ids_are_refused(offsets: list[int]) -> None:
    table = TableRows(weight=torch.zeros(5, 4), state={})
    with pytest.raises(MesetaError, match="offsets"):
        step_sgd(table, Bags(torch.tensor([0]), torch.tensor(offsets), 1), torch.ones(1, 4))
