"""Write the built-in row optimizers as C++: `python tools/fused_programs.py > src/meseta/ops/row_update/programs.h`.

The core runs any program by reading its instructions over chunks of rows (executor.h). For the programs written here it
runs one loop over the elements per pass instead, with every value of the pass in registers; same operations, same bits.
A pass ends where a sum over a row is needed. tests/ops/test_row_program.py checks that the file is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from meseta.ops.row_program.lowering import FIRST_ROW, FIRST_UNIFORM, UNUSED
from meseta.ops.row_program.program import RowProgram, trace
from meseta.ops.row_program.symbols import Op
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec

OPTIMIZERS = {
    "sgd": OptimizerSpec(name="sgd"),
    "sgd_momentum": OptimizerSpec(name="sgd", momentum=0.9),
    "adagrad": OptimizerSpec(name="adagrad"),
    "rowwise_adagrad": OptimizerSpec(name="rowwise_adagrad"),
    "adam": OptimizerSpec(name="adam"),
    "adamw": OptimizerSpec(name="adamw", weight_decay=0.01),
    "rowwise_adam": OptimizerSpec(name="rowwise_adam"),
    "lamb": OptimizerSpec(name="lamb"),
    "rowwise_lamb": OptimizerSpec(name="rowwise_lamb"),
    "lars": OptimizerSpec(name="lars"),
    "ftrl": OptimizerSpec(name="ftrl"),
    "rmsprop": OptimizerSpec(name="rmsprop"),
}
"""Other constants change numbers of a program, not its instructions; other terms (decay, clipping) do."""

HEAD = """\
// Made by tools/fused_programs.py from the Python of the optimizers; do not edit.
#pragma once

#include "ops/row_update/chunk.h"

namespace meseta {
"""
FORMS = {
    Op.ADD: "{} + {}",
    Op.SUB: "{} - {}",
    Op.MUL: "{} * {}",
    Op.DIV: "{} / {}",
    Op.MAX: "maximum({}, {})",
    Op.MIN: "minimum({}, {})",
    Op.GREATER: "greater({}, {})",
    Op.SQRT: "sqrt({})",
    Op.ABS: "abs({})",
    Op.SIGN: "sign({})",
    Op.NEG: "negate({})",
    Op.WHERE: "where_positive({}, {}, {})",
}
LOADS = (Op.LOAD_WEIGHT, Op.LOAD_STATE)
STORES = (Op.STORE_WEIGHT, Op.STORE_STATE)
MAX_BUFFERS = 4
"""Summands, and values kept from pass to pass, that a chunk has room for (chunk.h)."""


@dataclass(eq=False)
class Step:
    """One instruction, with the steps whose values it reads; numbers that all rows share are `u0`, `u1` ..."""

    op: Op | None
    name: str
    is_row: bool
    operands: list[Step | str] = field(default_factory=list)
    index: int = 0
    """Index of the state that the instruction loads or stores."""
    users: list[Step] = field(default_factory=list)
    level: int = 0
    """First pass that may run the step, one after the pass of any sum that it depends on."""
    at: int = 0
    """Pass that runs the step. Steps of rows run before the steps of elements of the same pass."""
    slot: int = 0
    """Slot of a value of a row, of summands, or of an element that is kept for a later pass."""


def read(program: RowProgram) -> list[Step]:
    """Return the gradient and the instructions in order, with values instead of registers."""
    gradient = Step(None, "g", is_row=False)
    steps, held = [gradient], {0: gradient}
    for position, (code, dst, *rest) in enumerate(program.fused_update.instructions.tolist()):
        op = Op(code)
        registers = [] if op in LOADS else rest[:1] if op in STORES else [r for r in rest if r != UNUSED]
        operands = [f"u{r - FIRST_UNIFORM}" if r >= FIRST_UNIFORM else held[r] for r in registers]
        index = {Op.LOAD_STATE: rest[0], Op.STORE_STATE: rest[1]}.get(op, 0)
        is_row = dst >= FIRST_ROW if op not in STORES else op is Op.STORE_STATE and program.state_kinds[index] == "row"
        step = Step(op, f"v{position}", is_row, operands, index)
        for operand in operands:
            if isinstance(operand, Step):
                operand.users.append(step)
        if op not in STORES:
            held[dst] = step
        steps.append(step)
    return steps


def schedule(steps: list[Step]) -> int:
    """Assign each step the latest pass that its users allow, so that few values are kept.

