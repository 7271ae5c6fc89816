"""Symbols for tracing row optimizers. Equal expressions are the same node of the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, TypeAlias

from meseta.spec import MesetaError

Kind: TypeAlias = Literal["element", "row"]
"""Kind of a value: one number per element, or one per row."""

SUPPORTED_OPERATIONS = (
    "a row optimizer may use + - * / and unary minus, where(a > b, chosen, other) of meseta.optim, the methods sqrt(), "
    "abs(), sign(), clamp(min=, max=), maximum(value) and minimum(value), and ** between plain numbers such as "
    "h.step; Python's `if` may test constants, but not values"
)


class Op(IntEnum):
    """Operation of a program. The compiled core uses the same numbers."""

    ADD = 0
    SUB = 1
    MUL = 2
    DIV = 3
    MAX = 4
    """Maximum. NaN if either operand is NaN."""
    MIN = 5
    """Minimum. NaN if either operand is NaN."""
    GREATER = 6
    """1 if a > b, else 0."""
    SQRT = 7
    """Square root, correctly rounded."""
    ABS = 8
    SIGN = 9
    """Sign: -1, 0 or 1. The sign of NaN is 0."""
    NEG = 10
    WHERE = 11
    """b if a > 0, else c."""
    SUM = 12
    """Sum of an element register over all columns, in blocks of 16. The result is a row register."""
    LOAD_WEIGHT = 13
    LOAD_STATE = 14
    """Load state number a."""
    LOAD_STAT = 15
    """Load statistic number a, counted over all stages."""
    STORE_WEIGHT = 16
    """Store register a as the new row."""
    STORE_STATE = 17
    """Store register a as state number b."""
    STORE_STAT = 18
    """Store register a as the summands of statistic number b of its stage."""


def _unsupported(what: str) -> MesetaError:
    return MesetaError(f"{what} cannot be traced: {SUPPORTED_OPERATIONS}")


class _SymbolBase:
    """Base of symbols. Raises a MesetaError for operations that cannot be traced."""

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise _unsupported("a decision in Python that depends on a value")

    def __eq__(self, other: object) -> bool:
        raise _unsupported("==")

    def __ne__(self, other: object) -> bool:
        raise _unsupported("!=")

    def __ge__(self, other: object) -> bool:
        raise _unsupported(">=")

    def __le__(self, other: object) -> bool:
        raise _unsupported("<=")

    def _in_place(self, other: object) -> Any:
        raise _unsupported("an update in place (+=, -=, *=, /=), which would change the caller's tensors,")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = _in_place

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and torch probe such names, and expect AttributeError.
            raise AttributeError(name)
        raise _unsupported(f"the method or attribute {name!r}")


@dataclass(frozen=True)
class _OfFirst:
    function: Callable[[Any], float]

    def __call__(self, first: Any, _: Any) -> float:
        return self.function(first)


class ScalarSymbol(_SymbolBase):
    """Symbol for a number that is equal for all rows, such as lr, step, embedding_dim and functions of them."""

    def __init__(self, graph: SymbolGraph, index: int) -> None:
        self.graph = graph
        self.index = index
        """Index in `graph.numbers`."""
        self.serial = -1 - index

    def _apply(self, function: Callable[[Any, Any], Any], other: Any, swap: bool = False) -> Any:
        if isinstance(other, Symbol):
            return NotImplemented
        partner = self.graph.operand(other)
        return self.graph.number(function, *((partner, self) if swap else (self, partner)))

    def map(self, function: Callable[[Any], float]) -> ScalarSymbol:
        """Return the symbol of a function of this number."""
        return self.graph.number(_OfFirst(function), self, self)

    def __add__(self, other: Any) -> Any:
        return self._apply(operator.add, other)

    def __radd__(self, other: Any) -> Any:
        return self._apply(operator.add, other, swap=True)

    def __sub__(self, other: Any) -> Any:
        return self._apply(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._apply(operator.sub, other, swap=True)

    def __mul__(self, other: Any) -> Any:
        return self._apply(operator.mul, other)

    def __rmul__(self, other: Any) -> Any:
        return self._apply(operator.mul, other, swap=True)

    def __truediv__(self, other: Any) -> Any:
        return self._apply(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._apply(operator.truediv, other, swap=True)

    def __pow__(self, other: Any) -> Any:
        return self._apply(operator.pow, other)

    def __rpow__(self, other: Any) -> Any:
        return self._apply(operator.pow, other, swap=True)

    def __neg__(self) -> Any:
        return self * -1

    def __gt__(self, other: object) -> Any:
        if isinstance(other, Symbol):
            return NotImplemented
        raise _unsupported("a comparison of two plain numbers")

    def __lt__(self, other: object) -> Any:
        if isinstance(other, Symbol):
            return NotImplemented
        raise _unsupported("a comparison of two plain numbers")


class Symbol(_SymbolBase):
    """Symbol for a value per element or per row. It is a node of the graph."""

    def __init__(
        self, graph: SymbolGraph, op: Op | None, operands: tuple[Symbol | ScalarSymbol, ...], index: int = 0
    ) -> None:
        self.graph = graph
        self.op = op
        """Operation, or `None` for the gradient, which is an input."""
        self.operands = operands
        self.index = index
        """Index of the loaded state or statistic."""
        self.kind: Kind = "row"
        self.serial = len(graph.symbols)

    def __add__(self, other: Any) -> Symbol:
        return self.graph.symbol(Op.ADD, self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Symbol:
        return self.graph.symbol(Op.SUB, self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return self.graph.symbol(Op.SUB, other, self)

    def __mul__(self, other: Any) -> Symbol:
        return self.graph.symbol(Op.MUL, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Symbol:
        return self.graph.symbol(Op.DIV, self, other)

    def __rtruediv__(self, other: Any) -> Symbol:
        # Torch computes `number / tensor` as the reciprocal times the number. Do the same, for equal bits.
        reciprocal = self.graph.symbol(Op.DIV, 1.0, self)
        return reciprocal if isinstance(other, int | float) and other == 1 else reciprocal * other

    def __pow__(self, other: Any) -> Symbol:
        raise _unsupported("a power of a value (write g * g)")

    def __rpow__(self, other: Any) -> Symbol:
        raise _unsupported("a value in an exponent")

    def __neg__(self) -> Symbol:
        return self.graph.symbol(Op.NEG, self)

    def __gt__(self, other: Any) -> Condition:
        return Condition(self.graph, self, other)

    def __lt__(self, other: Any) -> Condition:
        return Condition(self.graph, other, self)

    def sqrt(self) -> Symbol:
        """Return the square root, correctly rounded."""
        return self.graph.symbol(Op.SQRT, self)

    def abs(self) -> Symbol:
        """Return the absolute value."""
        return self.graph.symbol(Op.ABS, self)

    def sign(self) -> Symbol:
        """Return the sign: -1, 0 or 1."""
        return self.graph.symbol(Op.SIGN, self)

    def maximum(self, other: Any) -> Symbol:
        """Return the larger of two values."""
        if not isinstance(other, Symbol):
            raise _unsupported("maximum of a plain number (write clamp(min=number))")
        return self.graph.symbol(Op.MAX, self, other)

    def minimum(self, other: Any) -> Symbol:
        """Return the smaller of two values."""
        if not isinstance(other, Symbol):
            raise _unsupported("minimum of a plain number (write clamp(max=number))")
        return self.graph.symbol(Op.MIN, self, other)

    def clamp(self, min: Any = None, max: Any = None) -> Symbol:
        """Return the value limited to `min`..`max`, which must be plain numbers."""
        if isinstance(min, Symbol) or isinstance(max, Symbol):
            raise _unsupported("clamp to a value (write maximum(value) or minimum(value))")
        raised = self if min is None else self.graph.symbol(Op.MAX, self, min)
        return raised if max is None else self.graph.symbol(Op.MIN, raised, max)


@dataclass(frozen=True, eq=False)
class Condition:
    """The comparison `greater > smaller`, as an argument of `where`."""

    graph: SymbolGraph
    greater: Any
    smaller: Any

    def __bool__(self) -> bool:
        raise _unsupported("a decision in Python that depends on a value")

    def choose(self, chosen: Any, other: Any) -> Symbol:
        """Return a symbol that is `chosen` if the condition holds, else `other`."""
        if not isinstance(chosen, Symbol) and not isinstance(other, Symbol):
            raise MesetaError("where: one choice must be a value of the row, got two plain numbers")
        is_zero = isinstance(self.smaller, int | float) and self.smaller == 0
        positive = self.greater if is_zero else self.graph.symbol(Op.GREATER, self.greater, self.smaller)
        return self.graph.symbol(Op.WHERE, positive, chosen, other)


NumberEntry: TypeAlias = tuple[Callable[[Any, Any], Any], int, int] | str | int | float
"""Entry of `SymbolGraph.numbers`: a function of two earlier numbers, a field name of Hyper, or a constant."""


@dataclass(eq=False)
class SymbolGraph:
    """Graph of all operations in one trace."""

    symbols: dict[tuple[Any, ...], Symbol] = field(default_factory=dict)
    numbers: list[NumberEntry] = field(default_factory=list)
    number_cache: dict[tuple[Any, ...], ScalarSymbol] = field(default_factory=dict)

    def leaf(self, op: Op | None, kind: Kind, index: int = 0) -> Symbol:
        """Return the node of the gradient (`op` is `None`), or of a loaded row, state or statistic."""
        symbol = self.symbols.setdefault((op, index), Symbol(self, op, (), index))
        symbol.kind = kind
        return symbol

    def symbol(self, op: Op, *arguments: Any) -> Symbol:
        """Return the node of an operation. Equal operations share a node."""
        operands: Sequence[Symbol | ScalarSymbol] = [self.operand(argument) for argument in arguments]
        if op in (Op.ADD, Op.MUL):  # Both orders of operands give the same bits, so they share a node.
            operands = sorted(operands, key=lambda operand: operand.serial)
        symbol = self.symbols.setdefault((op, *map(id, operands)), Symbol(self, op, tuple(operands)))
        kinds = [operand.kind for operand in operands if isinstance(operand, Symbol)]
        symbol.kind = "element" if "element" in kinds and op is not Op.SUM else "row"
        return symbol

    def operand(self, value: Any) -> Symbol | ScalarSymbol:
        """Return a symbol unchanged, or a plain number as a constant. Raises MesetaError for other values."""
        if isinstance(value, Symbol | ScalarSymbol):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _unsupported(f"{type(value).__name__} as an operand")
        return self._number(repr(value), value=value)

    def hyper(self, name: str) -> ScalarSymbol:
        """Return the symbol of a field of Hyper."""
        return self._number("hyper", name, value=name)

    def number(self, function: Callable[[Any, Any], Any], a: Any, b: Any) -> ScalarSymbol:
        """Return the symbol of a function of two numbers."""
        return self._number(function, a.index, b.index, value=(function, a.index, b.index))

    def _number(self, *key: Any, value: NumberEntry) -> ScalarSymbol:
        if key not in self.number_cache:
            self.number_cache[key] = ScalarSymbol(self, len(self.numbers))
            self.numbers.append(value)
        return self.number_cache[key]
