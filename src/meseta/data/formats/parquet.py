"""Inference of the layout of Parquet files from the types of columns and a sample of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from meseta.data.dataset.queues import RowQueue
from meseta.data.formats.encodings import UTF_8, decode_sample, find_invalid_utf8
from meseta.data.formats.format import (
    Block,
    ColumnRequest,
    FileHead,
    FilePosition,
    RawFormat,
    Source,
    TextDialect,
    wrap_source_errors,
)
from meseta.data.formats.parquet_files import (
    BLOCK_ROWS,
    ColumnTypes,
    can_be_feature,
    check_exact_in_float64,
    decode_values,
    is_fractional,
    is_id,
    is_list,
    is_number,
    is_string,
    is_text,
    is_timestamp_or_date,
    is_weighted_id,
    open_parquet,
    parquet_schema,
    partition_types,
    read_batches,
    sample_parquet,
    source_schema,
)
from meseta.data.formats.partitions import infer_partition_role
from meseta.data.formats.table_rows import convert_rows, replace_label_words, split_texts
from meseta.data.schema.infer import (
    MISSING_TEXTS,
    NULL_TEXTS,
    UNNAMED_COLUMN,
    ColumnRole,
    add_whole_numbers,
    holds_whole_numbers,
    infer_role,
    infer_time_role,
    parse_number,
    require_label,
    secondary_label_role,
)
from meseta.data.schema.layout import RawLayout, RawRows, RawSparse, SparseColumn, find_value_row
from meseta.data.schema.roles import NamedColumns, other_times_of, role_reasons, schema_from_roles
from meseta.data.schema.schema import Schema, add_signed_labels, check_names, layout_from_schema, raw_label_columns
from meseta.data.schema.separators import resolve_separators
from meseta.data.schema.text_syntax import NumberFormat, normalize_numbers_strictly
from meseta.data.whole_numbers import respell_whole_numbers
from meseta.errors import error_summary
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
    return add_signed_labels(layout, {name: _sample_texts(sample[name]) for name in layout.labels_without_rule})


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
    labels = named.labels(where, schema.names) or (require_label(where, schema.names),)
    raw_labels = raw_label_columns(where, labels, schema.names)
    check_names(where, raw_labels, schema.names)
    names = _exclude(schema.names, raw_labels)
    check_names(where, names, schema.names)
    chosen, requested = named.roles(where, names), named.separators(where, names)
    kinds = dict(zip(schema.names, schema.types, strict=True))
    for name in requested:
        if not (is_text(kinds[name]) or pa.types.is_null(kinds[name])):
            raise MesetaError(
                f"{where}: column {name!r} for --multi-valued is {kinds[name]}, but only text has separators; leave it "
                "out of --multi-valued"
            )
    weights = {
        weight: name for name in names for weight in [_find_weight(kinds, name)] if weight and weight not in chosen
    }
    free = [field for field in schema if field.name not in raw_labels]
    scalars = [field.name for field in free if _is_scalar(field.type)]
    sample = sample_parquet(sources, scalars)
    texts = {name: _sample_texts(sample[name]) for name in scalars}
    lists = [
        field.name for field in free if is_list(field.type) and any(map(can_be_feature, types.get_types(field.name)))
    ]
    if lists:
        sample = sample_parquet(sources, lists, _MAX_LIST_ROWS)
        # Lists of times in another file do not change whether the numbers in this one are whole.
        texts |= {
            name: _sample_texts([_distinct_items(array) for array in sample[name] if can_be_feature(array.type)])
            for name in lists
        }
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
    separators, reasons = resolve_separators(where, requested, texts)
    guesses |= {name: guesses[name]._replace(reason=reason) for name, reason in reasons.items()}
    keys: dict[str, Any] = {"weights": pairs, "multi_valued": separators}
    keys["time_features"] = named.time_feature_columns(where, names, guesses)
    keys["buckets"] = named.bucket_counts(where, guesses, texts)
    return schema_from_roles(labels, guesses, texts).model_copy(update=keys), guesses, texts


def _role_from_name(name: str, weighed: str | None) -> ColumnRole | None:
    """Return the role of a column that its name excludes, or `None`. It holds the weights of `weighed`, if set."""
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


def _sample_texts(arrays: Sequence[pa.Array]) -> list[str]:
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


def _layout_from_schema(where: str, schema: pa.Schema, requested: Schema) -> RawLayout:
    check_names(where, [*requested.weights.values(), *requested.columns], schema.names)
    sparse = [
        _sparse_column(where, schema, name, requested.weights.get(name))
        if (separator := requested.multi_valued.get(name)) is None or name in requested.weights
        else _text_column(where, schema.field(name), separator)
        for name in requested.categorical
    ]
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
        (layout.time_columns, lambda kind: is_timestamp_or_date(kind) or is_text(kind) or is_number(kind), "be a time"),
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


def _text_column(where: str, field: pa.Field, separator: str) -> SparseColumn:
    if not (is_text(field.type) or pa.types.is_null(field.type)):
        raise MesetaError(
            f"{where}: column {field.name!r} must be text with values separated by {separator!r}, but is {field.type}; "
            "remove it from multi_valued if this file is right"
        )
    return SparseColumn(name=field.name, multi_valued=True, separator=separator)


def _find_weight(types: Mapping[str, pa.DataType], name: str) -> str | None:
    """Return the weights column of `name`: '<name>.weight', for lists of numbers also '<name>_weight(s)', or `None`."""
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


@dataclass(frozen=True)
class _ParquetColumns:
    """Columns of one batch, as `convert_rows` reads them."""

    block: Block
    batch: pa.RecordBatch
    layout: RawLayout

    def numbers(self, name: str) -> pa.Array:
        column = self._values(name)
        # The layout accepts text for labels, and for all numbers if there is a number format.
        if is_text(column.type):
            number_format = self.layout.number_format
            if name in self.layout.labels_without_rule:
                return _parse_numbers(_as_strings(column), number_format)
            plain = normalize_numbers_strictly(number_format or NumberFormat(), column)
            texts = [text.decode(errors="replace") for text in plain.to_pylist()]
            numbers = [None if text in NULL_TEXTS else parse_number(text) for text in texts]
            for row, (text, number) in enumerate(zip(texts, numbers, strict=True)):
                if number is None and text not in NULL_TEXTS:
                    raise self.error(row, name, "is not a number")
            return pa.array(numbers, pa.float64())
        return column.cast(pa.float64(), safe=False)

    def times(self, name: str) -> pa.Array:
        column = self._values(name)
        return column.cast(pa.float64()) if pa.types.is_null(column.type) else column

    def texts(self, name: str) -> pa.Array:
        texts, place = _to_texts(self._values(name), is_exact=self.layout.has_whole_numbers(name))
        if place is not None:
            raise self.error(place, name, "is not a whole number")
        return texts

    def sparse(self, column: SparseColumn) -> RawSparse:
        if not column.multi_valued:
            return RawSparse(self.texts(column.raw_column))
        if column.separator is not None:
            texts = self.texts(column.raw_column)
            values, rows = split_texts(texts, column.separator)
            return RawSparse(values, np.bincount(rows, minlength=len(texts)).astype(np.int64))
        array = self._lists(column.raw_column)
        lengths = _list_lengths(array)
        values = array.flatten()
        if not column.weighted:
            return RawSparse(self._texts_of_lists(column.raw_column, values, lengths), lengths)
        weight_name = column.weight or column.name
        if column.weight is None:
            if not pa.types.is_struct(values.type):
                values = values.cast(pa.struct([("id", pa.string()), ("weight", pa.float64())]))
            values, weights = pc.struct_field(values, [0]), pc.struct_field(values, [1])
        else:
            weight_array = self._lists(column.weight)
            unequal = np.flatnonzero(lengths != _list_lengths(weight_array))
            if unequal.size:
                problem = f"a list must be as long as the list of {column.name!r}"
                raise self._error(int(unequal[0]), weight_name, problem)
            weights = weight_array.flatten()
        with np.errstate(over="ignore"):  # Overflow yields infinity, which is rejected below.
            numbers = _to_float64(decode_values(weights)).astype(np.float32)
        if not np.isfinite(numbers).all():
            owner = find_value_row(int(np.flatnonzero(~np.isfinite(numbers))[0]), lengths)
            raise self._error(owner, weight_name, "a weight is missing or not finite")
        return RawSparse(self._texts_of_lists(column.raw_column, values, lengths), lengths, numbers)

    def error(self, row: int, name: str, problem: str) -> MesetaError:
        value = self.batch.column(name)[row]
        shown = "a missing value" if not value.is_valid else _format_value(value)[:40]
        return self._error(row, name, f"{shown} {problem}")

    def _values(self, name: str) -> pa.Array:
        array = decode_values(self.batch.column(name))
        self._check_text(name, array)
        return array

    def _lists(self, name: str) -> pa.Array:
        array = self.batch.column(name)
        return array if is_list(array.type) else array.cast(pa.list_(pa.null()))  # All values of a file may be null.

    def _texts_of_lists(self, name: str, values: pa.Array, lengths: NDArray[np.int64]) -> pa.Array:
        values = decode_values(values)
        self._check_text(name, values, lengths)
        texts, place = _to_texts(values, is_exact=self.layout.has_whole_numbers(name))
        if place is not None:
            owner = find_value_row(place, lengths)
            raise self._error(owner, name, f"{values[place].as_py()} in a list is not a whole number")
        return texts

    def _check_text(self, name: str, values: pa.Array, lengths: NDArray[np.int64] | None = None) -> None:
        if is_string(values.type) and (fault := find_invalid_utf8(values)):
            row = find_value_row(fault.position, lengths)
            raise self._error(row, name, f"{fault.preview} is not valid UTF-8, as Parquet strings must be")

    def _error(self, row: int, name: str, problem: str) -> MesetaError:
        where = f"source {str(self.block.source.path)!r}, row {self.block.first_row + row + 1}"
        return MesetaError(f"{where}, column {name!r}: {problem}", remedy="fix the row")


def cast_key_column(block: Block, name: str, array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert values to the common type. Raises MesetaError if it cannot represent a value, or text is not UTF-8."""
    try:
        values = array if array.type == kind else decode_values(array).cast(kind)
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        where = f"source {block.source.path!r}, from row {block.first_row + 1} on, column {name!r}"
        raise MesetaError(f"keys: {where}: {error_summary(error)}; leave the column out") from None
    return values


