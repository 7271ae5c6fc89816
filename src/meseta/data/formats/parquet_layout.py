"""The layout of Parquet files, from the types of their columns and a sample of their rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from meseta.data.formats.format import Source
from meseta.data.formats.parquet_files import parquet_sample, parquet_schema
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.schema.guess import (
    NAMELESS,
    Guess,
    guess_column,
    guess_label,
    guess_time,
    has_negative,
    other_outcome,
)
from meseta.data.schema.labels import raw_label_columns, with_signed_labels
from meseta.data.schema.number_spelling import holds_whole_numbers, with_whole_numbers
from meseta.data.schema.roles import NamedColumns, reasons_of, schema_of
from meseta.data.schema.schema import Schema, check_names, layout_of
from meseta.spec import MesetaError

_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""Columns in which pandas keeps the labels of rows."""
_LIST_ROWS = 1000
"""Sampled rows of columns of lists."""


def parquet_layout(sources: Sequence[Source], named: NamedColumns, schema: Schema | None) -> RawLayout:
    """The common layout of all files: as the schema says, else as `named` says, else by types, names and a sample;
    weights of ids by their name beside that of a list.

    Raises MesetaError for a missing column, one of a wrong type, and a file that has other columns.
    """
    first, *others = sources
    reasons: dict[str, str] = {}
    texts: dict[str, list[str]] = {}
    if schema is None:
        schema, reasons, texts = _guessed(sources, named)
        expected = parquet_schema(first).names if others else []
        for source in others:
            _check_same_columns(source, first, expected)
    layout = parquet_layout_of(first, schema)
    for source in others:
        if parquet_layout_of(source, schema) != layout:
            raise MesetaError(
                f"source {str(source.path)!r} has other columns than {str(first.path)!r}: some are lists in one file "
                "only; leave such a column out with --ignore, or the file"
            )
    layout = with_whole_numbers(layout, texts) if texts else layout
    types = layout.reasons
    layout = replace(layout, reasons={name: f"{types[name]}: {reason}" for name, reason in reasons.items()} or types)
    if not layout.plain_labels:
        return layout
    sample = parquet_sample(sources, layout.plain_labels)
    return with_signed_labels(layout, {name: _texts(sample.column(name)) for name in layout.plain_labels})


def _check_same_columns(source: Source, first: Source, expected: Sequence[str]) -> None:
    names = parquet_schema(source).names
    where = f"source {str(source.path)!r} has other columns than {str(first.path)!r}"
    for name in _missing(expected, names)[:1]:
        raise MesetaError(f"{where}: it lacks {name!r}; name the columns that you want in a --schema file")
    for name in _missing(names, expected)[:1]:
        raise MesetaError(f"{where}: it has {name!r} besides; name the columns that you want in a --schema file")


