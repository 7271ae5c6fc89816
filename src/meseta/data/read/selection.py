"""Filters of rows, such as "age >= 18 and country != 'ES'". They are parsed, and never run as code.

A condition refers to raw values, but dense columns contain scaled logarithms and sparse columns contain table rows.
Constants are therefore encoded as `meseta prepare` encodes values. Comparisons of dense columns are exact, because
scaling preserves the order. Comparisons of sparse columns are exact up to hash collisions.
"""

from __future__ import annotations

import math
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
from meseta.data.read.order import random_words
from meseta.data.schema.layout import log_transform
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
# Bounds the time to parse a condition and to apply it to a row.
MAX_CONSTANTS = 4096
_MAX_DEPTH = 50


@dataclass(frozen=True)
class _Token:
    kind: str
    """'number', 'name', 'text', 'sign' (including keywords) or 'end'."""
    text: str
    offset: int
    """Position of the first character in the condition."""


class RowFilter:
    """Parsed condition that can be applied to tables."""

    def __init__(self, condition: str, dataset: Dataset) -> None:
        """Parse `condition` for the columns of `dataset`.

            condition := comparison, joined by `and`, `or`, `not` and parentheses, with the usual precedence
            comparison := column (== != < <= > >=) constant, or column [not] in [constant, ...]
            column := a name, in backticks unless it consists of letters, digits, dots and underscores
            constant := a number, or a text in single or double quotes

        Raises MesetaError with the position if the condition is invalid, a column is unknown, or a column does not
        allow the comparison.
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
        return tuple(dict.fromkeys(self._used_columns))

    def __call__(self, table: pa.Table) -> Mask:
        """Return the mask [n] of the rows that satisfy the condition. The table needs at least `columns`."""
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
            token_text = match[kind]
            begin = match.start(kind)
            if kind == "name" and token_text in _KEYWORDS:
                kind = "sign"
            yield _Token("name" if kind == "quoted" else kind, token_text, begin)
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
            self._fail(f"parentheses or 'not' are nested more than {_MAX_DEPTH} levels deep")
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
        if column is None and token.text in self._dataset.without:
            self._fail(f"column {token.text!r} is left out by data.without; remove it from one of them", token.offset)
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
                    f"{format_value(text)} is not a time; write it as '2026-01-31 12:00', or in seconds", token.offset
                )
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if token.kind == "text":
            self._fail(
                f"column {column.name!r} holds numbers; compare it with a number, not with {format_value(text)}",
                token.offset,
            )
        if column.role == "id weights":
            self._fail(f"column {column.name!r} holds several id weights per row and cannot be compared", token.offset)
        number = float(text)
        if column.role == "group":
            # Keep whole numbers as int, because a float cannot represent all above 2**53. Numbers beyond int64 are
            # compared as floats.
            return (
                int(text) if abs(number) < 2.0**63 and number.is_integer() and text.lstrip("+-").isdigit() else number
            )
        if column.role == "time":
            return number
        if column.role != "dense":
            return np.float32(number)
        feature = next(feature for feature in self._dataset.dense if feature.name == column.name)
        if number < 0 and not feature.signed:
            return np.float32(-np.inf)  # Below all values: preparation maps negative values to 0.
        return np.float32(
            (float(log_transform(np.array([number]), signed=feature.signed)[0]) - feature.mean) / feature.std
        )

    def _encode_ids(self, column: DataColumn, sign: str, tokens: Sequence[_Token]) -> list[int]:
        place = tokens[0].offset
        if column.is_list:
            self._fail(f"column {column.name!r} holds several ids per row; use a column with one id per row", place)
        if sign not in ("==", "!="):
            self._fail(f"categories have no order; compare {column.name!r} with ==, != or in", place)
        feature = next(feature for feature in self._dataset.sparse if feature.name == column.name)
        if feature.made_of:
            parts = " and ".join(map(repr, feature.made_of))
            self._fail(f"column {column.name!r} is made of {parts}; compare these columns", place)
        # All constants are looked up together, because the vocabulary may be a large file.
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
                    f"{format_value(text)} is not in the vocabulary of {column.name!r}, so its rows cannot be selected",
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
    return token.text[1:-1] if token.kind == "text" else token.text.replace("_", "")


def _combine(join: np.ufunc, parts: Sequence[Predicate]) -> Predicate:
    # At most one mask is allocated in addition to the result.
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


_NEGATIVES_KEY = 2  # Differs from the keys of the row order.


@dataclass(frozen=True)
class ExcludedRows:
    """Number of rows of a split that are not read."""

    by_filter: int = 0
    negatives: int = 0
    """Number of negatives that were not drawn, among the rows that pass the filter."""


class RowSelection:
    """Rule that selects rows. It depends on the values of a row, its number in the split, and the seed."""

    def __init__(self, dataset: Dataset, *, condition: str | None, negative_keep: float, seed: int) -> None:
        """Create the rule.

        Raises MesetaError if the condition does not match the dataset, `negative_keep` is not in (0, 1], or negatives
        are excluded from a dataset with several labels.
        """
        if not 0 < negative_keep <= 1:
            raise MesetaError(f"reader: negative_keep must be above 0 and at most 1, got {negative_keep}")
        if negative_keep < 1 and len(dataset.labels) > 1:
            raise MesetaError(
                "reader: negative_keep needs one label, because a row may be negative for one label and positive for "
                f"another; choose one of {', '.join(dataset.labels)} with data.labels, or omit negative_keep"
            )
        self._filter = None if condition is None else RowFilter(condition, dataset)
        self._label = dataset.labels[0] if negative_keep < 1 else None
        self._limit = np.uint64(min(int(negative_keep * 2**64), 2**64 - 1))
        self._seed = seed

    @property
    def columns(self) -> list[str]:
        """Columns on which the selection depends. Empty if all rows are read."""
        decisive = [] if self._filter is None else list(self._filter.columns)
        return list(dict.fromkeys([*decisive, *([] if self._label is None else [self._label])]))

    def mask(self, table: pa.Table, first_row: int) -> tuple[NDArray[np.bool_], ExcludedRows]:
        """Return (mask [n] of the selected rows, excluded rows) of a table that starts at `first_row` of the split."""
        kept = np.ones(table.num_rows, bool) if self._filter is None else self._filter(table)
        by_filter = int(kept.size - kept.sum())
        if self._label is None:
            return kept, ExcludedRows(by_filter)
        numbers = np.arange(first_row, first_row + table.num_rows)
        drawn = random_words(numbers, self._seed, _NEGATIVES_KEY) < self._limit
        # Positives are always kept.
        chosen = kept & (drawn | (table.column(self._label).to_numpy() != 0))
        return chosen, ExcludedRows(by_filter, int(kept.sum() - chosen.sum()))


def calibration_shift(negative_keep: float) -> float:
    """Return log(negative_keep), the shift of a model's logits that corrects for training on this share of the
    negatives.

    Source: He et al., "Practical lessons from predicting clicks on ads at Facebook", ADKDD 2014, section 6.3. If p is
    the prediction on the sampled rows and w the share of the negatives, q = p / (p + (1 - p) / w), so logit(q) is
    logit(p) + log(w).
    """
    return math.log(negative_keep)