def _parse_numbers(texts: pa.Array, number_format: NumberFormat | None) -> pa.Array:
    """Parse texts as float64. Missing values become null or NaN, and invalid texts become infinity."""
    try:
        texts = replace_label_words(texts.cast(pa.string()))
        texts = texts if number_format is None else normalize_numbers_strictly(number_format, texts).cast(pa.string())
        return pc.if_else(pc.is_in(texts, pa.array(NULL_TEXTS)), None, texts).cast(pa.float64())
    except pa.ArrowInvalid:
        if not pa.types.is_string(texts.type):
            texts = pa.array([value.decode(errors="replace") for value in texts.to_pylist()], pa.string())
            return _parse_numbers(texts, number_format)
        numbers = [
            math.nan if text in MISSING_TEXTS else parse_number(text) for text in replace_label_words(texts).to_pylist()
        ]
        return pa.array([math.inf if number is None else number for number in numbers], pa.float64())


def _to_float64(column: pa.Array) -> NDArray[np.float64]:
    return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def _list_lengths(array: pa.Array) -> NDArray[np.int64]:
    return pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _format_value(value: pa.Scalar) -> str:
    try:
        return repr(value.as_py())
    except (ValueError, OverflowError):
        # Python cannot represent all timestamps.
        return str(value.cast(pa.string()).as_py())


