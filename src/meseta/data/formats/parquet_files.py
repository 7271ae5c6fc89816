"""Functions to open raw Parquet files and to read their schemas and samples of their rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from meseta.data.formats.format import Source, wrap_source_errors
from meseta.data.formats.parquet_types import ColumnTypes, is_integral, is_list, is_string
from meseta.data.formats.partitions import check_partition, partition_type, sample_partitions
from meseta.data.formats.sampling import NUM_PIECES, rows_per_file, sample_sources
from meseta.data.schema.infer import MAX_SAMPLE_ROWS
from meseta.spec import MesetaError
from meseta.system.remote import is_url, open_file

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
    """Yield some columns of row groups in batches of up to `num_rows` rows.

    Raises pyarrow.ArrowException if the content is invalid. Text that is not UTF-8 is accepted.
    """
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
    """Raise MesetaError if a value has more digits than float64 keeps.

    Only columns are checked that are integers or decimals in some files and floating point in others.
    """
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
