"""A row optimizer as a program: the same few instructions for the compiled core, GPU kernels and plain torch.

The optimizer's Python runs once on symbols (`trace`), whose graph is lowered to `RowCode`, instructions on registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.ops.row_program.lowering import FIRST_UNIFORM, RowCode, StoreOutput, lower
from meseta.ops.row_program.optimizer import Hyper, RowOptimizer, sum_across_blocks, sum_in_blocks
from meseta.ops.row_program.symbols import (
    SUPPORTED_OPERATIONS,
    Kind,
    NumberEntry,
    Op,
    ScalarSymbol,
    Symbol,
    SymbolGraph,
)
from meseta.spec import MesetaError

RESERVED_STATE_NAMES = ("id", "row")
"""What checkpoints call something else."""


@dataclass(frozen=True, eq=False)
class RowProgram:
    """Everything that runs a row optimizer without its Python."""

    name: str
    state_names: tuple[str, ...]
    """In the order of LOAD_STATE and STORE_STATE."""
    state_kinds: tuple[Kind, ...]
    """'element' for [rows, D], 'row' for [rows]."""
    stat_names: tuple[tuple[str, ...], ...]
    """Statistics of each stage; LOAD_STAT counts through all stages."""
    fused_update: RowCode
    """The update where rows are whole: statistics are summed on the way (SUM)."""
    stages: tuple[RowCode, ...]
    """For each stage: compute and store its summands, with the statistics of former stages loaded."""
    staged_update: RowCode
    """The update with all statistics loaded."""
    numbers: tuple[NumberEntry, ...]
    """Fields of Hyper, constants, and functions of former numbers."""
    uniforms: tuple[int, ...]
    """Which number each uniform is."""

    def uniform_values(self, hyper: Hyper) -> list[float]:
        """Every uniform of this step, computed in float64; raises MesetaError where one cannot be computed."""
        values: list[Any] = []
        try:
            for entry in self.numbers:
                if isinstance(entry, tuple):
                    function, a, b = entry
                    values.append(function(values[a], values[b]))
                else:
                    values.append(getattr(hyper, entry) if isinstance(entry, str) else entry)
            return [float(values[index]) for index in self.uniforms]
        except (ArithmeticError, TypeError) as error:  # TypeError: the root of a negative number is complex
            raise MesetaError(
                f"row optimizer {self.name!r}: a number of the step cannot be computed ({error}) with {hyper}; "
                "change its constants"
            ) from None


def state_kinds(optimizer: RowOptimizer) -> dict[str, Kind]:
    """Names and kinds of an optimizer's state; raises MesetaError for a name or a shape that cannot be stored."""
    owner = f"row optimizer {optimizer.name!r}"
    kinds: dict[str, Kind] = {}
    for name, tensor in optimizer.init(torch.zeros(2, 3)).items():
        if not name.isidentifier() or name in RESERVED_STATE_NAMES:
            raise MesetaError(f"{owner}: the state name {name!r} must be an identifier other than 'id' and 'row'")
        if tuple(tensor.shape) not in ((2, 3), (2,)) or tensor.dtype != torch.float32:
            raise MesetaError(
                f"{owner}: state {name!r} of float32 rows [2, 3] is {tensor.dtype} {list(tensor.shape)}, and must be "
                "float32 [2, 3] or [2]; make it with element_state or row_state"
            )
        kinds[name] = "element" if tensor.dim() == 2 else "row"
    return kinds


@cache
def trace(optimizer: RowOptimizer) -> RowProgram:
    """The program of an optimizer, made at the first use of the record.

    Raises MesetaError, with what is allowed, for Python that symbols cannot follow, states that change their names
    or kinds, and a program that needs more registers than there are.
    """
    return _Tracer(optimizer).program()