def _to_texts(array: pa.Array, *, is_exact: bool) -> tuple[pa.Array, int | None]:
    """Return (values as text, None), or (array, index) of the first number that is not whole.

    Missing values become empty strings. With `is_exact`, doubles up to 2^64 and all digits of decimals are kept.
    """
    # Without `is_exact`, decimals are rounded to double, as former versions did.
    if not is_fractional(array.type):
        return _as_strings(array), None
    values = _to_float64(array)
    is_present = ~np.isnan(values)
    low, high = -(2.0**63), 2.0**64 if is_exact else 2.0**63
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(is_present & ~((values == np.trunc(values)) & (values >= low) & (values < high)))
    if bad.size:
        return array, int(bad[0])
    if is_exact and pa.types.is_decimal(array.type):
        texts = respell_whole_numbers(array.cast(pa.string()).cast(pa.large_binary()).fill_null(b""))
        return texts, None
    is_large = values >= 2.0**63
    numbers = pa.array(np.where(is_present & ~is_large, values, 0).astype(np.int64), mask=~is_present)
    texts = numbers.cast(pa.string())
    if is_large.any():
        large = pa.array(np.where(is_large, values, 0).astype(np.uint64)).cast(pa.string())
        texts = pc.if_else(pa.array(is_large), large, texts)
    return texts.fill_null(""), None


