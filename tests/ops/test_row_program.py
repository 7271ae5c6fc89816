"""Tests of tracing and lowering: the program equals the Python function bit for bit on few registers, or an error
states the reason."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meseta.ops.row_program import program as row_program
from meseta.ops.row_program.lowering import FIRST_ROW, FIRST_UNIFORM, UNUSED, RowCode
from meseta.ops.row_program.optimizer import (
    Hyper,
    RowOptimizer,
    RowState,
    broadcast_state,
    compute_dtype,
    element_state,
    reference_step,
    row_state,
    sum_across_blocks,
    sum_in_blocks,
    where,
)
from meseta.ops.row_program.program import RowProgram, exact_sqrt, interpret, trace
from meseta.ops.row_program.symbols import Op
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, OptimizerSpec
from optim.specs import DIM, draw, every

HYPER = Hyper(lr=0.1, step=2, embedding_dim=DIM)
LOADS = (Op.LOAD_WEIGHT, Op.LOAD_STATE, Op.LOAD_STAT)


@pytest.fixture
def with_the_root_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's square root, which is not always correctly rounded, by the one of programs."""
    monkeypatch.setitem(row_program._COMPUTE, Op.SQRT, torch.sqrt)


def run_program(
    program: RowProgram, rows: Tensor, gradient: Tensor, state: RowState, hyper: Hyper
) -> tuple[Tensor, RowState]:
    """Run `reference_step` by the program on rows [U, D], their gradient and state, and return new rows and state."""
    dtype = compute_dtype(rows.dtype)
    values = [broadcast_state(state)[name] for name in program.state_names]
    done = interpret(
        program.fused_update, program.uniform_values(hyper), rows.to(dtype), gradient.to(dtype), values, []
    )
    new = zip(program.state_names, program.state_kinds, done.state, strict=True)
    return done.weight, {name: value if kind == "element" else value.squeeze(1) for name, kind, value in new}