class _Tracer:
    """Runs the functions of one optimizer on symbols."""

    def __init__(self, optimizer: RowOptimizer) -> None:
        self.optimizer = optimizer
        self.owner = f"row optimizer {optimizer.name!r}"
        self.kinds = state_kinds(optimizer)
        self.graph = SymbolGraph()
        self.w = self.graph.leaf(Op.LOAD_WEIGHT, "element")
        self.g = self.graph.leaf(None, "element")
        names = enumerate(self.kinds.items())
        self.state = {name: self.graph.leaf(Op.LOAD_STATE, kind, index) for index, (name, kind) in names}
        fields = {name: self.graph.hyper(name) for name in ("lr", "step", "embedding_dim")}
        self.hyper = _SymbolicHyper(**fields)

    def program(self) -> RowProgram:
        given: dict[str, Symbol] = {}
        summed: dict[str, Symbol] = {}
        stages: list[list[StoreOutput]] = []
        stat_names: list[tuple[str, ...]] = []
        for stage in self.optimizer.row_stats:
            summands = self._summands(stage, given)
            for name, summand in self._summands(stage, summed).items():
                summed[name] = self.graph.symbol(Op.SUM, summand)
            for name in summands:
                given[name] = self.graph.leaf(Op.LOAD_STAT, "row", len(given))
            stages.append([StoreOutput(Op.STORE_STAT, summand, k) for k, summand in enumerate(summands.values())])
            stat_names.append(tuple(summands))
        slots: dict[int, int] = {}
        name = self.optimizer.name
        return RowProgram(
            name=name,
            state_names=tuple(self.kinds),
            state_kinds=tuple(self.kinds.values()),
            stat_names=tuple(stat_names),
            fused_update=lower(name, self._update(summed), slots),
            stages=tuple(lower(name, stores, slots) for stores in stages),
            staged_update=lower(name, self._update(given), slots),
            numbers=tuple(self.graph.numbers),
            uniforms=tuple(slots),
        )

    def _summands(self, stage: Callable[..., Any], stats: dict[str, Symbol]) -> dict[str, Symbol]:
        summands = self._run(stage, stats)
        if not isinstance(summands, dict) or not summands:
            raise MesetaError(f"{self.owner}: a stage of row_stats must return summands by name, got {summands!r}")
        for name, summand in summands.items():
            if name in stats:
                raise MesetaError(f"{self.owner}: two stages of row_stats give {name!r}; rename one")
            if not isinstance(summand, Symbol) or summand.kind != "element":
                raise MesetaError(f"{self.owner}: the summand {name!r} must be a value per element, as g * g is")
        return summands

    def _update(self, stats: dict[str, Symbol]) -> list[StoreOutput]:
        """What the update stores; what stays as it was is not stored."""
        answer = self._run(self.optimizer.update, stats)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            raise MesetaError(f"{self.owner}: update must return (new rows, new state by name), got {answer!r}")
        rows, state = answer
        if set(state) != set(self.kinds):
            raise MesetaError(f"{self.owner}: update returns the state {sorted(state)}, but init {sorted(self.kinds)}")
        stores = (
            [] if rows is self.w else [StoreOutput(Op.STORE_WEIGHT, self._check_stored(rows, "the rows", "element"))]
        )
        for index, (name, kind) in enumerate(self.kinds.items()):
            if state[name] is not self.state[name]:
                stores.append(
                    StoreOutput(Op.STORE_STATE, self._check_stored(state[name], f"state {name!r}", kind), index)
                )
        return stores

    def _check_stored(self, value: Any, what: str, kind: Kind) -> Symbol | ScalarSymbol:
        if isinstance(value, bool) or not isinstance(value, Symbol | ScalarSymbol | int | float):
            raise MesetaError(f"{self.owner}: {what} must be a value or a number, got {type(value).__name__}")
        stored = self.graph.operand(value)
        if kind == "row" and isinstance(stored, Symbol) and stored.kind == "element":
            raise MesetaError(
                f"{self.owner}: {what} is one number per row, but update makes it one per element; "
                "sum it over the row in row_stats, or make it with element_state"
            )
        return stored

    def _run(self, function: Callable[..., Any], stats: dict[str, Symbol]) -> Any:
        try:
            return function(self.w, self.g, dict(self.state), dict(stats), self.hyper)
        except MesetaError as error:
            raise MesetaError(f"{self.owner}: {error}") from error
        except Exception as error:  # whatever Python or torch says to a symbol
            problem = f"{type(error).__name__}: {error}"
            raise MesetaError(f"{self.owner} cannot be traced ({problem}); {SUPPORTED_OPERATIONS}") from error


@dataclass(frozen=True, eq=False)
class _SymbolicHyper(Hyper):
    """A Hyper, as optimizers' annotations say, whose numbers are symbols."""

    lr: Any
    step: Any
    embedding_dim: Any


@dataclass(frozen=True)
class PassResult:
    """What one pass leaves behind."""

    weight: Tensor
    """[U, D]."""
    state: list[Tensor]
    """[U, D] or [U, 1], by index."""
    summands: list[Tensor]
    """[U, D] each, of a pass that computes statistics."""


def interpret(
    code: RowCode, uniforms: Sequence[float], w: Tensor, g: Tensor, state: Sequence[Tensor], stats: Sequence[Tensor]
) -> PassResult:
    """One pass in plain torch: w and g are [U, D], the state [U, D] or [U, 1], statistics of whole rows [U, 1]."""
    registers: dict[int, Tensor] = {0: g}
    registers |= {FIRST_UNIFORM + k: torch.tensor(value, dtype=g.dtype) for k, value in enumerate(uniforms)}
    new_w, new_state, summands = w, list(state), dict[int, Tensor]()
    for number, dst, a, b, c in code.instructions.tolist():
        op = Op(number)
        if op is Op.LOAD_WEIGHT:
            registers[dst] = w
        elif op is Op.LOAD_STATE:
            registers[dst] = state[a]
        elif op is Op.LOAD_STAT:
            registers[dst] = stats[a]
        elif op is Op.STORE_WEIGHT:
            new_w = registers[a].expand_as(w)
        elif op is Op.STORE_STATE:
            new_state[b] = registers[a].expand_as(state[b])
        elif op is Op.STORE_STAT:
            summands[b] = registers[a]
        elif op is Op.SUM:
            registers[dst] = sum_across_blocks(sum_in_blocks(registers[a]))[:, None]
        else:
            registers[dst] = _COMPUTE[op](*(registers[operand] for operand in (a, b, c) if operand >= 0))
    return PassResult(weight=new_w, state=new_state, summands=[summands[k] for k in sorted(summands)])


def exact_sqrt(value: Tensor) -> Tensor:
    """Square root as IEEE 754 rounds it; on CPUs torch's own is off by one unit in the last place here and there."""
    return torch.from_numpy(np.sqrt(value.numpy())) if value.device.type == "cpu" else value.sqrt()


_COMPUTE: dict[Op, Callable[..., Tensor]] = {
    Op.ADD: torch.add,
    Op.SUB: torch.sub,
    Op.MUL: torch.mul,
    Op.DIV: torch.div,
    Op.MAX: torch.maximum,
    Op.MIN: torch.minimum,
    Op.GREATER: lambda a, b: (a > b).to(a.dtype),
    Op.SQRT: exact_sqrt,
    Op.ABS: torch.abs,
    Op.SIGN: torch.sign,
    Op.NEG: torch.neg,
    Op.WHERE: lambda a, b, c: torch.where(a > 0, b, c),
}
