"""Tests of the properties that all row optimizers share."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meseta.ops.row_program.optimizer import (
    Hyper,
    RowState,
    Values,
    apply_update,
    broadcast_state,
    reference_step,
    sum_across_blocks,
    sum_in_blocks,
)
from meseta.optim import make_row_optimizer
from meseta.spec import COLUMN_BLOCK, OptimizerSpec
from meseta.spec.optimizer import USED_FIELDS
from optim.specs import DIM, SPECS, draw, every
from sampling import fewer_examples

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def hyper(lr: float = 0.1, step: int = 1, embedding_dim: int = DIM) -> Hyper:
    return Hyper(lr=lr, step=step, embedding_dim=embedding_dim)


def test_the_table_is_complete() -> None:
    assert {spec.name for spec in SPECS.values()} == set(USED_FIELDS)


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_is_what_the_spec_counts_in_float32_or_float64(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    state = make_row_optimizer(spec).init(torch.zeros(6, DIM, dtype=dtype))
    shapes = [tuple(value.shape) for value in state.values()]
    assert (shapes.count((6, DIM)), shapes.count((6,))) == spec.num_states
    assert len(shapes) == sum(spec.num_states)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(value.dtype == expected and (value.abs() <= spec.initial_accumulator).all() for value in state.values())


def test_equal_specs_share_one_record() -> None:
    assert make_row_optimizer(OptimizerSpec(name="adam")) is make_row_optimizer(OptimizerSpec(name="adam", lr=0.01))
    assert make_row_optimizer(OptimizerSpec(name="adam")) is not make_row_optimizer(OptimizerSpec(name="adam", lr=0.2))


@every
def test_update_is_pure(spec: OptimizerSpec) -> None:
    ours, rows, g = make_row_optimizer(spec), draw(6, DIM), draw(6, DIM, seed=1)
    state = ours.init(rows)
    before = [t.clone() for t in (rows, g, *state.values())]
    reference_step(ours, rows, g, state, hyper())
    assert all(torch.equal(a, b) for a, b in zip(before, (rows, g, *state.values()), strict=True))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_learns_from_its_own_gradient_alone(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    # Lazy updates are exact because any subset of the rows gives the bits of the whole.
    ours, rows, g = make_row_optimizer(spec), draw(6, DIM, dtype=dtype), draw(6, DIM, seed=1, dtype=dtype)
    state = ours.init(rows)
    whole, whole_state = reference_step(ours, rows, g, state, hyper(step=3))
    some = torch.tensor([4, 1])
    part, part_state = reference_step(ours, rows[some], g[some], {n: s[some] for n, s in state.items()}, hyper(step=3))
    assert torch.equal(part, whole[some])
    assert all(torch.equal(part_state[name], whole_state[name][some]) for name in state)


@every
def test_no_learning_rate_no_move(spec: OptimizerSpec) -> None:
    ours, rows = make_row_optimizer(spec), draw(6, DIM)
    moved, state = rows, ours.init(rows)
    for k in range(1, 4):
        moved, state = reference_step(ours, moved, draw(6, DIM, seed=k), state, hyper(lr=0.0, step=k))
    torch.testing.assert_close(moved, rows, rtol=0.0, atol=1e-15 if spec.name == "ftrl" else 0.0)


@every
def test_first_step_goes_downhill(spec: OptimizerSpec) -> None:
    ours, rows, g = make_row_optimizer(spec), draw(6, DIM), draw(6, DIM, seed=1)
    if spec.weight_decay:  # it has another direction
        rows = -1e-3 * g
    moved, _ = reference_step(ours, rows, g, ours.init(rows), hyper())
    along = ((rows - moved) * g).sum(1)
    assert (along == 0).all() if spec.name == "frozen" else (along > 0).all()


@every
def test_a_touched_row_with_no_gradient_stays_finite(spec: OptimizerSpec) -> None:
    ours = make_row_optimizer(spec)
    for rows in (draw(6, DIM, dtype=torch.float32), torch.zeros(6, DIM)):
        moved, state = reference_step(ours, rows, torch.zeros_like(rows), ours.init(rows), hyper())
        assert moved.isfinite().all() and all(value.isfinite().all() for value in state.values())
        if not spec.weight_decay and not (spec.l1 and spec.name != "ftrl"):
            torch.testing.assert_close(moved, rows, rtol=0.0, atol=1e-6 if spec.name == "ftrl" else 0.0)


@every
def test_a_row_of_zeros_can_leave_zero(spec: OptimizerSpec) -> None:
    # A quotient of norms or a penalty would keep it there.
    ours, rows = make_row_optimizer(spec), torch.zeros(6, DIM)
    moved, _ = reference_step(ours, rows, draw(6, DIM, seed=1, dtype=torch.float32) + 5.0, ours.init(rows), hyper())
    assert spec.name == "frozen" or (moved != 0.0).all(dim=1).all()


@every
def test_float32_is_the_float64_path_to_rounding(spec: OptimizerSpec) -> None:
    ours = make_row_optimizer(spec)
    rows64 = draw(6, DIM)
    rows32 = rows64.float()
    state64, state32 = ours.init(rows64), ours.init(rows32)
    for k in range(1, 11):
        g = draw(6, DIM, seed=k).float()
        rows64, state64 = reference_step(ours, rows64, g.double(), state64, hyper(lr=0.01, step=k))
        rows32, state32 = reference_step(ours, rows32, g, state32, hyper(lr=0.01, step=k))
    assert rows32.dtype == torch.float32 and all(value.dtype == torch.float32 for value in state32.values())
    torch.testing.assert_close(rows32.double(), rows64, rtol=0.0, atol=1e-5)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_of_16_bits_are_updated_in_float32(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    ours, rows, g = make_row_optimizer(spec), draw(6, DIM, dtype=dtype), draw(6, DIM, seed=1, dtype=torch.float32)
    moved, state = reference_step(ours, rows, g, ours.init(rows), hyper())
    expected, wanted_state = reference_step(ours, rows.float(), g, ours.init(rows.float()), hyper())
    assert moved.dtype == torch.float32 and torch.equal(moved, expected)
    assert all(torch.equal(state[name], wanted_state[name]) for name in wanted_state)


def columns(value: Tensor, start: int, stop: int) -> Tensor:
    """Return the columns of a shard. Values per row are in every shard."""
    return value[:, start:stop].contiguous() if value.dim() == 2 else value


def column_cuts(data: st.DataObject, dim: int) -> list[tuple[int, int]]:
    """Draw a split of the columns at multiples of 16."""
    borders = data.draw(st.sets(st.sampled_from(range(0, dim, COLUMN_BLOCK))))
    return list(pairwise(sorted({0, dim} | borders)))


@given(dim=st.integers(1, 100), data=st.data(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_column_shards_have_the_statistics_of_the_whole(dim: int, data: st.DataObject, dtype: torch.dtype) -> None:
    squares = draw(5, dim, seed=dim, dtype=dtype) ** 2
    whole = sum_in_blocks(squares)
    assert whole.shape == (5, -(-dim // COLUMN_BLOCK))
    together = torch.cat([sum_in_blocks(squares[:, a:b].contiguous()) for a, b in column_cuts(data, dim)], dim=1)
    assert torch.equal(together, whole)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(sum_across_blocks(whole), squares.sum(1), rtol=tolerance, atol=0)


def test_block_sums_add_a_fixed_tree() -> None:
    # Neighbours of 1e8 in float32 are 8 apart. Left to right the ones would all be lost; in the tree 2, 4 and 8 of them
    # are added first, and the last sum, 1e8 + 8, is kept.
    values = torch.ones(1, 16)
    values[0, 0], values[0, 8] = 1e8, 0.0
    assert sum_in_blocks(values).item() == 1e8 + 8


@every
@fewer_examples(2)
@given(dim=st.integers(1, 70), data=st.data(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_column_shards_give_the_bits_of_the_whole(
    spec: OptimizerSpec, dim: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    ours, rows, g = make_row_optimizer(spec), draw(3, dim, dtype=dtype), draw(3, dim, seed=1, dtype=dtype)
    state, h = ours.init(rows), hyper(step=2, embedding_dim=dim)
    whole, whole_state = reference_step(ours, rows, g, state, h)
    cuts = column_cuts(data, dim)

    def shard(a: int, b: int) -> tuple[Tensor, Tensor, RowState]:
        return columns(rows, a, b), columns(g, a, b), {name: columns(value, a, b) for name, value in state.items()}

    stats: Values = {}
    for stage in ours.row_stats:
        blocks: dict[str, list[Tensor]] = {}
        for a, b in cuts:
            w, gradient, own_state = shard(a, b)
            for name, summand in stage(w, gradient, broadcast_state(own_state), stats, h).items():
                blocks.setdefault(name, []).append(sum_in_blocks(summand))
        stats = stats | {name: sum_across_blocks(torch.cat(parts, dim=1))[:, None] for name, parts in blocks.items()}
    for a, b in cuts:
        part, part_state = apply_update(ours, *shard(a, b), stats, h)
        assert torch.equal(part, whole[:, a:b])
        assert all(torch.equal(part_state[name], columns(whole_state[name], a, b)) for name in state)
