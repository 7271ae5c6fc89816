"""The layout of Parquet files, from the types of their columns and a sample of their rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from meseta.data.formats.format import Source
from meseta.data.formats.parquet_files import check_exact, parquet_sample, partition_types, plain_values, source_schema
from meseta.data.formats.parquet_types import (
    ColumnTypes,
    is_feature,
    is_fraction,
    is_id,
    is_list,
    is_moment,
    is_number,
    is_pair,
    is_string,
    is_text,
)
from meseta.data.formats.partitions import guess_partition
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.schema.guess import (
    NAMELESS,
    Guess,
    guess_column,
    guess_label,
    guess_time,
    other_outcome,
)
from meseta.data.schema.labels import raw_label_columns, with_signed_labels
from meseta.data.schema.number_spelling import holds_whole_numbers, with_whole_numbers
from meseta.data.schema.roles import NamedColumns, other_times_of, reasons_of, schema_of
from meseta.data.schema.schema import Schema, check_names, layout_of
from meseta.spec import MesetaError

_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""Columns in which pandas keeps the labels of rows."""
_LIST_ROWS = 1000
"""Sampled rows of columns of lists."""


def parquet_layout(sources: Sequence[Source], named: NamedColumns, schema: Schema | None) -> RawLayout:
    """The common layout of all files: as the schema says, else as `named` says, else by types, names and a sample;
    weights of ids by their name beside that of a list.

    Raises MesetaError for a missing column, one of a wrong type, one of different kinds in two files, and a file that
    has other columns.
    """
    first = sources[0]
    where = f"source {str(first.path)!r}"
    types = _column_types(sources, schema)
    guesses: dict[str, Guess] = {}
    texts: dict[str, list[str]] = {}
    if schema is None:
        schema, guesses, texts = _guessed(sources, types, named)
    labels = raw_label_columns(where, schema.label_names, types.common.names)
    for name in _missing([*labels, *schema.columns, *schema.weights.values()], schema.ignore):
        types.check(name, as_ids=name in schema.categorical)
    layout = _layout_of(where, types.common, schema)
    for name in layout.texts:
        types.check(name, as_ids=True)
    check_exact(sources, types, layout.columns)
    layout = with_whole_numbers(layout, texts) if texts else layout
    kinds = layout.reasons
    reasons = {name: f"{kinds[name]}: {reason}" for name, reason in reasons_of(guesses).items()}
    layout = replace(layout, reasons=reasons or kinds, other_times=other_times_of(guesses))
    if not layout.plain_labels:
        return layout
    sample = parquet_sample(sources, layout.plain_labels)
    return with_signed_labels(layout, {name: _texts(sample[name]) for name in layout.plain_labels})


def _column_types(sources: Sequence[Source], schema: Schema | None) -> ColumnTypes:
    """Types of the columns in all files. Raises MesetaError for a file without a column that `schema` names, and
    without a schema for one that has other columns than the first file."""
    first = sources[0]
    types, folders = ColumnTypes(), partition_types(sources)
    expected: Sequence[str] = ()
    for source in sources:
        present = source_schema(source, folders)
        if schema is not None:
            check_names(f"source {str(source.path)!r}", [*schema.columns, *schema.weights.values()], present.names)
        elif source is first:
            expected = present.names
        else:
            _check_same_columns(source, first, expected, present.names)
        types.add(source.path, present)
    return types


def _check_same_columns(source: Source, first: Source, expected: Sequence[str], names: Sequence[str]) -> None:
    where = f"source {str(source.path)!r} has other columns than {str(first.path)!r}"
    for name in _missing(expected, names)[:1]:
        raise MesetaError(f"{where}: it lacks {name!r}; name the columns that you want in a --schema file")
    for name in _missing(names, expected)[:1]:
        raise MesetaError(f"{where}: it has {name!r} besides; name the columns that you want in a --schema file")