def assert_same(program: RowProgram, optimizer: RowOptimizer, dtype: torch.dtype, num_steps: int = 5) -> None:
    """Check that program and Python give the same bits of rows and state."""
    rows = draw(6, DIM, dtype=dtype)
    state = optimizer.init(rows)
    for k in range(1, num_steps + 1):
        g, h = draw(6, DIM, seed=k, dtype=dtype), Hyper(lr=0.1 / k, step=k, embedding_dim=DIM)
        expected, wanted_state = reference_step(optimizer, rows, g, state, h)
        got, got_state = run_program(program, rows, g, state, h)
        assert torch.equal(got, expected) and got.dtype == expected.dtype
        assert all(torch.equal(got_state[name], wanted_state[name]) for name in wanted_state)
        rows, state = expected, wanted_state


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("with_the_root_of_torch")
def test_the_program_has_the_bits_of_the_python(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    optimizer = make_row_optimizer(spec)
    assert_same(trace(optimizer), optimizer, dtype)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stages_and_given_have_the_bits_of_whole(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    optimizer = make_row_optimizer(spec)
    program = trace(optimizer)
    rows, g = draw(6, DIM, dtype=dtype), draw(6, DIM, seed=1, dtype=dtype)
    state = list(broadcast_state(optimizer.init(rows)).values())
    uniforms, stats = program.uniform_values(HYPER), list[Tensor]()
    for names, code in zip(program.stat_names, program.stages, strict=True):
        summands = interpret(code, uniforms, rows, g, state, stats).summands
        assert len(summands) == len(names)
        stats += [sum_across_blocks(sum_in_blocks(summand))[:, None] for summand in summands]
    whole = interpret(program.fused_update, uniforms, rows, g, state, [])
    staged = interpret(program.staged_update, uniforms, rows, g, state, stats)
    assert torch.equal(whole.weight, staged.weight)
    assert all(torch.equal(a, b) for a, b in zip(whole.state, staged.state, strict=True))


def codes(program: RowProgram) -> list[RowCode]:
    return [program.fused_update, program.staged_update, *program.stages]


@every
def test_registers_are_written_before_they_are_read_and_contiguous(spec: OptimizerSpec) -> None:
    program = trace(make_row_optimizer(spec))
    for code in codes(program):
        assert code.instructions.dtype == torch.int32 and code.instructions.is_contiguous()
        written, highest = {0}, {"element": 0, "row": FIRST_ROW - 1}
        stored: set[tuple[int, int]] = set()
        for number, dst, a, b, c in code.instructions.tolist():
            op = Op(number)
            operands = {Op.LOAD_WEIGHT: [], Op.LOAD_STATE: [], Op.LOAD_STAT: []}.get(
                op, [a] if op >= Op.STORE_WEIGHT else [x for x in (a, b, c) if x != UNUSED]
            )
            for operand in operands:
                assert operand in written or FIRST_UNIFORM <= operand < FIRST_UNIFORM + len(program.uniforms)
            if op is Op.LOAD_STATE:
                assert (Op.STORE_STATE, a) not in stored, "it is loaded after it was overwritten"
            if op >= Op.STORE_WEIGHT:
                assert dst == UNUSED
                stored.add((op, b))
                continue
            is_row = op in (Op.SUM, Op.LOAD_STAT) or (op is Op.LOAD_STATE and program.state_kinds[a] == "row")
            if op not in LOADS and op is not Op.SUM:
                is_row = all(operand >= FIRST_ROW for operand in operands)
            assert is_row == (dst >= FIRST_ROW)
            written.add(dst)
            highest["row" if is_row else "element"] = max(highest["row" if is_row else "element"], dst)
        assert highest["element"] < code.num_element_registers
        assert highest["row"] - FIRST_ROW < code.num_row_registers


# Element registers of `whole`: what a chunk of rows takes in the first-level cache.
REGISTERS = {"sgd": 2, "adagrad": 3, "rowwise_adagrad": 2, "adam": 3, "rowwise_adam": 2, "lamb": 3, "rmsprop": 3}


@pytest.mark.parametrize("name", REGISTERS)
def test_few_registers(name: str) -> None:
    assert trace(make_row_optimizer(OptimizerSpec(name=name))).fused_update.num_element_registers <= REGISTERS[name]


def test_the_program_of_rowwise_adagrad() -> None:
    program = trace(make_row_optimizer(OptimizerSpec(lr=0.1, eps=1e-8)))
    assert (program.state_names, program.state_kinds) == (("sum",), ("row",))
    assert program.stat_names == (("gradient_sq",),)
    stage = [(Op(op).name, dst, a, b, c) for op, dst, a, b, c in program.stages[0].instructions.tolist()]
    assert stage == [("MUL", 0, 0, 0, -1), ("STORE_STAT", -1, 0, 0, -1)]
    ops = [Op(op).name for op, *_ in program.fused_update.instructions.tolist()]
    assert " ".join(sorted(ops)) == (
        "ADD ADD DIV DIV LOAD_STATE LOAD_WEIGHT MUL MUL MUL SQRT STORE_STATE STORE_WEIGHT SUB SUM"
    )
    assert sorted(program.uniform_values(HYPER)) == [1e-8, 0.1, 1.0, 20.0]


def optimizer_of(
    update: Callable[..., Any], *row_stats: Callable[..., Any], init: Callable[..., Any] = lambda weight: {}
) -> RowOptimizer:
    return RowOptimizer(name="mine", init=init, update=update, row_stats=row_stats)


def test_equal_terms_are_computed_once_and_dead_ones_never() -> None:
    def update(w: Any, g: Any, state: Any, stats: Any, h: Any) -> Any:
        _ = (g / w).sqrt()
        return w - (g * 2.0 + 2.0 * g) * (g * 2.0), state

    ops = [Op(row[0]).name for row in trace(optimizer_of(update)).fused_update.instructions.tolist()]
    assert " ".join(sorted(ops)) == "ADD LOAD_WEIGHT MUL MUL STORE_WEIGHT SUB"


def test_a_state_is_loaded_before_it_is_overwritten() -> None:
    # The last gradient takes the place of the one before, which the step still needs.
    def update(w: Any, g: Any, state: Any, stats: Any, h: Any) -> Any:
        return w - (g + state["last"]) * h.lr, {"last": g}

    optimizer = optimizer_of(update, init=lambda weight: {"last": element_state(weight, 0.5)})
    assert_same(trace(optimizer), optimizer, torch.float32)


def test_states_that_change_places() -> None:
    def update(w: Any, g: Any, state: Any, stats: Any, h: Any) -> Any:
        return w - g, {"a": state["b"], "b": state["a"], "c": state["c"]}

    def init(weight: Tensor) -> dict[str, Tensor]:
        return {"a": element_state(weight, 1.0), "b": element_state(weight, 2.0), "c": row_state(weight, 3.0)}

    optimizer = optimizer_of(update, init=init)
    assert_same(trace(optimizer), optimizer, torch.float32, num_steps=3)
    assert (Op.STORE_STATE, 2) not in [(row[0], row[3]) for row in trace(optimizer).fused_update.instructions.tolist()]


@pytest.mark.usefixtures("with_the_root_of_torch")
def test_all_that_is_allowed() -> None:
    def first(w: Any, g: Any, state: Any, stats: Any, h: Any) -> Any:
        return {"a": (g * w).abs(), "b": g}

    def second(w: Any, g: Any, state: Any, stats: Any, h: Any) -> Any:
        return {"c": g.maximum(stats["a"]) - w.minimum(stats["b"]) * state["per_row"]}

    def update(w: Any, g: Any, state: Any, stats: Any, h: Any) -> Any:
        rate = -h.lr * (1 - 0.9**h.step) / (2.0 + h.step - 1 / h.step) / 2**0.5
        clipped = (-g).clamp(min=-0.5, max=h.lr).clamp(max=0.4).clamp(min=-0.45)
        signs = where(g > w, g.sign(), where(w > 0.3, 1 / (w.abs() + 1e-3), 2.0))
        chosen = where(stats["c"] < state["per_row"], signs, clipped) + where(w > 0.0, 1.0, g)
        row = where(stats["a"] > stats["b"], 3.0 - stats["a"].sqrt(), 0.25 / stats["a"])
        return w - chosen * rate, {"per_row": row, "element": stats["c"], "constant": h.lr * 2}

    def init(weight: Tensor) -> dict[str, Tensor]:
        return {"per_row": row_state(weight, 0.1), "element": element_state(weight), "constant": row_state(weight)}

    optimizer = optimizer_of(update, first, second, init=init)
    for dtype in (torch.float32, torch.float64):
        assert_same(trace(optimizer), optimizer, dtype)


def sgd_with(change: Callable[[Any, Any, Any], Any]) -> Callable[[], RowProgram]:
    return lambda: trace(optimizer_of(lambda w, g, state, stats, h: (w - change(w, g, h), state)))


def in_place(w: Any, g: Any, h: Any) -> Any:
    g *= h.lr
    return g


REFUSED: list[tuple[Callable[[], RowProgram], str]] = [
    (sgd_with(lambda w, g, h: g if w > 0 else w), "a decision in Python that depends on a value"),
    (sgd_with(lambda w, g, h: g if h.step > 3 else w), "a comparison of two plain numbers"),
    (sgd_with(lambda w, g, h: g if h.step == 3 else w), "=="),
    (sgd_with(lambda w, g, h: where(w >= g, w, g)), ">="),
    (sgd_with(lambda w, g, h: g if w else w * g), "a decision in Python"),
    (sgd_with(lambda w, g, h: g**2), "a power of a value (write g * g)"),
    (sgd_with(lambda w, g, h: 0.5**g), "a value in an exponent"),
    (sgd_with(lambda w, g, h: g.exp()), "the method or attribute 'exp'"),
    (sgd_with(lambda w, g, h: h.rate * g), "AttributeError"),
    (sgd_with(lambda w, g, h: h.step.sqrt() * g), "the method or attribute 'sqrt'"),
    (sgd_with(lambda w, g, h: g * math.sqrt(h.step)), "TypeError"),
    (sgd_with(lambda w, g, h: torch.sqrt(g)), "TypeError"),
    (sgd_with(lambda w, g, h: g * torch.ones(3)), "Tensor as an operand"),
    (sgd_with(lambda w, g, h: g * True), "bool as an operand"),
    (sgd_with(lambda w, g, h: g.maximum(0.0)), "write clamp(min=number)"),
    (sgd_with(lambda w, g, h: g.minimum(h.lr)), "write clamp(max=number)"),
    (sgd_with(lambda w, g, h: g.clamp(max=w)), "write maximum(value) or minimum(value)"),
    (sgd_with(lambda w, g, h: where(g > 0, 1.0, h.lr)), "one choice must be a value of the row"),
    (sgd_with(lambda w, g, h: where(g, w, g)), "the condition must be 'a > b' or 'a < b'"),
    (sgd_with(in_place), "an update in place"),
    (sgd_with(lambda w, g, h: g[0]), "TypeError"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_untraceable_code_is_named(make: Callable[[], RowProgram], words: str) -> None:
    with pytest.raises(MesetaError) as caught:
        make()
    assert "row optimizer 'mine'" in str(caught.value) and words in str(caught.value), str(caught.value)


def element(weight: Tensor) -> dict[str, Tensor]:
    return {"s": element_state(weight)}


def row(weight: Tensor) -> dict[str, Tensor]:
    return {"s": row_state(weight)}


def keep(w: Any, g: Any, state: Any, stats: Any, h: Any) -> Any:
    return w - g, state


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optimizer_of(lambda w, g, s, t, h: w), "update must return (new rows, new state by name)"),
        (optimizer_of(lambda w, g, s, t, h: (w, {}), init=element), "returns states [], but init ['s']"),
        (optimizer_of(lambda w, g, s, t, h: (w, {"s": g}), init=row), "state 's' is one number per row"),
        (
            optimizer_of(lambda w, g, s, t, h: (w, {"s": None}), init=row),
            "state 's' must be a value or a number, got NoneType",
        ),
        (optimizer_of(keep, lambda w, g, s, t, h: g * g), "must return summands by name"),
        (optimizer_of(keep, lambda w, g, s, t, h: {"x": s["s"]}, init=row), "summand 'x' must be a value per element"),
        (optimizer_of(keep, lambda w, g, s, t, h: {"x": 1.0}), "summand 'x' must be a value per element"),
        (optimizer_of(keep, *[lambda w, g, s, t, h: {"x": g}] * 2), "two stages of row_stats return 'x'"),
        (optimizer_of(keep, init=lambda weight: {"row": weight}), "'row' must be an identifier other than 'id'"),
        (optimizer_of(keep, init=lambda weight: {"a b": weight}), "'a b' must be an identifier"),
        (optimizer_of(keep, init=lambda weight: {"s": weight[0]}), "is torch.float32 [3], but must be"),
        (optimizer_of(keep, init=lambda weight: {"s": weight.double()}), "is torch.float64 [2, 3], but must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_records_are_named(optimizer: RowOptimizer, words: str) -> None:
    with pytest.raises(MesetaError) as caught:
        trace(optimizer)
    assert "row optimizer 'mine'" in str(caught.value) and words in str(caught.value), str(caught.value)


def test_too_many_values_at_once() -> None:
    def update(w: Any, g: Any, state: Any, stats: Any, h: Any) -> Any:
        values = [g]
        for _ in range(80):
            values.append((values[-1] + w).sqrt())
        total = w
        for value in reversed(values):  # the last one is needed first, so all of them wait
            total = total * value
        return total, state

    with pytest.raises(MesetaError, match="values per element and 0 per row at the same time, but at most 64 of each"):
        trace(optimizer_of(update))


def test_numbers_of_a_step() -> None:
    def update(w: Any, g: Any, state: Any, stats: Any, h: Any) -> Any:
        return w * (1 - 0.5**h.step) + g * (h.lr / h.embedding_dim - 3), state

    program = trace(optimizer_of(update))
    assert sorted(program.uniform_values(Hyper(lr=0.5, step=3, embedding_dim=4))) == [-2.875, 0.875]


@pytest.mark.parametrize(
    ("number", "words"),
    [(lambda h: 1 / (h.step - 1), "division by zero"), (lambda h: (h.step - 9) ** 0.5, "complex")],
)
def test_a_number_that_cannot_be_computed_is_named(number: Callable[[Any], Any], words: str) -> None:
    program = trace(optimizer_of(lambda w, g, state, stats, h: (w - g * number(h), state)))
    with pytest.raises(MesetaError) as caught:
        program.uniform_values(Hyper(lr=0.1, step=1, embedding_dim=4))
    assert words in str(caught.value) and "step=1" in str(caught.value)


@every
def test_numbers_of_a_step_are_quick(spec: OptimizerSpec) -> None:
    program = trace(make_row_optimizer(spec))
    start = time.process_time()
    for _ in range(100):
        program.uniform_values(HYPER)
    assert (time.process_time() - start) / 100 < 100e-6  # 2 us where nothing else runs


@given(st.lists(st.floats(0.0, width=32), min_size=1))
def test_roots_are_rounded_correctly(values: list[float]) -> None:
    single = exact_sqrt(torch.tensor(values, dtype=torch.float32))
    # In float64 a root has more than twice the bits, so rounding it once more is harmless.
    expected = [np.float32(math.sqrt(value)) for value in values]
    assert single.dtype == torch.float32 and single.tolist() == expected