def _as_strings(array: pa.Array) -> pa.Array:
    if not is_text(array.type):
        array = array.cast(pa.string())
    return array.fill_null(b"" if "binary" in str(array.type) else "") if array.null_count else array


class Parquet(RawFormat):
    """Parquet, detected by its magic bytes or its file name."""

    name = "parquet"
    title = "Parquet"

    def detect(self, head: FileHead) -> TextDialect | None:
        return TextDialect() if head.magic == b"PAR1" or head.path.endswith(".parquet") else None
        # A .parquet file without the magic bytes is damaged. Opening it raises an error that says so.

    def columns(self, source: Source) -> tuple[str, ...]:
        return tuple(parquet_schema(source).names)

    def layout(self, sources: Sequence[Source], asked: ColumnRequest) -> RawLayout:
        if asked.schema and (asked.schema.header or asked.schema.delimiter):
            raise MesetaError(
                "prepare: header and delimiter of the --schema file apply only to text; remove them for Parquet files"
            )
        # Text files may be added to this dataset later, so categories must be valid text.
        return replace(infer_parquet_layout(sources, asked.named_columns, asked.schema), encoding=UTF_8)

    def blocks(self, source: Source, columns: Sequence[str], start: FilePosition) -> Iterator[Block]:
        """Yield blocks of `BLOCK_ROWS` rows from `start` on. Row groups before `start` are not read."""
        with closing(ParquetCursor(source, columns)) as cursor:
            if not cursor.num_rows:
                raise MesetaError(f"source {source.path!r} contains no rows; leave it out, or fetch it again")
            while start.row < cursor.num_rows:
                yield (block := cursor.read(start, FilePosition(row=min(start.row + BLOCK_ROWS, cursor.num_rows))))
                start = block.end

    def cursor(self, source: Source, columns: Sequence[str]) -> ParquetCursor:
        return ParquetCursor(source, columns)

    def is_seekable(self, source: Source) -> bool:
        return True

    def row_position(self, block: Block, row: int) -> FilePosition:
        return FilePosition(row=block.first_row + row)

    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        return convert_rows(_ParquetColumns(block, _batch(block), layout), layout, block)

    def filter_rows(self, block: Block, mask: NDArray[np.bool_]) -> Block:
        rows = _batch(block).filter(pa.array(mask))
        return replace(block, raw=rows, num_rows=rows.num_rows)

    def row_ends(self, block: Block) -> Sequence[int]:
        return range(1, block.num_rows + 1)

    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        """Return the types as they are stored."""
        schema = parquet_schema(source)
        check_names(where, names, schema.names)
        return pa.schema([schema.field(name) for name in names])

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        """Return stored values, converted to the types common to all files."""
        batch = _batch(block).select(list(names))
        arrays = [cast_key_column(block, name, batch.column(name), schema.field(name).type) for name in names]
        return pa.record_batch(arrays, schema)

    def find_empty_columns(self, sources: Sequence[Source], names: Sequence[str]) -> set[str]:
        """Return the columns that are null in all sampled rows. NaN counts as null."""
        sample = sample_parquet(sources, names)
        return {name for name, arrays in sample.items() if any(map(len, arrays)) and all(map(_has_only_nulls, arrays))}

    def check_types(self, source: Source, layout: RawLayout, earlier_dir: Path) -> None:
        """Raise MesetaError unless lists are still lists, with or without weights as before, and numbers are
        numbers."""
        plain = [column for column in layout.encoded_features if not column.cross]
        schema = Schema.model_construct(
            labels=layout.raw_label_columns,
            weight=layout.weight,
            group=layout.group,
            time=layout.time,
            dense=list(layout.raw_dense),
            time_features=[age.column for age in layout.ages],
            signed=list(layout.signed),
            categorical=[column.raw_column for column in plain],
            **({} if layout.number_format is None else asdict(layout.number_format)),
            multi_valued={column.raw_column: column.separator for column in plain if column.separator is not None},
            weights={column.raw_column: column.weight for column in plain if column.weight is not None},
            buckets={c.buckets.column: list(c.buckets.boundaries) for c in layout.sparse if c.buckets},
            crosses={column.name: list(column.cross) for column in layout.sparse if column.cross},
        )
        present = _layout_from_schema(f"source {str(source.path)!r}", source_schema(source), schema)
        # Features may have another order, because later parts add some at the end.
        columns = {column.name: column for column in present.sparse}
        for before in layout.sparse:
            now = columns.get(before.name, before)
            if (now.multi_valued, now.weighted) != (before.multi_valued, before.weighted):
                kind = source_schema(source).field(before.raw_column).type
                # A column without values fits either kind.
                if pa.types.is_null(kind) or (
                    before.multi_valued and is_list(kind) and pa.types.is_null(kind.value_type)
                ):
                    continue
                kinds = {True: "lists", False: "single values"}
                how = "with weights" if before.weighted else "without weights"
                raise MesetaError(
                    f"source {source.path!r}: column {before.raw_column!r} must hold {kinds[before.multi_valued]} "
                    f"{how}, "
                    f"as in dataset {str(earlier_dir)!r}"
                )


