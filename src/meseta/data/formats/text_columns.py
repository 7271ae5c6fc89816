"""Layout of text with named columns, from a schema or inferred from names and sampled values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.schema.infer import ColumnRole, infer_label, infer_label_from_values, infer_role
from meseta.data.schema.labels import raw_label_columns
from meseta.data.schema.roles import NamedColumns, other_times_of, role_reasons, schema_from_roles
from meseta.data.schema.schema import Schema, check_names, layout_from_schema
from meseta.spec import MesetaError


def text_layout_from_schema(where: str, schema: Schema, names: Sequence[str]) -> RawLayout:
    """Return the layout that a schema describes for text with the columns `names`.

    Raises MesetaError if a column has weights but is not multi-valued, and as `layout_from_schema` does.
    """
    for name in schema.weights:
        if name not in schema.multi_valued:
            raise MesetaError(
                f"prepare: weights of the --schema file contain {name!r}, which is not multi-valued; list it under "
                "multi_valued, and name under weights the separator between a value and its weight"
            )
    plain = (
        SparseColumn(
            name=name,
            multi_valued=name in schema.multi_valued,
            weighted=name in schema.weights,
            separator=schema.multi_valued.get(name),
            weight_separator=schema.weights.get(name),
        )
        for name in schema.categorical
    )
    return layout_from_schema(where, schema, plain, names)


def infer_text_layout(
    where: str,
    columns: Mapping[str, Sequence[str]],
    named: NamedColumns,
    *,
    has_names: bool,
    known: Mapping[str, ColumnRole] | None = None,
) -> RawLayout:
    """Return the layout of text columns.

    Roles are taken from `named`, then from `known`, and otherwise inferred from names and sampled values.

    Args:
        where: Prefix of error messages.
        columns: Sampled values of each column.
        named: Roles from the options.
        has_names: Whether the file has a header.
        known: Roles that do not need to be inferred.

    Raises:
        MesetaError: No label can be determined.
    """
    names = list(columns)
    if not any(columns.values()):
        raise MesetaError(f"{where} contains no rows; leave it out, or fetch it again")
    labels = named.labels(where, names) or _infer_labels(where, columns, has_names=has_names)
    raw_labels = raw_label_columns(where, labels, names)
    check_names(where, raw_labels, names)
    chosen = named.roles(where, [name for name in names if name not in raw_labels])
    guesses = {
        name: chosen.get(name) or (known or {}).get(name) or infer_role(name, values)
        for name, values in columns.items()
        if name not in raw_labels
    }
    schema = schema_from_roles(labels, guesses, columns)
    reasons = role_reasons(guesses)
    if not has_names and not named.label:
        reasons[labels[0]] = "0 and 1 alone, in a file without names; --label NAME is another"
    return replace(text_layout_from_schema(where, schema, names), reasons=reasons, other_times=other_times_of(guesses))


def add_list_columns(layout: RawLayout, separators: Mapping[str, str | None]) -> RawLayout:
    """Return `layout` with the columns in `separators` as multi-valued ones.

    A separator of `None` means that the values are already lists.
    """
    sparse = tuple(
        replace(column, multi_valued=True, separator=separators[column.raw_column])
        if column.raw_column in separators and not column.has_row_ids and not column.cross
        else column
        for column in layout.sparse
    )
    return replace(layout, sparse=sparse)


def _infer_labels(where: str, columns: Mapping[str, Sequence[str]], *, has_names: bool) -> tuple[str]:
    label = infer_label(list(columns)) if has_names else infer_label_from_values(columns)
    if label is None and has_names:
        raise MesetaError(
            f"{where}: none of {_format_names(list(columns))} has the name of a label; choose one with --label"
        )
    if label is None:
        raise MesetaError(
            f"{where}: its first line has no names, so its columns are called {_format_names(list(columns))}; "
            f"no single one of them contains only 0 and 1, so choose the label with --label"
        )
    return (label,)


def _format_names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:10]))
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
