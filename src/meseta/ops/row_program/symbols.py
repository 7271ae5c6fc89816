"""Symbols that record what a row optimizer does with them: equal expressions are one node of one graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, TypeAlias

from meseta.spec import MesetaError

Kind: TypeAlias = Literal["element", "row"]
"""One number per element, or one per row."""

SUPPORTED_OPERATIONS = (
    "a row optimizer may use + - * / and unary minus, where(a > b, chosen, other) of meseta.optim, the methods sqrt(), "
    "abs(), sign(), clamp(min=, max=), maximum(value) and minimum(value), and ** between plain numbers such as "
    "h.step; Python's `if` may ask its constants, never a value"
)


class Op(IntEnum):
    """Operations of a program; the compiled core has the same list."""

    ADD = 0
    SUB = 1
    MUL = 2
    DIV = 3
    MAX = 4
    """NaN where either operand is."""
    MIN = 5
    """NaN where either operand is."""
    GREATER = 6
    """a > b ? 1 : 0."""
    SQRT = 7
    """Correctly rounded."""
    ABS = 8
    SIGN = 9
    """-1, 0 or 1; 0 for NaN."""
    NEG = 10
    WHERE = 11
    """a > 0 ? b : c."""
    SUM = 12
    """Row register = sum of an element operand over all columns, in blocks of 16."""
    LOAD_WEIGHT = 13
    LOAD_STATE = 14
    """a: index of the state."""
    LOAD_STAT = 15
    """a: index among the statistics of all stages."""
    STORE_WEIGHT = 16
    """a: what is stored."""
    STORE_STATE = 17
    """a: what is stored; b: index of the state."""
    STORE_STAT = 18
    """a: the summand, per element; b: index within its stage."""


def _unsupported(what: str) -> MesetaError:
    return MesetaError(f"{what} cannot be traced: {SUPPORTED_OPERATIONS}")


class _SymbolBase:
    """What neither symbol can do, so that it fails with words and not in silence."""

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
        if name.startswith("__"):  # Python and torch ask for these themselves
            raise AttributeError(name)
        raise _unsupported(f"the method or attribute {name!r}")


class ScalarSymbol(_SymbolBase):
    """A symbol for a number that is equal for all rows: lr, step, embedding_dim, and what is made of them."""

    def __init__(self, graph: SymbolGraph, index: int) -> None:
        self.graph = graph
        self.index = index
        """Position in `graph.numbers`."""
        self.serial = -1 - index

    def _apply(self, function: Callable[[Any, Any], Any], other: Any, swap: bool = False) -> Any:
        if isinstance(other, Symbol):
            return NotImplemented
        partner = self.graph.operand(other)
        return self.graph.number(function, *((partner, self) if swap else (self, partner)))

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
    """A symbol for a value per element or per row: one node of the graph."""

    def __init__(
        self, graph: SymbolGraph, op: Op | None, operands: tuple[Symbol | ScalarSymbol, ...], index: int = 0
    ) -> None:
        self.graph = graph
        self.op = op
        """None: the gradient, which is there from the start."""
        self.operands = operands
        self.index = index
        """Which state or statistic is loaded."""
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
        # torch takes `number / tensor` as the tensor's reciprocal times the number, and the bits are to be the same.
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
        """Square root, correctly rounded."""
        return self.graph.symbol(Op.SQRT, self)

    def abs(self) -> Symbol:
        """Absolute value."""
        return self.graph.symbol(Op.ABS, self)

    def sign(self) -> Symbol:
        """-1, 0 or 1."""
        return self.graph.symbol(Op.SIGN, self)

    def maximum(self, other: Any) -> Symbol:
        """The larger of two values."""
        if not isinstance(other, Symbol):
            raise _unsupported("maximum of a plain number (write clamp(min=number))")
        return self.graph.symbol(Op.MAX, self, other)

    def minimum(self, other: Any) -> Symbol:
        """The smaller of two values."""
        if not isinstance(other, Symbol):
            raise _unsupported("minimum of a plain number (write clamp(max=number))")
        return self.graph.symbol(Op.MIN, self, other)

    def clamp(self, min: Any = None, max: Any = None) -> Symbol:
        """Not below `min`, not above `max`, both plain numbers."""
        if isinstance(min, Symbol) or isinstance(max, Symbol):
            raise _unsupported("clamp to a value (write maximum(value) or minimum(value))")
        raised = self if min is None else self.graph.symbol(Op.MAX, self, min)
        return raised if max is None else self.graph.symbol(Op.MIN, raised, max)


@dataclass(frozen=True, eq=False)
class Condition:
    """`greater > smaller`, for `where` alone."""

    graph: SymbolGraph
    greater: Any
    smaller: Any

    def __bool__(self) -> bool:
        raise _unsupported("a decision in Python that depends on a value")

    def choose(self, chosen: Any, other: Any) -> Symbol:
        """A symbol for `chosen` where the condition holds and `other` elsewhere."""
        if not isinstance(chosen, Symbol) and not isinstance(other, Symbol):
            raise MesetaError("where: one choice must be a value of the row, got two plain numbers")
        is_zero = isinstance(self.smaller, int | float) and self.smaller == 0
        positive = self.greater if is_zero else self.graph.symbol(Op.GREATER, self.greater, self.smaller)
        return self.graph.symbol(Op.WHERE, positive, chosen, other)


NumberEntry: TypeAlias = tuple[Callable[[Any, Any], Any], int, int] | str | int | float
"""A function of two former numbers, the name of a field of Hyper, or a constant."""


@dataclass(eq=False)
class SymbolGraph:
    """All that one trace has seen."""

    symbols: dict[tuple[Any, ...], Symbol] = field(default_factory=dict)
    numbers: list[NumberEntry] = field(default_factory=list)
    number_cache: dict[tuple[Any, ...], ScalarSymbol] = field(default_factory=dict)

    def leaf(self, op: Op | None, kind: Kind, index: int = 0) -> Symbol:
        """The gradient (None), or what LOAD_WEIGHT, LOAD_STATE or LOAD_STAT loads."""
        symbol = self.symbols.setdefault((op, index), Symbol(self, op, (), index))
        symbol.kind = kind
        return symbol

    def symbol(self, op: Op, *arguments: Any) -> Symbol:
        """The node of an operation, made at the first use."""
        operands: Sequence[Symbol | ScalarSymbol] = [self.operand(argument) for argument in arguments]
        if op in (Op.ADD, Op.MUL):  # either order gives the same bits
            operands = sorted(operands, key=lambda operand: operand.serial)
        symbol = self.symbols.setdefault((op, *map(id, operands)), Symbol(self, op, tuple(operands)))
        kinds = [operand.kind for operand in operands if isinstance(operand, Symbol)]
        symbol.kind = "element" if "element" in kinds and op is not Op.SUM else "row"
        return symbol

    def operand(self, value: Any) -> Symbol | ScalarSymbol:
        """A symbol as it is, a plain number as a constant; raises MesetaError for anything else."""
        if isinstance(value, Symbol | ScalarSymbol):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _unsupported(f"{type(value).__name__} as an operand")
        return self._number(repr(value), value=value)

    def hyper(self, name: str) -> ScalarSymbol:
        """A field of Hyper."""
        return self._number("hyper", name, value=name)

    def number(self, function: Callable[[Any, Any], Any], a: Any, b: Any) -> ScalarSymbol:
        """A function of two numbers."""
        return self._number(function, a.index, b.index, value=(function, a.index, b.index))

    def _number(self, *key: Any, value: NumberEntry) -> ScalarSymbol:
        if key not in self.number_cache:
            self.number_cache[key] = ScalarSymbol(self, len(self.numbers))
            self.numbers.append(value)
        return self.number_cache[key]
