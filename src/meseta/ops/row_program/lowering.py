"""Lowering of the graph of a row optimizer to instructions on registers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice, permutations

import torch
from torch import Tensor

from meseta.ops.row_program.symbols import Kind, Op, ScalarSymbol, Symbol
from meseta.spec import MesetaError

# Operand numbers: element registers start at 0, row registers at 64, uniforms at 128.
FIRST_ROW, FIRST_UNIFORM, UNUSED = 64, 128, -1
MAX_REGISTERS = 64
"""Maximum number of registers of each kind."""
MAX_ORDERS = 120
"""Maximum number of orders of the stores that are tried."""
LOAD_OF = {Op.STORE_WEIGHT: Op.LOAD_WEIGHT, Op.STORE_STATE: Op.LOAD_STATE}


@dataclass(frozen=True, eq=False)
class RowCode:
    """Instructions of one pass over the touched rows."""

    instructions: Tensor
    """int32 [n, 5] on the CPU: (op, dst, a, b, c).

    If an operand is an element register, so is dst, except for SUM. dst may be one of the operands. At the start,
    element register 0 has the gradient.
    """
    num_element_registers: int
    """Number of registers [U, D], at least 1."""
    num_row_registers: int
    """Number of registers [U]."""


@dataclass(frozen=True, eq=False)
class StoreOutput:
    """Value that a pass stores."""

    op: Op
    """STORE_WEIGHT, STORE_STATE or STORE_STAT."""
    value: Symbol | ScalarSymbol
    index: int = 0
    """Index of the state or statistic."""


def lower(owner: str, stores: Sequence[StoreOutput], slots: dict[int, int]) -> RowCode:
    """Return code that computes all stores, with each value computed once.

    `slots` maps numbers to uniforms. New numbers are added to it. Raises MesetaError if there are not enough registers.
    """
    for node in _postorder([store.value for store in stores]):
        if isinstance(node, ScalarSymbol):
            slots.setdefault(node.index, len(slots))
    # The order of stores changes the number of live registers, so try several.
    candidates = [_allocate(_schedule(order), slots) for order in islice(permutations(stores), MAX_ORDERS)]
    best = min(candidates, key=lambda code: (code.num_element_registers, code.num_row_registers))
    if best.num_element_registers > MAX_REGISTERS or best.num_row_registers > MAX_REGISTERS:
        raise MesetaError(
            f"row optimizer {owner!r} needs {best.num_element_registers} values per element and "
            f"{best.num_row_registers} per row at the same time, but at most {MAX_REGISTERS} of each; use fewer terms"
        )
    return best


def _postorder(roots: Iterable[Symbol | ScalarSymbol]) -> list[Symbol | ScalarSymbol]:
    """Return all nodes below the roots once, operands first. Operands that need more registers come first."""
    nodes: dict[int, Symbol | ScalarSymbol] = {}
    needs: dict[int, int] = {}

    def visit(node: Symbol | ScalarSymbol) -> None:
        if id(node) in nodes:
            return
        if isinstance(node, Symbol):
            for operand in sorted(node.operands, key=lambda operand: -_num_registers(operand, needs)):
                visit(operand)
        nodes[id(node)] = node

    for root in roots:
        visit(root)
    return list(nodes.values())


def _num_registers(node: Symbol | ScalarSymbol, needs: dict[int, int]) -> int:
    """Return the number of element registers for evaluating a tree (Sethi and Ullman, JACM 17, 1970)."""
    if isinstance(node, ScalarSymbol) or node.op is None:
        return 0
    if id(node) not in needs:
        below = sorted((_num_registers(operand, needs) for operand in node.operands), reverse=True)
        minimum = 1 if node.kind == "element" else 0
        needs[id(node)] = max([minimum, *(need + held for held, need in enumerate(below))])
    return needs[id(node)]


def _schedule(stores: Sequence[StoreOutput]) -> list[Symbol | StoreOutput]:
    """Return nodes and stores in execution order. A value is loaded before a store overwrites it."""
    symbols = [node for node in _postorder([store.value for store in stores]) if isinstance(node, Symbol)]
    loads = {(node.op, node.index): node for node in symbols if node.op in LOAD_OF.values()}
    done: set[int] = set()
    order: list[Symbol | StoreOutput] = []
    for store in stores:
        overwritten = [loads[key] for key in [(LOAD_OF.get(store.op), store.index)] if key in loads]
        for node in _postorder([store.value, *overwritten]):
            if isinstance(node, Symbol) and node.op is not None and id(node) not in done:
                done.add(id(node))
                order.append(node)
        order.append(store)
    return order


@dataclass
class _RegisterFile:
    """Registers of one kind. The lowest free one is allocated first."""

    first: int
    free_registers: list[int] = field(default_factory=list)
    num_used: int = 0

    def allocate(self) -> int:
        if self.free_registers:
            return heappop(self.free_registers)
        self.num_used += 1
        return self.first + self.num_used - 1

    def release(self, register: int) -> None:
        heappush(self.free_registers, register)


def _allocate(order: Sequence[Symbol | StoreOutput], slots: dict[int, int]) -> RowCode:
    """Allocate registers by liveness. The last instruction that reads a register may write to it."""
    operands = [step.operands if isinstance(step, Symbol) else (step.value,) for step in order]
    last = {id(operand): position for position, of_step in enumerate(operands) for operand in of_step}
    registers: dict[Kind, _RegisterFile] = {"element": _RegisterFile(first=0), "row": _RegisterFile(first=FIRST_ROW)}
    gradient = registers["element"].allocate()
    place: dict[int, int] = {}
    rows: list[tuple[int, ...]] = []
    for of_step in operands:
        for operand in of_step:
            if isinstance(operand, ScalarSymbol):
                place[id(operand)] = FIRST_UNIFORM + slots[operand.index]
            elif operand.op is None:
                place[id(operand)] = gradient
    # Without an instruction that reads the gradient, its register is free from the start.
    if not any(register == gradient for register in place.values()):
        registers["element"].release(gradient)
    for position, (step, of_step) in enumerate(zip(order, operands, strict=True)):
        places = [place[id(operand)] for operand in of_step]
        for operand in {id(operand): operand for operand in of_step if isinstance(operand, Symbol)}.values():
            if last[id(operand)] == position:
                registers[operand.kind].release(place[id(operand)])
        if isinstance(step, StoreOutput):
            rows.append(_encode(step.op, UNUSED, *places, *([] if step.op is Op.STORE_WEIGHT else [step.index])))
            continue
        assert step.op is not None
        place[id(step)] = registers[step.kind].allocate()
        is_indexed = step.op in (Op.LOAD_STATE, Op.LOAD_STAT)
        rows.append(_encode(step.op, place[id(step)], *places, *([step.index] if is_indexed else [])))
    return RowCode(
        instructions=torch.tensor(rows, dtype=torch.int32).view(-1, 5),
        num_element_registers=registers["element"].num_used,
        num_row_registers=registers["row"].num_used,
    )


def _encode(op: Op, dst: int, *operands: int) -> tuple[int, ...]:
    return (int(op), dst, *operands, *[UNUSED] * (3 - len(operands)))
