"""Inference of the layout of Parquet files from the types of columns and a sample of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from meseta.data.formats.encodings import decode_sample
from meseta.data.formats.format import Source
from meseta.data.formats.parquet_files import (
    check_exact_in_float64,
    decode_values,
    partition_types,
    sample_parquet,
    source_schema,
)
from meseta.data.formats.parquet_types import (
    ColumnTypes,
    can_be_feature,
    is_fractional,
    is_id,
    is_list,
    is_number,
    is_string,
    is_text,
    is_timestamp_or_date,
    is_weighted_id,
)
from meseta.data.formats.partitions import infer_partition_role
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.schema.infer import (
    UNNAMED_COLUMN,
    ColumnRole,
    infer_label,
    infer_role,
    infer_time_role,
    secondary_label_role,
)
from meseta.data.schema.labels import add_signed_labels, raw_label_columns
from meseta.data.schema.number_spelling import add_whole_numbers, holds_whole_numbers
from meseta.data.schema.roles import NamedColumns, other_times_of, role_reasons, schema_from_roles
from meseta.data.schema.schema import Schema, check_names, layout_from_schema
from meseta.spec import MesetaError

# Columns in which pandas stores the index of a data frame.
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
# Number of sampled rows for columns with lists.
_MAX_LIST_ROWS = 1000


def infer_parquet_layout(sources: Sequence[Source], named: NamedColumns, schema: Schema | None) -> RawLayout:
    """Return the common layout of all files.

    The schema determines the roles of columns. Without a schema, `named` does, and other roles are inferred from types,
    names and sampled rows. A column of weights is recognized by its name and belongs to a column of lists.

    Raises MesetaError if a column is missing or has a wrong type, if its types in two files are incompatible, or if a
    file has other columns than the first one.
    """
    first = sources[0]
    where = f"source {str(first.path)!r}"
    types = _column_types(sources, schema)
    guesses: dict[str, ColumnRole] = {}
    texts: dict[str, list[str]] = {}
    if schema is None:
        schema, guesses, texts = _infer_schema(sources, types, named)
    labels = raw_label_columns(where, schema.label_names, types.common_schema.names)
    for name in _exclude([*labels, *schema.columns, *schema.weights.values()], schema.ignore):
        types.check_compatible(name, as_ids=name in schema.categorical)
    layout = _layout_from_schema(where, types.common_schema, schema)
    for name in layout.text_columns:
        types.check_compatible(name, as_ids=True)
    check_exact_in_float64(sources, types, layout.columns)
    layout = add_whole_numbers(layout, texts) if texts else layout
    kinds = layout.reasons
    reasons = {name: f"{kinds[name]}: {reason}" for name, reason in role_reasons(guesses).items()}
    layout = replace(layout, reasons=reasons or kinds, other_times=other_times_of(guesses))
    if not layout.labels_without_rule:
        return layout
    sample = sample_parquet(sources, layout.labels_without_rule)
    return add_signed_labels(layout, {name: _to_texts(sample[name]) for name in layout.labels_without_rule})


def _column_types(sources: Sequence[Source], schema: Schema | None) -> ColumnTypes:
    """Return the types of columns in all files.

    Raises MesetaError if a file lacks a column that `schema` names. Without a schema, all files must have the columns
    of the first one.
    """
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
    for name in _exclude(expected, names)[:1]:
        raise MesetaError(f"{where}: column {name!r} is missing; choose the columns to use in a --schema file")
    for name in _exclude(names, expected)[:1]:
        raise MesetaError(f"{where}: column {name!r} is extra; choose the columns to use in a --schema file")


def _exclude(names: Iterable[str], known: Iterable[str]) -> list[str]:
    present = {*known}
    return [name for name in names if name not in present]


def _infer_schema(
    sources: Sequence[Source], types: ColumnTypes, named: NamedColumns
) -> tuple[Schema, dict[str, ColumnRole], dict[str, list[str]]]:
    schema = types.common_schema
    where = f"source {str(sources[0].path)!r}"
    labels = named.labels(where, schema.names) or (infer_label(schema.names) or "label",)
    raw_labels = raw_label_columns(where, labels, schema.names)
    check_names(where, raw_labels, schema.names)
    names = _exclude(schema.names, raw_labels)
    check_names(where, names, schema.names)
    chosen = named.roles(where, names)
    kinds = dict(zip(schema.names, schema.types, strict=True))
    weights = {
        weight: name for name in names for weight in [_find_weight(kinds, name)] if weight and weight not in chosen
    }
    free = [field for field in schema if field.name not in raw_labels]
    scalars = [field.name for field in free if _is_scalar(field.type)]
    sample = sample_parquet(sources, scalars)
    texts = {name: _to_texts(sample[name]) for name in scalars}
    lists = [field.name for field in free if is_list(field.type) and can_be_feature(field.type)]
    if lists:
        sample = sample_parquet(sources, lists, _MAX_LIST_ROWS)
        texts |= {name: _to_texts([_distinct_items(array) for array in sample[name]]) for name in lists}
    guesses = {
        field.name: chosen.get(field.name)
        or _role_from_name(field.name, weights.get(field.name))
        or (infer_partition_role(field.name, texts[field.name]) if field.name in sources[0].partition else None)
        or _infer_role(field, types, texts.get(field.name))
        for field in free
    }
    pairs = {
        name: weight
        for weight, name in weights.items()
        if guesses[name].role == "categorical" and guesses[weight].role == "ignore"
    }
    return schema_from_roles(labels, guesses, texts).model_copy(update={"weights": pairs}), guesses, texts


def _role_from_name(name: str, weighed: str | None) -> ColumnRole | None:
    """Return the role of a column that is ignored because of its name, or `None`.

    If the column holds weights, `weighed` is the column that they apply to.
    """
    if not name:
        return UNNAMED_COLUMN
    if _PANDAS_INDEX.fullmatch(name):
        return ColumnRole("ignore", "the index of pandas")
    return None if weighed is None else ColumnRole("ignore", f"the weights of {weighed}")


def _infer_role(field: pa.Field, types: ColumnTypes, texts: Sequence[str] | None) -> ColumnRole:
    """Infer the role of a column from its type and `texts`, its sampled values or list items.

    Raises MesetaError if types are incompatible, and one of them can be a feature or a time.
    """
    kind = field.type
    are_whole = is_list(kind) and holds_whole_numbers(texts or ())
    if any(
        can_be_feature(one, of_fractions=are_whole) or is_timestamp_or_date(one) for one in types.get_types(field.name)
    ):
        types.check_compatible(
            field.name, as_ids=not _is_scalar(kind) and not is_timestamp_or_date(kind), of_fractions=are_whole
        )
    if is_timestamp_or_date(kind):
        return infer_time_role(field.name, "")
    if is_list(kind):
        if pa.types.is_null(kind.value_type):
            return ColumnRole("ignore", "no value in any list")
        if can_be_feature(kind, of_fractions=are_whole):
            reason = (
                "lists of ids"
                if can_be_feature(kind, of_fractions=False)
                else "lists of ids, all of them whole numbers"
            )
            return secondary_label_role(field.name) or ColumnRole("categorical", reason)
        return ColumnRole("ignore", "no feature holds such lists; take ids, or a column for each number")
    if texts is None:
        return ColumnRole("ignore", "no feature holds that")
    if pa.types.is_boolean(kind):
        return secondary_label_role(field.name) or ColumnRole("dense", "0 and 1")
    guess = infer_role(field.name, texts)
    if guess.role in ("dense", "both", "weight") and not is_number(kind):
        return ColumnRole("categorical", f"text that looks like numbers; {guess.reason}")
    if guess.role == "both" and is_fractional(kind):
        return ColumnRole("dense", "numbers; --sparse makes whole ones a category")
    return guess


def _to_texts(arrays: Sequence[pa.Array]) -> list[str]:
    """Return sampled values as CSV spells them."""
    # Whole numbers have no decimal point, whatever their type is.
    texts: list[str] = []
    for array in arrays:
        if pa.types.is_boolean(array.type) or is_fractional(array.type):
            numbers = array.cast(pa.float64()).to_pylist()
            texts += ["" if value is None else f"{value:.17g}" for value in numbers]
        else:
            values = (array.cast(pa.binary()) if is_string(array.type) else array).to_pylist()
            texts += [
                "" if value is None else decode_sample(value) if isinstance(value, bytes) else str(value)
                for value in values
            ]
    return texts


def _distinct_items(lists: pa.Array) -> pa.Array:
    if not is_list(lists.type):  # Only nulls.
        return lists
    items = decode_values(pc.list_flatten(lists))
    return pc.unique(decode_values(pc.struct_field(items, [0])) if is_weighted_id(items.type) else items)


def parquet_layout_from_schema(source: Source, schema: Schema) -> RawLayout:
    """Return the layout of one file that a schema specifies. Raises MesetaError if a column is missing or has a wrong
    type."""
    return _layout_from_schema(f"source {str(source.path)!r}", source_schema(source), schema)


def _layout_from_schema(where: str, schema: pa.Schema, requested: Schema) -> RawLayout:
    if requested.multi_valued:
        raise MesetaError(f"{where}: multi_valued applies only to CSV; in Parquet, use lists for several values")
    check_names(where, [*requested.weights.values(), *requested.columns], schema.names)
    sparse = [_sparse_column(where, schema, name, requested.weights.get(name)) for name in requested.categorical]
    layout = layout_from_schema(where, requested, sparse, schema.names)
    check_names(where, layout.columns, schema.names)
    crossed = [name for c in layout.sparse for name in c.cross if layout.get_buckets(name) is None]
    rules: list[tuple[Iterable[str | None], Callable[[pa.DataType], bool], str]] = [
        (
            [name for name in layout.numeric_columns if name not in layout.labels_without_rule],
            lambda kind: is_number(kind) or (layout.number_format is not None and is_text(kind)),
            "be a number",
        ),
        (
            layout.labels_without_rule,
            lambda kind: is_text(kind) or is_number(kind),
            "hold numbers or words, to be a label",
        ),
        ([layout.time], lambda kind: is_timestamp_or_date(kind) or is_text(kind) or is_number(kind), "be a time"),
        ([layout.group], lambda kind: is_text(kind) or is_number(kind), "hold strings or integers"),
        (crossed, lambda kind: is_id(kind) or is_fractional(kind), "hold strings or whole numbers to be crossed"),
    ]
    for names, holds, rule in rules:
        for name in names:
            if name is not None and not (holds(kind := schema.field(name).type) or pa.types.is_null(kind)):
                raise MesetaError(f"{where}: column {name!r} must {rule}, but is {kind}")
    return replace(
        layout,
        ignored=tuple(_exclude(schema.names, layout.columns)),
        reasons={f.name: str(f.type) for f in schema},
    )


def _sparse_column(where: str, schema: pa.Schema, name: str, weight: str | None) -> SparseColumn:
    kind = schema.field(name).type
    is_null = pa.types.is_null(kind.value_type if is_list(kind) else kind)
    multi_valued = is_list(kind) or (is_null and weight is not None)
    if is_list(kind) and is_weighted_id(kind.value_type):
        if weight is not None:
            raise MesetaError(
                f"{where}: column {name!r} has weights in its lists and in {weight!r}; remove one of them"
            )
        return SparseColumn(name=name, multi_valued=True, weighted=True)
    if not (can_be_feature(kind) or is_null):
        raise MesetaError(
            f"{where}: column {name!r} must hold strings, whole numbers or lists of them, or lists of (id, weight), "
            f"but is {kind}"
        )
    if weight is not None:
        weight_type = schema.field(weight).type
        if not multi_valued:
            raise MesetaError(f"{where}: column {name!r} has weights, so it must contain lists, but is {kind}")
        if not (_holds_weights(weight_type) or pa.types.is_null(weight_type)):
            raise MesetaError(f"{where}: column {weight!r} must contain lists of numbers, but is {weight_type}")
    return SparseColumn(name=name, multi_valued=multi_valued, weighted=weight is not None, weight=weight)


def _find_weight(types: Mapping[str, pa.DataType], name: str) -> str | None:
    """Return the column with the weights of `name`, or `None`.

    It is '<name>.weight' or, if it contains lists of numbers, '<name>_weight' or '<name>_weights'.
    """
    if not is_list(types[name]) or is_weighted_id(types[name].value_type):
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
