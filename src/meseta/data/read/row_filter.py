"""Conditions on rows, such as "age >= 18 and country != 'ES'": parsed into comparisons of columns, never run as code.

A condition speaks of the values of the sources. Dense columns hold scaled logarithms and sparse ones rows of tables,
so constants go the way that `meseta prepare` took the values, and are compared there: exactly for dense columns, since
scaling keeps their order, and as exactly as hashing can for sparse ones.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from meseta.data.dataset.columns import DataColumn, dataset_columns
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.vocabulary import read_vocabulary_values
from meseta.data.hash_categories import hash_to_rows
from meseta.data.raw_rows import log_transform
from meseta.data.whole_numbers import respell_whole_numbers
from meseta.errors import format_value
from meseta.spec import MesetaError, suggest

Mask = NDArray[np.bool_]
Predicate = Callable[[pa.Table], Mask]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>[^\W\d][\w.]*)|`(?P<quoted>[^`]+)`"
    r"|(?P<text>'[^']*'|\"[^\"]*\")|(?P<sign>==|!=|<=|>=|<|>|\(|\)|\[|\]|,))"
)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge
}  # fmt: skip
_KEYWORDS = ("and", "or", "not", "in")
MAX_CONSTANTS = 4096
"""Maximum number of constants in a condition, in its comparisons and lists together: it bounds the time to read one and
to apply it to a row."""
_MAX_DEPTH = 50


@dataclass(frozen=True)
class _Token:
    kind: str
    """'number', 'name', 'text', 'sign' (words too) or 'end'."""
    text: str
    offset: int
    """Where it begins."""


class RowFilter:
    """A condition, ready to be asked of tables."""

    def __init__(self, condition: str, dataset: Dataset) -> None:
        """Reads `condition` for the columns of `dataset`.

        condition := comparison, joined by `and`, `or`, `not` and parentheses, in the usual order
        comparison := column (== != < <= > >=) constant, or column [not] in [constant, ...]
        column := a name, in backticks where it is not made of letters, digits, dots and underscores
        constant := a number, or a text in single or double quotes

        Raises MesetaError, with the place, for what is no condition, for unknown columns, and for comparisons that a
        column does not allow.
        """
        self.condition = condition
        self._dataset = dataset
        self._columns = {column.name: column for column in dataset_columns(dataset)}
        self._used_columns: list[str] = []
        self._tokens = self._tokenize()
        self._next = next(self._tokens)
        self._num_constants = 0
        self._depth = 0
        self._predicate = self._parse_or()
        if self._next.kind != "end":
            self._fail(f"expected 'and', 'or' or the end, got {format_value(self._next.text)}")

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it looks at."""
        return tuple(dict.fromkeys(self._used_columns))

    def __call__(self, table: pa.Table) -> Mask:
        """Which rows of a table with at least those columns fulfil it [n]."""
        return self._predicate(table)

    def _tokenize(self) -> Iterator[_Token]:
        at = 0
        text = self.condition.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                rest = text[at:].lstrip()
                self._fail(f"cannot read {rest[:10]!r}", len(text) - len(rest))
            kind = str(match.lastgroup)
            found = match[kind]
            begin = match.start(kind)
            if kind == "name" and found in _KEYWORDS:
                kind = "sign"
            yield _Token("name" if kind == "quoted" else kind, found, begin)
            at = match.end()
        while True:
            yield _Token("end", "the end", len(text))

    def _parse_or(self) -> Predicate:
        parts = [self._parse_and()]
        while self._accept("or"):
            parts.append(self._parse_and())
        return _combine(np.logical_or, parts)

    def _parse_and(self) -> Predicate:
        parts = [self._parse_unary()]
        while self._accept("and"):
            parts.append(self._parse_unary())
        return _combine(np.logical_and, parts)

    def _parse_unary(self) -> Predicate:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._fail(f"more than {_MAX_DEPTH} parentheses or 'not' inside each other")
        if self._accept("not"):
            part = self._parse_unary()
            node: Predicate = lambda table: ~part(table)  # noqa: E731
        elif self._accept("("):
            node = self._parse_or()
            self._expect(")")
        else:
            node = self._parse_comparison()
        self._depth -= 1
        return node

    def _parse_comparison(self) -> Predicate:
        token = self._advance()
        if token.kind != "name":
            self._fail(f"expected a column, got {format_value(token.text)}", token.offset)
        column = self._columns.get(token.text)
        if column is None:
            self._fail(
                f"there is no column {format_value(token.text)}; {suggest(token.text, self._columns)}", token.offset
            )
        self._used_columns.append(column.name)
        is_not = self._accept("not")
        if is_not or self._next.text == "in":
            self._expect("in")
            self._expect("[")
            tokens = [self._parse_constant()]
            while self._accept(","):
                tokens.append(self._parse_constant())
            self._expect("]")
            constants = self._encode_constants(column, "==", tokens)
            return lambda table: np.isin(_column_values(table, column), constants, invert=is_not)
        sign = self._advance()
        if sign.kind != "sign" or sign.text not in _COMPARISONS:
            self._fail(
                f"expected a comparison or 'in' after {column.name!r}, got {format_value(sign.text)}", sign.offset
            )
        [constant] = self._encode_constants(column, sign.text, [self._parse_constant()])
        compare = _COMPARISONS[sign.text]
        return lambda table: compare(_column_values(table, column), constant)

    def _parse_constant(self) -> _Token:
        token = self._advance()
        if token.kind not in ("number", "text"):
            self._fail(f"expected a number or a text in quotes, got {format_value(token.text)}", token.offset)
        self._num_constants += 1
        if self._num_constants > MAX_CONSTANTS:
            self._fail(
                f"more than {MAX_CONSTANTS:,} constants; use fewer, or prepare a column that selects the rows",
                token.offset,
            )
        return token

    def _encode_constants(self, column: DataColumn, sign: str, tokens: Sequence[_Token]) -> list[Any]:
        """Constants as the column would hold them."""
        if column.role == "ids":
            return self._encode_ids(column, sign, tokens)
        return [self._encode_constant(column, token) for token in tokens]

    def _encode_constant(self, column: DataColumn, token: _Token) -> Any:
        text = _constant_text(token)
        if column.role == "time" and token.kind == "text":
            try:
                moment = datetime.fromisoformat(text)
            except ValueError:
                self._fail(
                    f"{format_value(text)} is no time; write it as '2026-01-31 12:00', or in seconds", token.offset
                )
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if token.kind == "text":
            self._fail(
                f"column {column.name!r} holds numbers, so compare it with a number, not {format_value(text)}",
                token.offset,
            )
        if column.role == "id weights":
            self._fail(f"column {column.name!r} holds weights of ids, several per row", token.offset)
        number = float(text)
        if column.role == "group":
            # Whole numbers above 2**53 are told apart; those that int64 has not are compared as floats.
            return (
                int(text) if abs(number) < 2.0**63 and number.is_integer() and text.lstrip("+-").isdigit() else number
            )
        if column.role == "time":
            return number
        if column.role != "dense":
            return np.float32(number)
        feature = next(feature for feature in self._dataset.dense if feature.name == column.name)
        if number < 0 and not feature.signed:
            return np.float32(-np.inf)  # below all values, which prepare took for zero where they were negative
        return np.float32(
            (float(log_transform(np.array([number]), signed=feature.signed)[0]) - feature.mean) / feature.std
        )

    def _encode_ids(self, column: DataColumn, sign: str, tokens: Sequence[_Token]) -> list[int]:
        """Rows of the table of a column, of all constants together: its vocabulary may be a large file."""
        place = tokens[0].offset
        if column.is_list:
            self._fail(f"column {column.name!r} holds several ids per row; take one with a single id", place)
        if sign not in ("==", "!="):
            self._fail(f"categories have no order: compare {column.name!r} by ==, != or in", place)
        feature = next(feature for feature in self._dataset.sparse if feature.name == column.name)
        if feature.made_of:
            parts = " and ".join(map(repr, feature.made_of))
            self._fail(f"column {column.name!r} is made of {parts}; compare those", place)
        texts = [_constant_text(token) for token in tokens]
        values = pa.array([text.encode() for text in texts], pa.large_binary())
        form = self._dataset.source_form
        if form is not None and feature.name in form.whole_numbers:
            values = respell_whole_numbers(values)
        if feature.hash_seed is not None:
            rows = hash_to_rows(values, feature.num_embeddings, int(feature.hash_seed, 16))
            return [int(row) for row in rows]
        rows = pc.index_in(values, value_set=read_vocabulary_values(self._dataset.dir, feature)).to_pylist()
        for token, text, row in zip(tokens, texts, rows, strict=True):
            if row is None:
                self._fail(
                    f"the vocabulary of {column.name!r} does not hold {format_value(text)}, so its rows cannot be told",
                    token.offset,
                )
        return rows

    def _advance(self) -> _Token:
        token, self._next = self._next, next(self._tokens)
        return token

    def _accept(self, sign: str) -> bool:
        if self._next.kind == "sign" and self._next.text == sign:
            self._advance()
            return True
        return False

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            self._fail(f"expected {sign!r}, got {format_value(self._next.text)}")

    def _fail(self, problem: str, place: int | None = None) -> NoReturn:
        at = self._next.offset if place is None else place
        raise MesetaError(f"filter {format_value(self.condition)}, character {at + 1}: {problem}")


def _constant_text(token: _Token) -> str:
    """What a constant says, without quotes and the underscores of numbers."""
    return token.text[1:-1] if token.kind == "text" else token.text.replace("_", "")


def _combine(join: np.ufunc, parts: Sequence[Predicate]) -> Predicate:
    """All parts by `join`, with one mask at a time beside the result."""
    if len(parts) == 1:
        return parts[0]

    def joined(table: pa.Table) -> Mask:
        mask = parts[0](table)
        for part in parts[1:]:
            join(mask, part(table), out=mask)
        return mask

    return joined


def _column_values(table: pa.Table, column: DataColumn) -> NDArray[Any]:
    return table.column(column.name).to_numpy()
