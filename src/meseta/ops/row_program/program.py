"""Tracing of row optimizers to programs. The compiled core, GPU kernels and plain PyTorch run the same instructions."""
# `trace` runs the Python functions of an optimizer once on symbols. Their graph is lowered to `RowCode`.

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
"""Names of states that checkpoints use for other columns."""


@dataclass(frozen=True, eq=False)
class RowProgram:
    """Program of a row optimizer, sufficient to run it without its Python functions."""

    name: str
    state_names: tuple[str, ...]
    """Names of states, in the order of their indices."""
    state_kinds: tuple[Kind, ...]
    """Kind of each state: 'element' for [rows, D], 'row' for [rows]."""
    stat_names: tuple[tuple[str, ...], ...]
    """Names of the statistics of each stage. Their indices count over all stages."""
    fused_update: RowCode
    """Update of whole rows. It computes the statistics itself (SUM)."""
    stages: tuple[RowCode, ...]
    """Code of each stage. It loads the statistics of earlier stages, and stores its summands."""
    staged_update: RowCode
    """Update that loads all statistics."""
    numbers: tuple[NumberEntry, ...]
    """Fields of Hyper, constants, and functions of earlier numbers."""
    uniforms: tuple[int, ...]
    """Index in `numbers` of each uniform."""

    def uniform_values(self, hyper: Hyper) -> list[float]:
        """Return all uniforms of a step, computed in float64. Raises MesetaError if one cannot be computed."""
        values: list[Any] = []
        try:
            for entry in self.numbers:
                if isinstance(entry, tuple):
                    function, a, b = entry
                    values.append(function(values[a], values[b]))
                else:
                    values.append(getattr(hyper, entry) if isinstance(entry, str) else entry)
            return [float(values[index]) for index in self.uniforms]
        except (ArithmeticError, TypeError) as error:  # TypeError: the square root of a negative number is complex.
            raise MesetaError(
                f"row optimizer {self.name!r}: a number of the step cannot be computed ({error}) with {hyper}; "
                "change its constants"
            ) from None


def state_kinds(optimizer: RowOptimizer) -> dict[str, Kind]:
    """Return names and kinds of an optimizer's state. Raises MesetaError if one cannot be stored."""
    owner = f"row optimizer {optimizer.name!r}"
    kinds: dict[str, Kind] = {}
    for name, tensor in optimizer.init(torch.zeros(2, 3)).items():
        if not name.isidentifier() or name in RESERVED_STATE_NAMES:
            raise MesetaError(f"{owner}: the state name {name!r} must be an identifier other than 'id' and 'row'")
        if tuple(tensor.shape) not in ((2, 3), (2,)) or tensor.dtype != torch.float32:
            raise MesetaError(
                f"{owner}: state {name!r} of float32 rows [2, 3] is {tensor.dtype} {list(tensor.shape)}, but must be "
                "float32 [2, 3] or [2]; create it with element_state or row_state"
            )
        kinds[name] = "element" if tensor.dim() == 2 else "row"
    return kinds


@cache
def trace(optimizer: RowOptimizer) -> RowProgram:
    """Return the program of an optimizer. It is cached.

    Raises MesetaError if the Python functions cannot be traced, names or kinds of states change, or the program needs
    too many registers.
    """
    return _Tracer(optimizer).program()


class _Tracer:
    """Traces the functions of one optimizer."""

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
        loaded: dict[str, Symbol] = {}
        summed: dict[str, Symbol] = {}
        stages: list[list[StoreOutput]] = []
        stat_names: list[tuple[str, ...]] = []
        for stage in self.optimizer.row_stats:
            summands = self._summands(stage, loaded)
            for name, summand in self._summands(stage, summed).items():
                summed[name] = self.graph.symbol(Op.SUM, summand)
            for name in summands:
                loaded[name] = self.graph.leaf(Op.LOAD_STAT, "row", len(loaded))
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
            staged_update=lower(name, self._update(loaded), slots),
            numbers=tuple(self.graph.numbers),
            uniforms=tuple(slots),
        )

    def _summands(self, stage: Callable[..., Any], stats: dict[str, Symbol]) -> dict[str, Symbol]:
        summands = self._run(stage, stats)
        if not isinstance(summands, dict) or not summands:
            raise MesetaError(f"{self.owner}: a stage of row_stats must return summands by name, got {summands!r}")
        for name, summand in summands.items():
            if name in stats:
                raise MesetaError(f"{self.owner}: two stages of row_stats return {name!r}; rename one of them")
            if not isinstance(summand, Symbol) or summand.kind != "element":
                raise MesetaError(f"{self.owner}: summand {name!r} must be a value per element, such as g * g")
        return summands

    def _update(self, stats: dict[str, Symbol]) -> list[StoreOutput]:
        answer = self._run(self.optimizer.update, stats)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            raise MesetaError(f"{self.owner}: update must return (new rows, new state by name), got {answer!r}")
        rows, state = answer
        if set(state) != set(self.kinds):
            raise MesetaError(f"{self.owner}: update returns states {sorted(state)}, but init {sorted(self.kinds)}")
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
                f"{self.owner}: {what} is one number per row, but update returns one per element; "
                "sum it over the row in row_stats, or create it with element_state"
            )
        return stored

    def _run(self, function: Callable[..., Any], stats: dict[str, Symbol]) -> Any:
        try:
            return function(self.w, self.g, dict(self.state), dict(stats), self.hyper)
        except MesetaError as error:
            raise MesetaError(f"{self.owner}: {error}") from error
        except Exception as error:  # Python or torch may raise anything for a symbol.
            problem = f"{type(error).__name__}: {error}"
            raise MesetaError(f"{self.owner} cannot be traced ({problem}); {SUPPORTED_OPERATIONS}") from error


@dataclass(frozen=True, eq=False)
class _SymbolicHyper(Hyper):
    """A Hyper whose numbers are symbols."""

    lr: Any
    step: Any
    embedding_dim: Any


@dataclass(frozen=True)
class PassResult:
    """Result of one pass over the touched rows."""

    weight: Tensor
    """Rows after the pass, [U, D]."""
    state: list[Tensor]
    """States after the pass, [U, D] or [U, 1] each."""
    summands: list[Tensor]
    """Summands [U, D] of the statistics that the pass computes."""


def interpret(
    code: RowCode, uniforms: Sequence[float], w: Tensor, g: Tensor, state: Sequence[Tensor], stats: Sequence[Tensor]
) -> PassResult:
    """Run one pass in plain PyTorch. w and g are [U, D], states [U, D] or [U, 1], statistics of whole rows [U, 1]."""
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
    """Return the square root as IEEE 754 rounds it. Torch's own differs in the last place for some CPU values."""
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
