"""Row optimizers: against torch.optim on dense gradients, a closed form, and properties that all of them share."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from meseta.ops.row_optimizer import (
    Hyper,
    RowState,
    Values,
    apply_update,
    as_values,
    block_sums,
    reference_step,
    sum_blocks,
)
from meseta.optim import make_row_optimizer
from meseta.spec import COLUMN_BLOCK, OptimizerSpec

DIM = 20

# One table of all row optimizers; every test below that takes `spec` runs on each.
SPECS = {
    "sgd": OptimizerSpec(name="sgd", lr=0.1),
    "adagrad": OptimizerSpec(name="adagrad", lr=0.1, eps=1e-6, initial_accumulator=0.2),
    "adagrad-from-zero": OptimizerSpec(name="adagrad", lr=0.1),
    "rowwise_adagrad": OptimizerSpec(name="rowwise_adagrad", lr=0.1, eps=1e-6, initial_accumulator=0.2),
    "rowwise_adagrad-from-zero": OptimizerSpec(name="rowwise_adagrad", lr=0.1),
    "adam": OptimizerSpec(name="adam", lr=0.1, eps=1e-6, beta1=0.8, beta2=0.95),
}
STATE = {
    "sgd": {},
    "adagrad": {"sum": (6, DIM)},
    "rowwise_adagrad": {"sum": (6,)},
    "adam": {"exp_avg": (6, DIM), "exp_avg_sq": (6, DIM)},
}
every = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_the_table_is_complete() -> None:
    from typing import get_args

    from meseta.spec.tables import OptimizerName

    assert {spec.name for spec in SPECS.values()} == set(STATE) == set(get_args(OptimizerName))


def torch_optimizer(spec: OptimizerSpec, parameter: nn.Parameter) -> torch.optim.Optimizer:
    if spec.name == "sgd":
        return torch.optim.SGD([parameter], lr=spec.lr)
    if spec.name == "adagrad":
        return torch.optim.Adagrad(
            [parameter], lr=spec.lr, eps=spec.eps, initial_accumulator_value=spec.initial_accumulator
        )
    return torch.optim.Adam([parameter], lr=spec.lr, eps=spec.eps, betas=(spec.beta1, spec.beta2))


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.name != "rowwise_adagrad"])
def test_equals_torch_where_every_row_is_touched(name: str) -> None:
    spec = SPECS[name]
    parameter = nn.Parameter(draw(6, DIM))
    theirs = torch_optimizer(spec, parameter)
    ours = make_row_optimizer(spec)
    rows = parameter.detach().clone()
    state = ours.init(rows)
    for k in range(1, 101):
        # Schedules change the rate from step to step.
        lr = spec.lr * (1 + k % 3)
        g = draw(6, DIM, seed=k)
        theirs.param_groups[0]["lr"] = lr
        parameter.grad = g.clone()
        theirs.step()
        rows, state = reference_step(ours, rows, g, state, Hyper(lr=lr, step=k, embedding_dim=DIM))
        torch.testing.assert_close(rows, parameter.detach(), rtol=0.0, atol=1e-12)


def test_rowwise_adagrad_closed_form() -> None:
    # Row r has the constant gradient c_r: after k steps the accumulator is a + k c_r^2, and the row has moved by
    # the sum of lr c_r / (sqrt(a + j c_r^2) + eps) over j = 1..k.
    spec = SPECS["rowwise_adagrad"]
    ours = make_row_optimizer(spec)
    c = draw(6)
    rows = torch.zeros(6, DIM, dtype=torch.float64)
    state = ours.init(rows)
    moved = torch.zeros(6, dtype=torch.float64)
    for k in range(1, 51):
        rows, state = reference_step(
            ours, rows, c[:, None].expand(6, DIM), state, Hyper(lr=spec.lr, step=k, embedding_dim=DIM)
        )
        total = spec.initial_accumulator + k * c**2
        moved += spec.lr * c / (total.sqrt() + spec.eps)
        torch.testing.assert_close(state["sum"], total, rtol=0.0, atol=1e-12)
        torch.testing.assert_close(rows, -moved[:, None].expand(6, DIM), rtol=0.0, atol=1e-12)


def test_rowwise_adagrad_is_adagrad_on_the_root_mean_square() -> None:
    # The accumulator is the one of Adagrad on a single number per row, the root of the mean square.
    spec = SPECS["rowwise_adagrad"]
    ours, rows = make_row_optimizer(spec), draw(6, DIM)
    state = ours.init(rows)
    single = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    theirs = torch_optimizer(OptimizerSpec(name="adagrad", lr=0.1, eps=1e-6, initial_accumulator=0.2), single)
    for k in range(1, 31):
        g = draw(6, DIM, seed=k)
        before, moved = rows.clone(), single.detach().clone()
        rows, state = reference_step(ours, rows, g, state, Hyper(lr=spec.lr, step=k, embedding_dim=DIM))
        single.grad = (g * g).mean(1).sqrt()
        theirs.step()
        rate = (moved - single.detach()) / single.grad
        torch.testing.assert_close(before - rows, g * rate[:, None], rtol=1e-10, atol=1e-12)


@every
def test_state_has_the_documented_shape(spec: OptimizerSpec) -> None:
    for dtype in (torch.float32, torch.float64):
        state = make_row_optimizer(spec).init(torch.zeros(6, DIM, dtype=dtype))
        assert {name: tuple(value.shape) for name, value in state.items()} == STATE[spec.name]
        start = spec.initial_accumulator if "adagrad" in spec.name else 0.0
        assert all(value.dtype == dtype and (value == start).all() for value in state.values())


@every
def test_update_is_pure(spec: OptimizerSpec) -> None:
    ours, rows, g = make_row_optimizer(spec), draw(6, DIM), draw(6, DIM, seed=1)
    state = ours.init(rows)
    before = [t.clone() for t in (rows, g, *state.values())]
    reference_step(ours, rows, g, state, Hyper(lr=0.1, step=1, embedding_dim=DIM))
    assert all(torch.equal(a, b) for a, b in zip(before, (rows, g, *state.values()), strict=True))


@every
def test_a_row_learns_from_its_own_gradient_alone(spec: OptimizerSpec) -> None:
    # What makes lazy updates exact: any subset of the rows gives the bits of the whole.
    ours, rows, g = make_row_optimizer(spec), draw(6, DIM), draw(6, DIM, seed=1)
    state = ours.init(rows)
    hyper = Hyper(lr=0.1, step=3, embedding_dim=DIM)
    whole, whole_state = reference_step(ours, rows, g, state, hyper)
    some = torch.tensor([4, 1])
    part, part_state = reference_step(ours, rows[some], g[some], {n: s[some] for n, s in state.items()}, hyper)
    assert torch.equal(part, whole[some])
    assert all(torch.equal(part_state[name], whole_state[name][some]) for name in state)


@every
def test_no_learning_rate_no_move(spec: OptimizerSpec) -> None:
    ours, rows = make_row_optimizer(spec), draw(6, DIM)
    moved, _ = reference_step(
        ours, rows, draw(6, DIM, seed=1), ours.init(rows), Hyper(lr=0.0, step=1, embedding_dim=DIM)
    )
    assert torch.equal(moved, rows)


@every
def test_first_step_goes_downhill(spec: OptimizerSpec) -> None:
    ours, rows, g = make_row_optimizer(spec), draw(6, DIM), draw(6, DIM, seed=1)
    moved, _ = reference_step(ours, rows, g, ours.init(rows), Hyper(lr=0.1, step=1, embedding_dim=DIM))
    assert ((rows - moved) * g > 0).all()


@every
def test_a_touched_row_with_no_gradient_stays_finite(spec: OptimizerSpec) -> None:
    ours, rows = make_row_optimizer(spec), draw(6, DIM, dtype=torch.float32)
    moved, state = reference_step(
        ours, rows, torch.zeros_like(rows), ours.init(rows), Hyper(lr=0.1, step=1, embedding_dim=DIM)
    )
    assert torch.equal(moved, rows) and all(value.isfinite().all() for value in state.values())


@every
def test_float32_is_the_float64_path_to_rounding(spec: OptimizerSpec) -> None:
    ours = make_row_optimizer(spec)
    rows64 = draw(6, DIM)
    rows32 = rows64.float()
    state64, state32 = ours.init(rows64), ours.init(rows32)
    for k in range(1, 11):
        g = draw(6, DIM, seed=k).float()
        rows64, state64 = reference_step(ours, rows64, g.double(), state64, Hyper(lr=0.01, step=k, embedding_dim=DIM))
        rows32, state32 = reference_step(ours, rows32, g, state32, Hyper(lr=0.01, step=k, embedding_dim=DIM))
    assert rows32.dtype == torch.float32 and all(value.dtype == torch.float32 for value in state32.values())
    torch.testing.assert_close(rows32.double(), rows64, rtol=0.0, atol=1e-5)


def columns(value: Tensor, start: int, stop: int) -> Tensor:
    """A shard's columns; what a row has one of is in every shard."""
    return value[:, start:stop].contiguous() if value.dim() == 2 else value