    Return the number of passes.
    """
    for step in steps:
        below = [operand.level for operand in step.operands if isinstance(operand, Step)]
        step.level = max(below, default=0) + (step.op is Op.SUM)
    last = max(step.level for step in steps)
    for step in reversed(steps):
        latest = [user.level - 1 if user.op is Op.SUM else user.at for user in step.users]
        step.at = step.level if step.op is Op.SUM else min(latest, default=last)
    for step in steps:
        if step.op in STORES and isinstance(step.operands[0], Step) and step.operands[0].is_row == step.is_row:
            step.at = step.operands[0].at
    return last + 1


def can_reload(step: Step, steps: list[Step], at: int) -> bool:
    """Whether memory still has the value of the step in pass `at`."""
    if step.op is None:
        return True
    store = {Op.LOAD_WEIGHT: Op.STORE_WEIGHT, Op.LOAD_STATE: Op.STORE_STATE}.get(step.op)
    return store is not None and not any(s.op is store and s.index == step.index and s.at < at for s in steps)


class Writer:
    """Writer of the C++ code of one program."""

    def __init__(self, name: str, program: RowProgram) -> None:
        self.name = name
        self.program = program
        self.steps = read(program)
        self.num_passes = schedule(self.steps)
        self.row_slots: dict[Step, int] = {}
        self.kept: dict[Step, int] = {}
        for step in self.steps:
            elsewhere = [user for user in step.users if not user.is_row or user.at != step.at]
            if step.is_row and step.op not in STORES and (step.op in (Op.SUM, Op.LOAD_STATE) or elsewhere):
                self.row_slots[step] = len(self.row_slots)
            later = {self.element_pass(user) for user in step.users} - {step.at}
            if not step.is_row and any(not can_reload(step, self.steps, at) for at in later):
                self.kept[step] = len(self.kept)
        for step in self.steps:
            if step.is_row and step.op is Op.STORE_STATE and isinstance(step.operands[0], Step):
                self.row_slots.setdefault(step.operands[0], len(self.row_slots))
        assert len(self.kept) <= MAX_BUFFERS and len(self.row_slots) <= 2 * MAX_BUFFERS

    def element_pass(self, user: Step) -> int:
        """Return the pass in which a user reads an element."""
        return user.at - 1 if user.op is Op.SUM else user.at

    def lines(self) -> Iterator[str]:
        """Yield the lines of the function."""
        yield "template <typename T>"
        yield f"void {self.name}(Chunk<T>& x) {{"
        used = {operand for step in self.steps for operand in step.operands if isinstance(operand, str)}
        for uniform in sorted(used, key=lambda u: int(u[1:])):
            yield f"  const Vec {uniform} = broadcast(x.uniforms[{uniform[1:]}]);"
        for at in range(self.num_passes):
            yield from self.rows(at)
            yield from self.elements(at)
        yield "}"

    def rows(self, at: int) -> Iterator[str]:
        """Yield the lines of pass `at` that compute one number per row, sixteen rows at a time."""
        row_steps = [step for step in self.steps if step.is_row and step.at == at]
        sums = [step for step in row_steps if step.op is Op.SUM]
        for number, step in enumerate(sums):
            yield f"  x.sum({number}, {self.row_slots[step]});"
        loads = [step for step in row_steps if step.op is Op.LOAD_STATE]
        for step in loads:
            yield f"  x.load_row_state({step.index}, {self.row_slots[step]});"
        body = [step for step in row_steps if step not in sums and step not in loads and step.op not in STORES]
        if body:
            yield "  x.each_row([&](int64_t k) {"
            known: set[str] = set()
            for step in body:
                for operand in step.operands:
                    if isinstance(operand, Step) and operand not in body and operand.name not in known:
                        known.add(operand.name)
                        yield f"    const Vec {operand.name} = x.row({self.row_slots[operand]}, k);"
                yield f"    const Vec {step.name} = {self.form(step)};"
                if step in self.row_slots:
                    yield f"    x.put_row({self.row_slots[step]}, k, {step.name});"
            yield "  });"
        for step in row_steps:
            if step.op is Op.STORE_STATE:
                value = step.operands[0]
                assert isinstance(value, Step), "a row state that is one number for all rows"
                yield f"  x.store_row_state({step.index}, {self.row_slots[value]});"

    def elements(self, at: int) -> Iterator[str]:
        """Yield the loop of pass `at` over all elements of the chunk."""
        sums = [step for step in self.steps if step.op is Op.SUM and step.at == at + 1]
        assert len(sums) <= MAX_BUFFERS
        element_steps = [s for s in self.steps if not s.is_row and s.at == at and s.op is not None] + sums
        if not element_steps:
            return
        yield "  x.each_element([&](const auto& at) {"
        known: set[Step] = set()
        for step in element_steps:
            for operand in step.operands:
                if (
                    isinstance(operand, Step)
                    and operand not in known
                    and (operand not in element_steps or operand.is_row)
                ):
                    known.add(operand)
                    yield f"    const Vec {operand.name} = {self.again(operand)};"
            if step.op in STORES:
                (value,) = [o if isinstance(o, str) else o.name for o in step.operands]
                where = "put_weight(" if step.op is Op.STORE_WEIGHT else f"put_state({step.index}, "
                yield f"    at.{where}{value});"
            elif step.op is Op.SUM:
                (value,) = [o if isinstance(o, str) else o.name for o in step.operands]
                yield f"    at.add({sums.index(step)}, {value});"
            else:
                yield f"    const Vec {step.name} = {self.from_memory(step) if step.op in LOADS else self.form(step)};"
                if step in self.kept:
                    yield f"    at.keep({self.kept[step]}, {step.name});"
        yield "  });"

    def again(self, step: Step) -> str:
        """Return the expression for a value of a row or of an earlier pass."""
        if step.is_row:
            return f"at.row({self.row_slots[step]})"
        return f"at.kept({self.kept[step]})" if step in self.kept else self.from_memory(step)

    def from_memory(self, step: Step) -> str:
        """Return the expression that reads the gradient, a weight or a state."""
        return {Op.LOAD_WEIGHT: "at.weight()", Op.LOAD_STATE: f"at.state({step.index})"}.get(step.op, "at.gradient()")

    def form(self, step: Step) -> str:
        """Return the expression of a step."""
        assert step.op is not None
        return FORMS[step.op].format(*(o if isinstance(o, str) else o.name for o in step.operands))

    def table_entry(self) -> str:
        """Return the table entry of the function, with the instructions by which the core finds it."""
        words = self.program.fused_update.instructions.flatten().tolist()
        return f"    {{{{{', '.join(map(str, words))}}}, &{self.name}<T>}},"


def text() -> str:
    """Return the content of the file."""
    writers: dict[tuple[int, ...], Writer] = {}
    for name, spec in OPTIMIZERS.items():
        program = trace(make_row_optimizer(spec))
        writers.setdefault(tuple(program.fused_update.instructions.flatten().tolist()), Writer(name, program))
    parts = [HEAD]
    for writer in writers.values():
        parts += ["\n".join(writer.lines()), ""]
    parts += ["template <typename T>", "struct FusedProgram {", "  std::vector<int32_t> instructions;"]
    parts += ["  void (*run)(Chunk<T>&);", "};", ""]
    parts += ["template <typename T>", "const std::vector<FusedProgram<T>>& fused_programs() {"]
    parts += ["  static const std::vector<FusedProgram<T>> programs{"]
    parts += [writer.table_entry() for writer in writers.values()]
    parts += ["  };", "  return programs;", "}", "", "}  // namespace meseta", ""]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(text())
