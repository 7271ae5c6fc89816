"""The layout of Parquet files, from the types of their columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from meseta.data.guess import (
    GROUPS,
    SAMPLE_ROWS,
    TIMES,
    WEIGHTS,
    Guess,
    guess_label,
    guess_number_column,
    guess_text_column,
    is_code,
    only_one_each,
    other_outcome,
)
from meseta.data.schema import Layout, Schema, SparseColumn, check_names, layout_of
from meseta.data.sources import Source, parquet_sample, parquet_schema
from meseta.spec import MesetaError

_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""Columns in which pandas keeps the labels of rows."""


def guess_special(source: Source, named: Collection[str | None]) -> dict[str, Guess]:
    """Columns that are likely to be the weight, the group or the time of samples, each with the reason.

    By their name and type, and the first rows of the file; those in `named` are left out.
    """
    schema = parquet_schema(source)
    candidates = [
        f
        for f in schema
        if f.name.lower() in (*WEIGHTS, *GROUPS, *TIMES) and f.name not in named and schema.names.count(f.name) == 1
    ]
    if not candidates:
        return {}
    sample = parquet_sample(source, [f.name for f in candidates], SAMPLE_ROWS)
    guesses = {f.name: _guess_by_values(f.name, sample.column(f.name)) for f in candidates}
    return {name: guess for name, guess in only_one_each(guesses).items() if guess[0] != "dense"}


def _guess_by_values(name: str, column: pa.ChunkedArray) -> Guess:
    """Dense where it is nothing special."""
    kind = column.type
    nothing: Guess = ("dense", "")
    if _is_moment(kind):
        return ("time", f"{kind}; only for splits") if name.lower() in TIMES else nothing
    present = column.drop_null()
    if _is_text(kind):
        texts = [text if isinstance(text, str) else text.decode(errors="replace") for text in present.to_pylist()]
        by_text = guess_text_column(name, texts)
        return by_text if by_text[0] in ("time", "group") else nothing
    if not _is_number(kind) or pa.types.is_boolean(kind):
        return nothing
    guess = guess_number_column(name, present.cast(pa.float64(), safe=False).to_pylist())
    return nothing if guess is None or (guess[0] == "weight" and column.null_count) else guess


def parquet_layout(
    source: Source,
    label: str | None,
    dense: Sequence[str],
    sparse: Sequence[str],
    special: Mapping[str, Guess],
) -> Layout:
    """The columns that the options name, and the others by their type; weights by their name beside that of a list.

    `dense` defaults to the scalar numbers, `sparse` to strings, lists, and whole numbers with the name of a code, of
    those that no other option names and that are not `special`. Raises MesetaError for a missing column or one of a
    wrong type.
    """
    schema = parquet_schema(source)
    where = f"source {str(source.path)!r}"
    label = label or guess_label(schema.names) or "label"
    check_names(where, [label, *special, *dense, *sparse], schema.names)
    named = {label, *dense, *sparse}
    weights = {
        weight: name
        for name in schema.names
        for weight in [_find_weight(schema, name)]
        if weight and weight not in named
    }
    outcomes = {name: guess for name in schema.names if name not in named for guess in [other_outcome(name)] if guess}
    left_out = {*named, *special, *outcomes}
    free = [f for f in schema if f.name not in left_out and not _PANDAS_INDEX.fullmatch(f.name)]
    sparse = sparse or [f.name for f in free if f.name not in weights and _is_category(f)]
    dense = dense or [f.name for f in free if _is_number(f.type) and f.name not in sparse]
    pairs = {name: weight for weight, name in weights.items() if name in sparse}
    check_names(where, [*dense, *sparse, *pairs.values()], schema.names)
    by_role: dict[str, str] = {role: name for name, (role, _) in special.items() if role != "ignore"}
    wanted = Schema(label=label, dense=list(dense), categorical=list(sparse), weights=pairs).model_copy(update=by_role)
    layout = _checked(where, schema, wanted)
    guessed = {name: reason for name, (_, reason) in {**special, **outcomes}.items()}
    return replace(layout, reasons={**layout.reasons, **guessed})


def parquet_layout_of(source: Source, wanted: Schema) -> Layout:
    """The layout that a schema file gives. Raises MesetaError for a missing column or one of a wrong type."""
    schema = parquet_schema(source)
    where = f"source {str(source.path)!r}"
    if wanted.multi_valued:
        raise MesetaError(f"{where}: multi_valued is for CSV; in Parquet, lists hold several values")
    check_names(where, [*wanted.columns, *wanted.weights.values()], schema.names)
    return _checked(where, schema, wanted)


def _checked(where: str, schema: pa.Schema, wanted: Schema) -> Layout:
    sparse = [_sparse_column(where, schema, name, wanted.weights.get(name)) for name in wanted.categorical]
    layout = layout_of(wanted, sparse)
    crossed = [name for c in layout.sparse for name in c.cross if layout.buckets_of(name) is None]
    rules: list[tuple[Iterable[str | None], Callable[[pa.DataType], bool], str]] = [
        (layout.numbers, _is_number, "be a number"),
        ([layout.time], lambda kind: _is_moment(kind) or _is_text(kind) or _is_number(kind), "be a time"),
        ([layout.group], lambda kind: _is_text(kind) or _is_number(kind), "hold strings or integers"),
        (crossed, lambda kind: _is_text(kind) or pa.types.is_integer(kind), "hold strings or integers to be crossed"),
    ]
    for names, holds, rule in rules:
        for name in names:
            if name is not None and not holds(schema.field(name).type):
                raise MesetaError(f"{where}: column {name!r} must {rule}, but is {schema.field(name).type}")
    used = layout.columns
    return replace(
        layout,
        ignored=tuple(name for name in schema.names if name not in used),
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
    if not (_is_text(item) or pa.types.is_integer(item)):
        raise MesetaError(
            f"{where}: column {name!r} must hold strings, integers or lists of them, or lists of (id, weight), "
            f"but is {kind}"
        )
    if weight is not None:
        weight_type = schema.field(weight).type
        if not multi_valued:
            raise MesetaError(f"{where}: column {name!r} has weights, so it must hold lists, but is {kind}")
        if not (_is_list(weight_type) and _is_number(weight_type.value_type)):
            raise MesetaError(f"{where}: column {weight!r} must hold lists of numbers, but is {weight_type}")
    return SparseColumn(name=name, multi_valued=multi_valued, weighted=weight is not None, weight=weight)


def _find_weight(schema: pa.Schema, name: str) -> str | None:
    """The column of the weights of `name`: '<name>.weight', or lists of numbers called '<name>_weight(s)'."""
    kind = schema.field(schema.names.index(name)).type
    if not _is_list(kind) or is_pair(kind.value_type):
        return None
    if f"{name}.weight" in schema.names:
        return f"{name}.weight"
    for weight in (f"{name}_weight", f"{name}_weights"):
        if weight in schema.names:
            weight_type = schema.field(schema.names.index(weight)).type
            if _is_list(weight_type) and _is_number(weight_type.value_type):
                return weight
    return None


def is_pair(kind: pa.DataType) -> bool:
    """Whether it is a struct of an id (text or integer) and a weight (number)."""
    if not (pa.types.is_struct(kind) and kind.num_fields == 2):
        return False
    value, weight = kind.field(0).type, kind.field(1).type
    return (_is_text(value) or pa.types.is_integer(value)) and _is_number(weight)


def _is_category(column: pa.Field) -> bool:
    if _is_list(column.type) or _is_text(column.type):
        return True
    return pa.types.is_integer(column.type) and is_code(column.name)


def _is_moment(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return any(
        check(kind)
        for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