def column_spans(dim: int) -> list[tuple[int, int]]:
    """Blocks of 16 columns, the last one as wide as what is left."""
    return [(start, min(start + COLUMN_BLOCK, dim)) for start in range(0, dim, COLUMN_BLOCK)]


@given(dim=st.integers(1, 100), data=st.data(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_column_shards_have_the_statistics_of_the_whole(dim: int, data: st.DataObject, dtype: torch.dtype) -> None:
    g = draw(5, dim, seed=dim, dtype=dtype)
    whole = block_sums(g * g)
    assert whole.shape == (5, -(-dim // COLUMN_BLOCK))
    borders = data.draw(st.sets(st.sampled_from([start for start, _ in column_spans(dim)])))
    cuts = sorted({0, dim} | borders)
    pieces = [block_sums(g[:, a:b].contiguous() ** 2) for a, b in pairwise(cuts)]
    together = torch.cat(pieces, dim=1)
    assert torch.equal(together, whole)
    assert torch.equal(sum_blocks(together), sum_blocks(whole))
    torch.testing.assert_close(
        sum_blocks(whole), (g * g).sum(1), rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=0
    )


def test_block_sums_add_a_fixed_tree() -> None:
    # Neighbours of 1e8 in float32 are 8 apart. Left to right the ones would all be lost; in the tree 2, 4 and 8 of them
    # meet first, and the last sum, 1e8 + 8, is kept.
    values = torch.ones(1, 16)
    values[0, 0], values[0, 8] = 1e8, 0.0
    assert block_sums(values).item() == 1e8 + 8


@every
def test_column_shards_give_the_bits_of_the_whole(spec: OptimizerSpec) -> None:
    dim = 37  # two blocks and five columns
    ours, rows, g = (
        make_row_optimizer(spec),
        draw(6, dim, dtype=torch.float32),
        draw(6, dim, seed=1, dtype=torch.float32),
    )
    state, hyper = ours.init(rows), Hyper(lr=0.1, step=2, embedding_dim=dim)
    whole, whole_state = reference_step(ours, rows, g, state, hyper)

    def shard(a: int, b: int) -> tuple[Tensor, Tensor, RowState]:
        return columns(rows, a, b), columns(g, a, b), {name: columns(value, a, b) for name, value in state.items()}

    stats: Values = {}
    for stage in ours.row_stats:
        blocks: dict[str, list[Tensor]] = {}
        for a, b in column_spans(dim):
            w, own, own_state = shard(a, b)
            for name, summand in stage(w, own, as_values(own_state), stats, hyper).items():
                blocks.setdefault(name, []).append(block_sums(summand))
        stats = stats | {name: sum_blocks(torch.cat(parts, dim=1))[:, None] for name, parts in blocks.items()}
    for a, b in column_spans(dim):
        part, part_state = apply_update(ours, *shard(a, b), stats, hyper)
        assert torch.equal(part, whole[:, a:b])
        assert all(torch.equal(part_state[name], columns(whole_state[name], a, b)) for name in state)