def _missing(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Names without those that are known, in their order."""
    present = {*known}
    return [name for name in names if name not in present]


def _guessed(
    sources: Sequence[Source], types: ColumnTypes, named: NamedColumns
) -> tuple[Schema, dict[str, Guess], dict[str, list[str]]]:
    """The schema, the roles of the columns, and sampled values of them."""
    schema = types.common
    where = f"source {str(sources[0].path)!r}"
    labels = named.labels(where, schema.names) or (guess_label(schema.names) or "label",)
    raw_labels = raw_label_columns(where, labels, schema.names)
    check_names(where, raw_labels, schema.names)
    names = _missing(schema.names, raw_labels)
    check_names(where, names, schema.names)
    chosen = named.roles(where, names)
    kinds = dict(zip(schema.names, schema.types, strict=True))
    weights = {
        weight: name for name in names for weight in [_find_weight(kinds, name)] if weight and weight not in chosen
    }
    free = [field for field in schema if field.name not in raw_labels]
    scalars = [field.name for field in free if _is_scalar(field.type)]
    sample = parquet_sample(sources, scalars)
    texts = {name: _texts(sample[name]) for name in scalars}
    lists = [field.name for field in free if is_list(field.type) and is_feature(field.type)]
    if lists:
        sample = parquet_sample(sources, lists, _LIST_ROWS)
        texts |= {name: _texts([_distinct_items(array) for array in sample[name]]) for name in lists}
    guesses = {
        field.name: chosen.get(field.name)
        or _guess_by_name(field.name, weights.get(field.name))
        or (guess_partition(field.name, texts[field.name]) if field.name in sources[0].partition else None)
        or _guess(field, types, texts.get(field.name))
        for field in free
    }
    pairs = {
        name: weight
        for weight, name in weights.items()
        if guesses[name].role == "categorical" and guesses[weight].role == "ignore"
    }
    return schema_of(labels, guesses, texts).model_copy(update={"weights": pairs}), guesses, texts


def _guess_by_name(name: str, weighed: str | None) -> Guess | None:
    """Of a column that is left out whatever it holds; `weighed`: the column whose weights it holds."""
    if not name:
        return NAMELESS
    if _PANDAS_INDEX.fullmatch(name):
        return Guess("ignore", "the index of pandas")
    return None if weighed is None else Guess("ignore", f"the weights of {weighed}")


def _guess(field: pa.Field, types: ColumnTypes, texts: Sequence[str] | None) -> Guess:
    """Of one column, from its sampled values, or those in its lists. Raises MesetaError for one of different kinds that
    is a feature or a time in some file."""
    kind = field.type
    are_whole = is_list(kind) and holds_whole_numbers(texts or ())
    if any(is_feature(one, of_fractions=are_whole) or is_moment(one) for one in types.of(field.name)):
        types.check(field.name, as_ids=not _is_scalar(kind) and not is_moment(kind), of_fractions=are_whole)
    if is_moment(kind):
        return guess_time(field.name, "")
    if is_list(kind):
        if pa.types.is_null(kind.value_type):
            return Guess("ignore", "no value in any list")
        if is_feature(kind, of_fractions=are_whole):
            reason = (
                "lists of ids" if is_feature(kind, of_fractions=False) else "lists of ids, all of them whole numbers"
            )
            return other_outcome(field.name) or Guess("categorical", reason)
        return Guess("ignore", "no feature holds such lists; take ids, or a column for each number")
    if texts is None:
        return Guess("ignore", "no feature holds that")
    if pa.types.is_boolean(kind):
        return other_outcome(field.name) or Guess("dense", "0 and 1")
    guess = guess_column(field.name, texts)
    if guess.role in ("dense", "both", "weight") and not is_number(kind):
        return Guess("categorical", f"text that looks like numbers; {guess.reason}")
    if guess.role == "both" and is_fraction(kind):
        return Guess("dense", "numbers; --sparse makes whole ones a category")
    return guess


def _texts(arrays: Sequence[pa.Array]) -> list[str]:
    """Sampled values as CSV has them; a whole number without a point, also where the type has fractions."""
    texts: list[str] = []
    for array in arrays:
        if pa.types.is_boolean(array.type) or is_fraction(array.type):
            numbers = array.cast(pa.float64()).to_pylist()
            texts += ["" if value is None else f"{value:.17g}" for value in numbers]
        else:
            values = (array.cast(pa.binary()) if is_string(array.type) else array).to_pylist()
            texts += [
                "" if value is None else value.decode(errors="replace") if isinstance(value, bytes) else str(value)
                for value in values
            ]
    return texts


def _distinct_items(lists: pa.Array) -> pa.Array:
    """Values in lists, or the first fields of pairs."""
    if not is_list(lists.type):  # nothing but nulls
        return lists
    items = plain_values(pc.list_flatten(lists))
    return pc.unique(plain_values(pc.struct_field(items, [0])) if is_pair(items.type) else items)


def parquet_layout_of(source: Source, wanted: Schema) -> RawLayout:
    """The layout of one file that a schema gives. Raises MesetaError for a missing column or one of a wrong type."""
    return _layout_of(f"source {str(source.path)!r}", source_schema(source), wanted)


def _layout_of(where: str, schema: pa.Schema, wanted: Schema) -> RawLayout:
    if wanted.multi_valued:
        raise MesetaError(f"{where}: multi_valued is for CSV; in Parquet, lists hold several values")
    check_names(where, [*wanted.weights.values(), *wanted.columns], schema.names)
    sparse = [_sparse_column(where, schema, name, wanted.weights.get(name)) for name in wanted.categorical]
    layout = layout_of(where, wanted, sparse, schema.names)
    check_names(where, layout.columns, schema.names)
    crossed = [name for c in layout.sparse for name in c.cross if layout.buckets_of(name) is None]
    rules: list[tuple[Iterable[str | None], Callable[[pa.DataType], bool], str]] = [
        (
            [name for name in layout.numbers if name not in layout.plain_labels],
            lambda kind: is_number(kind) or (layout.number_format is not None and is_text(kind)),
            "be a number",
        ),
        (layout.plain_labels, lambda kind: is_text(kind) or is_number(kind), "hold numbers or words, to be a label"),
        ([layout.time], lambda kind: is_moment(kind) or is_text(kind) or is_number(kind), "be a time"),
        ([layout.group], lambda kind: is_text(kind) or is_number(kind), "hold strings or integers"),
        (crossed, lambda kind: is_id(kind) or is_fraction(kind), "hold strings or whole numbers to be crossed"),
    ]
    for names, holds, rule in rules:
        for name in names:
            if name is not None and not (holds(kind := schema.field(name).type) or pa.types.is_null(kind)):
                raise MesetaError(f"{where}: column {name!r} must {rule}, but is {kind}")
    return replace(
        layout,
        ignored=tuple(_missing(schema.names, layout.columns)),
        reasons={f.name: str(f.type) for f in schema},
    )


def _sparse_column(where: str, schema: pa.Schema, name: str, weight: str | None) -> SparseColumn:
    kind = schema.field(name).type
    is_null = pa.types.is_null(kind.value_type if is_list(kind) else kind)
    multi_valued = is_list(kind) or (is_null and weight is not None)
    if is_list(kind) and is_pair(kind.value_type):
        if weight is not None:
            raise MesetaError(f"{where}: column {name!r} has weights in its lists, and {weight!r} besides; drop one")
        return SparseColumn(name=name, multi_valued=True, weighted=True)
    if not (is_feature(kind) or is_null):
        raise MesetaError(
            f"{where}: column {name!r} must hold strings, whole numbers or lists of them, or lists of (id, weight), "
            f"but is {kind}"
        )
    if weight is not None:
        weight_type = schema.field(weight).type
        if not multi_valued:
            raise MesetaError(f"{where}: column {name!r} has weights, so it must hold lists, but is {kind}")
        if not (_holds_weights(weight_type) or pa.types.is_null(weight_type)):
            raise MesetaError(f"{where}: column {weight!r} must hold lists of numbers, but is {weight_type}")
    return SparseColumn(name=name, multi_valued=multi_valued, weighted=weight is not None, weight=weight)


def _find_weight(types: Mapping[str, pa.DataType], name: str) -> str | None:
    """The column of the weights of `name`: '<name>.weight', or lists of numbers called '<name>_weight(s)'."""
    if not is_list(types[name]) or is_pair(types[name].value_type):
        return None
    if f"{name}.weight" in types:
        return f"{name}.weight"
    for weight in (f"{name}_weight", f"{name}_weights"):
        if weight in types and _holds_weights(types[weight]):
            return weight
    return None


def _holds_weights(kind: pa.DataType) -> bool:
    return is_list(kind) and (is_number(kind.value_type) or pa.types.is_null(kind.value_type))


def _is_scalar(kind: pa.DataType) -> bool:
    return is_number(kind) or is_text(kind) or pa.types.is_null(kind)
