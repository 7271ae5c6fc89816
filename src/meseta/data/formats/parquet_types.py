"""Predicates for Arrow types, and the common type of a column in several files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cached_property

import pyarrow as pa

from meseta.spec import MesetaError


class ColumnTypes:
    """Types of the columns of several files, with the first file that has each type."""

    def __init__(self) -> None:
        self._paths: dict[str, dict[pa.DataType, str]] = {}
        self._names: list[str] = []
        self._last = pa.schema([])

    def add(self, path: str, schema: pa.Schema) -> None:
        """Add the columns of one more file."""
        # Consecutive files usually have the same columns.
        if schema.equals(self._last):
            return
        # The first of several columns with the same name counts.
        first = {field.name: field.type for field in reversed(list(schema))}
        for field in schema:
            self._paths.setdefault(field.name, {}).setdefault(first[field.name], path)
        if not self._names:
            self._names = schema.names
        self._last = schema

    def get_types(self, name: str) -> Mapping[pa.DataType, str]:
        """Return the types of one column, each with the first file that has it."""
        return self._paths[name]

    @cached_property
    def common_schema(self) -> pa.Schema:
        """Columns of the first file with their common types. A column without a common type has its first type."""
        return pa.schema([pa.field(name, self._common_type(name)) for name in self._names])

    def check_compatible(self, name: str, *, as_ids: bool = False, of_fractions: bool = True) -> None:
        """Raise MesetaError if the types of a column in different files are incompatible.

        Args:
            name: Column to check. Unknown columns are accepted.
            as_ids: Also reject pairs of a boolean and a number, which are spelled differently as ids. Reject a common
                type that cannot be a feature if one of the types can.
            of_fractions: Argument of `can_be_feature`.
        """
        kinds = self._paths.get(name, {})
        for (one, path), (other, other_path) in itertools.combinations(kinds.items(), 2):
            common = common_type(one, other, as_text=as_ids)
            were_features = as_ids and any(can_be_feature(kind, of_fractions=of_fractions) for kind in (one, other))
            if common is None or (were_features and not can_be_feature(common, of_fractions=of_fractions)):
                raise MesetaError(
                    f"source {other_path!r}: column {name!r} is {other}, but {one} in {path!r}; write both files with "
                    "the same type, or leave the column out"
                )

    def _common_type(self, name: str) -> pa.DataType:
        first, *others = self._paths[name]
        common = first
        for other in others:
            common = common_type(common, other) or common
        return common


def common_type(one: pa.DataType, other: pa.DataType, *, as_text: bool = False) -> pa.DataType | None:
    """Return a type that can represent the values of both types, or `None` if they are incompatible.

    Null is compatible with any type, and a dictionary with the type of its values. Text is compatible with bytes, any
    number with any other, and timestamps with dates. Lists are compatible if their items are. Structs are compatible if
    they have the same number of fields, and their fields are. The common type may have fewer digits than a number. With
    `as_text`, booleans are incompatible with numbers, because they are spelled true and false.
    """
    one, other = dictionary_value_type(one), dictionary_value_type(other)
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if as_text and pa.types.is_boolean(one) != pa.types.is_boolean(other):
        return None
    if is_list(one) and is_list(other):
        item = common_type(one.value_type, other.value_type, as_text=as_text)
        return None if item is None else pa.large_list(item)
    if pa.types.is_struct(one) and pa.types.is_struct(other) and one.num_fields == other.num_fields:
        fields = [one.field(place) for place in range(one.num_fields)]
        types = [common_type(field.type, other.field(at).type, as_text=as_text) for at, field in enumerate(fields)]
        return None if None in types else pa.struct(list(map(pa.Field.with_type, fields, types)))
    return next((join(one, other) for holds, join in _KINDS if holds(one) and holds(other)), None)


def dictionary_value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of a dictionary, and any other type unchanged."""
    return dictionary_value_type(kind.value_type) if pa.types.is_dictionary(kind) else kind


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is text or bytes, or a dictionary of either."""
    kind = dictionary_value_type(kind)
    return is_string(kind) or any(
        holds(kind) for holds in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    )


def is_string(kind: pa.DataType) -> bool:
    """Whether a type is a string type, which requires UTF-8."""
    return any(holds(kind) for holds in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def is_number(kind: pa.DataType) -> bool:
    """Whether a type is numeric or boolean."""
    return is_integral(kind) or pa.types.is_boolean(kind) or is_fractional(kind)


def is_integral(kind: pa.DataType) -> bool:
    """Whether a type is an integer type, or a decimal type without fraction digits."""
    return pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale <= 0)


def is_fractional(kind: pa.DataType) -> bool:
    """Whether a type is numeric and has fractions."""
    return pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale > 0)


def is_timestamp_or_date(kind: pa.DataType) -> bool:
    """Whether a type is a timestamp or date type."""
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is a list type."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_id(kind: pa.DataType) -> bool:
    """Whether a type is text or an integer."""
    return is_text(kind) or is_integral(kind)


def is_weighted_id(kind: pa.DataType) -> bool:
    """Whether a type is a struct of an id (text or integer) and a weight (number)."""
    return (
        pa.types.is_struct(kind)
        and kind.num_fields == 2
        and (is_id(kind.field(0).type) or pa.types.is_null(kind.field(0).type))
        and (is_number(kind.field(1).type) or pa.types.is_null(kind.field(1).type))
    )


def can_be_feature(kind: pa.DataType, *, of_fractions: bool = True) -> bool:
    """Whether a column of this type can be a feature.

    With `of_fractions`, lists of fractional numbers can be features too. This is for lists that only contain whole
    numbers.
    """
    kind = dictionary_value_type(kind)
    if is_list(kind):
        item = dictionary_value_type(kind.value_type)
        return is_id(item) or is_weighted_id(item) or (of_fractions and is_fractional(item))
    return is_number(kind) or is_text(kind)


def _common_text(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    return pa.large_string() if is_string(one) and is_string(other) else pa.large_binary()


def _common_number(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type with the larger range, or float64 if no integer or decimal type holds both."""
    if pa.types.is_boolean(one) or pa.types.is_boolean(other):
        return other if pa.types.is_boolean(one) else one
    if pa.types.is_floating(one) or pa.types.is_floating(other):
        return pa.float64()
    if pa.types.is_decimal(one) or pa.types.is_decimal(other):
        return _common_decimal(one, other)
    if pa.types.is_signed_integer(one) == pa.types.is_signed_integer(other):
        return max(one, other, key=lambda kind: kind.bit_width)
    return pa.int64() if max(one.bit_width, other.bit_width) < 64 else _common_decimal(one, other)


def _common_decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return a decimal type with all digits of both types."""
    digits = [(kind.precision, kind.scale) if pa.types.is_decimal(kind) else (20, 0) for kind in (one, other)]
    scale = max(scale for _, scale in digits)
    precision = max(precision - scale for precision, scale in digits) + scale
    return pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(min(precision, 76), scale)


def _common_timestamp(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    zones = [kind.tz for kind in (one, other) if pa.types.is_timestamp(kind) and kind.tz]
    return pa.timestamp("ns", zones[0] if zones else None)


# Predicates of the kinds of single values, and functions for the common type of two types of one kind.
_KINDS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType, pa.DataType], pa.DataType]], ...] = (
    (is_text, _common_text),
    (is_number, _common_number),
    (is_timestamp_or_date, _common_timestamp),
)