def _missing(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Names without those that are known, in their order."""
    present = {*known}
    return [name for name in names if name not in present]


def _guessed(sources: Sequence[Source], named: NamedColumns) -> tuple[Schema, dict[str, str], dict[str, list[str]]]:
    """The schema, the reasons for it, and sampled values of the columns."""
    schema = parquet_schema(sources[0])
    where = f"source {str(sources[0].path)!r}"
    labels = named.labels(where, schema.names) or (guess_label(schema.names) or "label",)
    raw_labels = raw_label_columns(where, labels, schema.names)
    check_names(where, raw_labels, schema.names)
    names = _missing(schema.names, raw_labels)
    check_names(where, names, schema.names)
    chosen = named.roles(where, names)
    types = dict(zip(schema.names, schema.types, strict=True))
    weights = {
        weight: name for name in names for weight in [_find_weight(types, name)] if weight and weight not in chosen
    }
    free = [field for field in schema if field.name not in raw_labels]
    scalars = [field.name for field in free if _is_scalar(field.type)]
    sample = parquet_sample(sources, scalars)
    texts = {name: _texts(sample.column(name)) for name in scalars}
    lists = [field.name for field in free if _is_list(field.type) and _may_be_ids(field.type.value_type)]
    if lists:
        sample = parquet_sample(sources, lists, _LIST_ROWS)
        texts |= {name: _texts(_distinct_items(sample.column(name))) for name in lists}
    guesses = {
        field.name: chosen.get(field.name) or _guess(field, texts.get(field.name), weights.get(field.name))
        for field in free
    }
    pairs = {
        name: weight
        for weight, name in weights.items()
        if guesses[name].role == "categorical" and guesses[weight].role == "ignore"
    }
    signed = [name for name, values in texts.items() if has_negative(values)]
    return schema_of(labels, guesses, signed).model_copy(update={"weights": pairs}), reasons_of(guesses), texts


def _guess(field: pa.Field, texts: Sequence[str] | None, weighed: str | None) -> Guess:
    """Of one column, from its sampled values, if they are single ones; `weighed`: the column whose weights it holds."""
    kind = field.type
    if not field.name:
        return NAMELESS
    if _PANDAS_INDEX.fullmatch(field.name):
        return Guess("ignore", "the index of pandas")
    if weighed is not None:
        return Guess("ignore", f"the weights of {weighed}")
    if _is_moment(kind):
        return guess_time(field.name, "")
    if _is_list(kind):
        item = kind.value_type
        if is_text(item) or pa.types.is_integer(item) or is_pair(item):
            return other_outcome(field.name) or Guess("categorical", "lists of ids")
        if is_fraction(item) and holds_whole_numbers(texts or ()):
            return other_outcome(field.name) or Guess("categorical", "lists of ids, all of them whole numbers")
        return Guess("ignore", "no feature holds such lists; take ids, or a column for each number")
    if texts is None:
        return Guess("ignore", "no feature holds that")
    if pa.types.is_boolean(kind):
        return other_outcome(field.name) or Guess("dense", "0 and 1")
    guess = guess_column(field.name, texts)
    if guess.role in ("dense", "both", "weight") and not _is_number(kind):
        return Guess("categorical", f"text that looks like numbers; {guess.reason}")
    if guess.role == "both" and is_fraction(kind):
        return Guess("dense", "numbers; --sparse makes whole ones a category")
    return guess


def _texts(column: pa.ChunkedArray) -> list[str]:
    """Sampled values as CSV has them; a whole number without a point, also where the type has fractions."""
    if pa.types.is_boolean(column.type) or is_fraction(column.type):
        column = column.cast(pa.float64())
    values = column.to_pylist()
    if pa.types.is_floating(column.type):
        return ["" if value is None else f"{value:.17g}" for value in values]
    return [
        "" if value is None else value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        for value in values
    ]


def _distinct_items(lists: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values in lists, or the first fields of pairs."""
    items = pc.list_flatten(lists)
    return pa.chunked_array([pc.unique(pc.struct_field(items, [0]) if is_pair(items.type) else items)])


def parquet_layout_of(source: Source, wanted: Schema) -> RawLayout:
    """The layout that a schema file gives. Raises MesetaError for a missing column or one of a wrong type."""
    schema = parquet_schema(source)
    where = f"source {str(source.path)!r}"
    if wanted.multi_valued:
        raise MesetaError(f"{where}: multi_valued is for CSV; in Parquet, lists hold several values")
    check_names(where, list(wanted.weights.values()), schema.names)
    return _checked(where, schema, wanted)


def _checked(where: str, schema: pa.Schema, wanted: Schema) -> RawLayout:
    check_names(where, wanted.columns, schema.names)
    sparse = [_sparse_column(where, schema, name, wanted.weights.get(name)) for name in wanted.categorical]
    layout = layout_of(where, wanted, sparse, schema.names)
    check_names(where, layout.columns, schema.names)
    crossed = [name for c in layout.sparse for name in c.cross if layout.buckets_of(name) is None]
    rules: list[tuple[Iterable[str | None], Callable[[pa.DataType], bool], str]] = [
        (
            [name for name in layout.numbers if name not in layout.plain_labels],
            lambda kind: _is_number(kind) or (layout.number_format is not None and is_text(kind)),
            "be a number",
        ),
        (layout.plain_labels, lambda kind: is_text(kind) or _is_number(kind), "hold numbers or words, to be a label"),
        ([layout.time], lambda kind: _is_moment(kind) or is_text(kind) or _is_number(kind), "be a time"),
        ([layout.group], lambda kind: is_text(kind) or _is_number(kind), "hold strings or integers"),
        (
            crossed,
            lambda kind: is_text(kind) or pa.types.is_integer(kind) or is_fraction(kind),
            "hold strings or whole numbers to be crossed",
        ),
    ]
    for names, holds, rule in rules:
        for name in names:
            if name is not None and not holds(schema.field(name).type):
                raise MesetaError(f"{where}: column {name!r} must {rule}, but is {schema.field(name).type}")
    return replace(
        layout,
        ignored=tuple(_missing(schema.names, layout.columns)),
        reasons={f.name: str(f.type) for f in schema},
    )


def _sparse_column(where: str, schema: pa.Schema, name: str, weight: str | None) -> SparseColumn:
    kind = schema.field(name).type
    multi_valued = _is_list(kind)
    item = kind.value_type if multi_valued else kind
    if multi_valued and is_pair(item):
        if weight is not None:
            raise MesetaError(f"{where}: column {name!r} has weights in its lists, and {weight!r} besides; drop one")
        return SparseColumn(name=name, multi_valued=True, weighted=True)
    if not (is_text(item) or pa.types.is_integer(item) or (is_fraction(item) if multi_valued else _is_number(item))):
        raise MesetaError(
            f"{where}: column {name!r} must hold strings, whole numbers or lists of them, or lists of (id, weight), "
            f"but is {kind}"
        )
    if weight is not None:
        weight_type = schema.field(weight).type
        if not multi_valued:
            raise MesetaError(f"{where}: column {name!r} has weights, so it must hold lists, but is {kind}")
        if not (_is_list(weight_type) and _is_number(weight_type.value_type)):
            raise MesetaError(f"{where}: column {weight!r} must hold lists of numbers, but is {weight_type}")
    return SparseColumn(name=name, multi_valued=multi_valued, weighted=weight is not None, weight=weight)


def _find_weight(types: Mapping[str, pa.DataType], name: str) -> str | None:
    """The column of the weights of `name`: '<name>.weight', or lists of numbers called '<name>_weight(s)'."""
    if not _is_list(types[name]) or is_pair(types[name].value_type):
        return None
    if f"{name}.weight" in types:
        return f"{name}.weight"
    for weight in (f"{name}_weight", f"{name}_weights"):
        kind = types.get(weight)
        if kind is not None and _is_list(kind) and _is_number(kind.value_type):
            return weight
    return None


def is_pair(kind: pa.DataType) -> bool:
    """Whether it is a struct of an id (text or integer) and a weight (number)."""
    if not (pa.types.is_struct(kind) and kind.num_fields == 2):
        return False
    value, weight = kind.field(0).type, kind.field(1).type
    return (is_text(value) or pa.types.is_integer(value)) and _is_number(weight)


def _may_be_ids(kind: pa.DataType) -> bool:
    return is_text(kind) or pa.types.is_integer(kind) or is_fraction(kind) or is_pair(kind)


def _is_moment(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _is_number(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_decimal, is_fraction))


def is_fraction(kind: pa.DataType) -> bool:
    """Whether a type of numbers may have values that are not whole."""
    return pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale > 0)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_scalar(kind: pa.DataType) -> bool:
    return _is_number(kind) or is_text(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether values of a type are text or bytes, or a dictionary of these."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return any(
        check(kind)
        for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