class ParquetCursor:
    """Sequential reader of some columns. Seeking backwards or to another row group starts at that group's beginning."""

    def __init__(self, source: Source, columns: Sequence[str]) -> None:
        self.row = 0
        self._source, self._columns = source, source.file_columns(columns)
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._decoded = RowQueue()
        with ExitStack() as stack, wrap_source_errors(source.path):
            self._file = stack.enter_context(open_parquet(source.path))
            sizes = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
            self._group_ends = np.cumsum(sizes, dtype=np.int64)
            # Reading at least one column gives the number of rows.
            self._columns = self._columns or self._file.schema_arrow.names[:1]
            self._resources = stack.pop_all()
        self.num_rows = self._file.metadata.num_rows

    def read(self, start: FilePosition, stop: FilePosition) -> Block:
        if stop.row > self.num_rows:
            raise MesetaError(
                f"source {self._source.path!r} has {self.num_rows:,} rows, but row {stop.row:,} was requested; fetch "
                "the file again"
            )
        with wrap_source_errors(self._source.path):
            self._seek(start.row)
            rows = self._take(stop.row - start.row)
        return Block(
            source=self._source,
            first_row=start.row,
            num_rows=rows.num_rows,
            raw=rows,
            end=stop,
            position_bytes=self._source.size_bytes * stop.row // self.num_rows,
        )

    def close(self) -> None:
        self._resources.close()

    def _seek(self, row: int) -> None:
        here, group = (int(np.searchsorted(self._group_ends, place, side="right")) for place in (self.row, row))
        if row < self.row or group > here or self._batches is None:
            self.row = int(self._group_ends[group - 1]) if group else 0
            groups = list(range(group, self._group_ends.size))
            self._batches = read_batches(self._file, groups, self._columns)
            self._decoded = RowQueue()
        while self.row < row:
            self._decode(1)
            passed = self._decoded.take(min(row - self.row, self._decoded.num_rows))
            self.row += passed.num_rows

    def _take(self, num_rows: int) -> pa.RecordBatch:
        self._decode(num_rows)
        self.row += num_rows
        [rows] = self._decoded.take(num_rows).combine_chunks().to_batches()
        return rows

    def _decode(self, num_rows: int) -> None:
        while self._decoded.num_rows < num_rows:
            batch = next(self._batches or iter(()), None)
            if batch is None:
                raise MesetaError(f"source {self._source.path!r} is truncated or damaged; fetch it again")
            self._decoded.add(batch)


def _batch(block: Block) -> pa.RecordBatch:
    assert isinstance(block.raw, pa.RecordBatch)
    return block.raw


def _has_only_nulls(column: pa.Array) -> bool:
    is_number = pa.types.is_floating(column.type)
    return bool(pc.all(pc.is_null(column, nan_is_null=is_number)).as_py())
