"""Predicates for Arrow types, and the common type of a column in several files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from meseta.data.formats.format import NUM_PIECES, Source, rows_per_file, sample_sources, wrap_source_errors
from meseta.data.formats.partitions import check_partition, partition_type, sample_partitions
from meseta.data.schema.infer import MAX_SAMPLE_ROWS
from meseta.spec import MesetaError
from meseta.system.remote import is_url, open_file


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
        """Raise MesetaError if the types of a column in different files are incompatible. Unknown columns are accepted.

        `as_ids` also rejects pairs of a boolean and a number, which are spelled differently as ids, and a common type
        that cannot be a feature if one of the types can. `of_fractions` is passed to `can_be_feature`.
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
    """Whether a column of this type can be a feature. `of_fractions` admits lists of fractional numbers, for those that
    only contain whole numbers."""
    kind = dictionary_value_type(kind)
    if is_list(kind):
        item = dictionary_value_type(kind.value_type)
        return is_id(item) or is_weighted_id(item) or (of_fractions and is_fractional(item))
    return is_number(kind) or is_text(kind)


def _common_text(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    return pa.large_string() if is_string(one) and is_string(other) else pa.large_binary()


def _common_number(one: pa.DataType, other: pa.DataType) -> pa.DataType:
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


BLOCK_ROWS = 32_768
"""Maximum number of rows of a block."""
# float64 represents every integer up to this absolute value exactly.
_MAX_EXACT_INTEGER = 2**53
# Different decimals with at most this many digits are different in float64.
_MAX_EXACT_DIGITS = 15


@contextmanager
def open_parquet(path: str) -> Iterator[pq.ParquetFile]:
    """Context manager that opens a local or remote file. Raises pyarrow.ArrowException if the file is damaged."""
    with ExitStack() as stack:
        # Arrow opens local files itself, so that its threads read them without Python.
        stored = stack.enter_context(open_file(path)) if is_url(path) else path
        try:
            file = stack.enter_context(pq.ParquetFile(stored))
            len(file.schema_arrow.names)  # Decodes the names.
        except UnicodeDecodeError as error:
            raise pa.ArrowInvalid(f"the name of a column is not UTF-8: {error}") from None
        yield file


def parquet_schema(source: Source) -> pa.Schema:
    """Return the columns of a file. Raises MesetaError if the file is damaged."""
    with wrap_source_errors(source.path), open_parquet(source.path) as file:
        return file.schema_arrow


def partition_types(sources: Sequence[Source]) -> dict[str, pa.DataType]:
    """Return the types of columns from folders, inferred from their values in all `sources`."""
    names = dict.fromkeys(name for source in sources for name in source.partition)
    values = {name: list(dict.fromkeys(source.partition.get(name) or "" for source in sources)) for name in names}
    return {name: partition_type(values[name]) for name in names}


def source_schema(source: Source, types: Mapping[str, pa.DataType] | None = None) -> pa.Schema:
    """Return the columns of a file followed by those from its folders.

    `types` are the types of the columns from folders. The default infers them from the values of this file. Raises
    MesetaError if the file is damaged, or if a column is in the file and a folder.
    """
    schema = parquet_schema(source)
    check_partition(f"source {source.path!r}", source.partition, schema.names)
    types = partition_types([source]) if types is None else types
    for name in source.partition:
        schema = schema.append(pa.field(name, types[name]))
    return schema


def sample_parquet(
    sources: Sequence[Source], columns: Sequence[str], max_rows: int = MAX_SAMPLE_ROWS
) -> dict[str, list[pa.Array]]:
    """Return approximately `max_rows` sampled values of each column, as one array per batch.

    Only some of the `sources` are read. Arrays keep the types of their files, but dictionaries are decoded. A file
    contributes to the columns that it has, and columns from folders are sampled from all files. Raises MesetaError if a
    file is damaged.
    """
    chosen = sample_sources(sources)
    num_rows = min(rows_per_file(len(columns), len(chosen)), -(-max_rows // len(chosen)))
    sample: dict[str, list[pa.Array]] = {name: [] for name in columns}
    for source in chosen:
        for batch in _sample_batches(source, columns, num_rows):
            for name, array in zip(batch.schema.names, batch.columns, strict=True):
                sample[name].append(decode_values(array))
    partitions = sample_partitions([source.partition for source in sources])
    sample |= {name: [pa.array(partitions[name])] for name in columns if name in partitions}
    return sample


def read_batches(
    file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str], num_rows: int = BLOCK_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield columns of row groups in batches of up to `num_rows` rows. Text may be invalid UTF-8. Raises
    pyarrow.ArrowException if other content is invalid."""
    for group in groups:  # One at a time, because Arrow cannot concatenate dictionaries inside lists.
        for batch in file.iter_batches(num_rows, row_groups=[group], columns=list(columns)):
            _check_batch(batch)
            yield batch


def _sample_batches(source: Source, columns: Sequence[str], num_rows: int) -> Iterator[pa.RecordBatch]:
    with wrap_source_errors(source.path), open_parquet(source.path) as file:
        present = {*file.schema_arrow.names}
        names = [name for name in columns if name in present]
        number = min(file.num_row_groups, NUM_PIECES)
        for piece in range(number):
            group = piece * file.num_row_groups // number
            yield from itertools.islice(read_batches(file, [group], names, -(-num_rows // number)), 1)


def _check_batch(batch: pa.RecordBatch) -> None:
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            if not _holds_text(column.type):
                # Text that is not UTF-8 is a bad row rather than a damaged file, so check only the indices.
                raise
            _check_dictionaries(column)


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _holds_text(kind.value_type)
    return is_string(kind) or any(_holds_text(kind.field(place).type) for place in range(kind.num_fields))


def _check_dictionaries(array: pa.Array) -> None:
    kind = array.type
    if pa.types.is_dictionary(kind):
        low, high = pc.min_max(array.indices).values()
        if low.is_valid and not 0 <= low.as_py() <= high.as_py() < len(array.dictionary):
            raise pa.ArrowInvalid("a value is not in the dictionary of its column")
    elif is_list(kind):
        _check_dictionaries(array.values)
    elif pa.types.is_struct(kind):
        for place in range(kind.num_fields):
            _check_dictionaries(array.field(place))


def decode_values(array: pa.Array) -> pa.Array:
    """Decode dictionaries, and convert string or binary views to contiguous arrays. Returns other arrays unchanged."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return decode_values(array.dictionary_decode())
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if pa.types.is_binary_view(kind) else array


def check_exact_in_float64(sources: Sequence[Source], types: ColumnTypes, columns: Sequence[str]) -> None:
    """Raise MesetaError if a column that is exact (integers or decimals) in only some files has a value with more
    digits than float64 keeps."""
    kinds = {field.name: field.type for field in types.common_schema}
    mixed = [name for name in columns if any(can_lose_precision(kind, kinds[name]) for kind in types.get_types(name))]
    for source in sources if mixed else ():
        with wrap_source_errors(source.path), open_parquet(source.path) as file:
            schema = file.schema_arrow
            file_columns = source.file_columns(mixed)
            names = [name for name in file_columns if can_lose_precision(schema.field(name).type, kinds[name])]
            for batch in read_batches(file, range(file.num_row_groups if names else 0), names):
                for name, array in zip(batch.schema.names, batch.columns, strict=True):
                    value = _find_inexact(array, kinds[name])
                    if value is not None:
                        raise MesetaError(
                            f"source {source.path!r}: column {name!r} is {array.type}, but "
                            f"{_exact_type(types, name)}; {value} has more digits than float64 keeps: write both "
                            "files with the same type"
                        )


def _exact_type(types: ColumnTypes, name: str) -> str:
    """Return the first type of a column that its common type represents exactly, and a file that has this type."""
    common = types.common_schema.field(name).type
    return next(
        f"{kind} in {path!r}" for kind, path in types.get_types(name).items() if not can_lose_precision(kind, common)
    )


def can_lose_precision(kind: pa.DataType, common: pa.DataType) -> bool:
    """Whether values of a type may have more digits than the common type keeps."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_floating(common):
        is_long = pa.types.is_decimal(kind) and kind.precision > _MAX_EXACT_DIGITS
        return is_long or (pa.types.is_integer(kind) and kind.bit_width == 64)
    pairs = zip(_field_types(kind), _field_types(common), strict=False)
    return any(can_lose_precision(one, other) for one, other in pairs)


def _field_types(kind: pa.DataType) -> list[pa.DataType]:
    return [kind.field(place).type for place in range(kind.num_fields)]


def _find_inexact(array: pa.Array, common: pa.DataType) -> Mapping[str, Any] | Any:
    array = decode_values(array)
    if is_list(array.type):
        return _find_inexact(array.flatten(), common.value_type)
    if pa.types.is_struct(array.type):
        parts = zip(array.flatten(), _field_types(common), strict=True)
        return next((value for part, kind in parts if (value := _find_inexact(part, kind)) is not None), None)
    if not can_lose_precision(array.type, common):
        return None
    most = _MAX_EXACT_INTEGER if is_integral(array.type) else 10 ** (_MAX_EXACT_DIGITS - array.type.scale)
    extremes = [value.as_py() for value in pc.min_max(array).values()]
    return next((value for value in extremes if value is not None and abs(value) > most), None)
