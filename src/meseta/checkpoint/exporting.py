"""Export of tables and dense tensors to other formats, block by block, so that no table has to fit in memory."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any, BinaryIO, Literal, get_args
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from meseta.checkpoint.averages import average_values, saved_average, select_averages
from meseta.checkpoint.files.block import (
    DENSE_PATH,
    Values,
    check_header,
    group_files_by_block,
    read_chain,
    read_tensors,
)
from meseta.checkpoint.files.direct_io import copy_file
from meseta.checkpoint.files.layout import BlockSchema, Column, TableLayout, narrow_to_bfloat16, widen_bfloat16
from meseta.checkpoint.files.paths import table_folder
from meseta.checkpoint.manifest import (
    ColumnEntry,
    Count,
    ManifestPart,
    OptimizerEntry,
    PositiveCount,
    invalid_value_reason,
    read_manifest,
)
from meseta.errors import error_summary, format_value
from meseta.spec import MesetaError, suggest
from meseta.spec.tables import TableDtype, invalid_table_name_reason
from meseta.storage import ROW, as_stored
from meseta.system.files import (
    atomic_folder,
    format_json,
    has_control_characters,
    invalid_relative_path_reason,
    parse_json,
    resolve_inside,
    to_file_name,
)
from meseta.system.remote import Location, read_inner_file, to_location

ExportFormat = Literal["safetensors", "numpy"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)


def export(
    path: Location | str,
    out: Path | str,
    form: ExportFormat,
    *,
    tables: Sequence[str] = ("*",),
    states: bool = False,
    on_rows: Callable[[int], None] = lambda num_rows: None,
) -> list[Path]:
    """Write tables and dense tensors of a checkpoint to a new folder, and return its files.

        files            safetensors                 numpy
        rows             tables/TABLE.safetensors    tables/TABLE/row.npy
        state columns    tables/TABLE.safetensors    tables/TABLE/STATE.npy
        dense tensors    dense.safetensors           dense.npz

    The tensor `row` has the shape [num_embeddings, embedding_dim]. Format `numpy` stores bfloat16 as float32. Table
    names are escaped as in the checkpoint. export.json describes tables and optimizers for `meseta checkpoint import
    --from meseta`. The folder appears atomically after all files are written and checked.

    Args:
        path: Checkpoint to export.
        out: Folder to create.
        form: Format of the files.
        tables: Shell patterns of the tables to export.
        states: Whether to export the states of the row optimizers. Without them, averaged weights are exported.
        on_rows: Called with the number of rows of each written block.

    Raises MesetaError if the folder exists, a pattern matches no table, or the checkpoint is damaged.
    """
    path, out = to_location(path), Path(out)
    manifest = read_manifest(path)
    names = _select_tables(path, manifest["tables"], tables)
    if out.exists():
        raise MesetaError(f"export: {str(out)!r} exists already; choose a new folder")
    with atomic_folder(out) as folder:
        (folder / "tables").mkdir()
        # Training continues from rows with their states, so these are no averages.
        average = manifest["state"] if not states and saved_average(manifest["state"]) else None
        for name in names:
            _export_table(path, manifest["tables"][name], folder / table_folder(name), form, states, average, on_rows)
        _export_dense(path, manifest["dense"], folder, form, averages=average is not None)
        (folder / EXPORT_PATH).write_text(export_manifest(manifest, form, names, states=states))
    return sorted(file for file in out.rglob("*") if file.is_file())


def _select_tables(path: Location, tables: Mapping[str, Any], patterns: Sequence[str]) -> list[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tables):
            raise MesetaError(
                f"export: no table of checkpoint {str(path)!r} matches {pattern!r}; {suggest(pattern, sorted(tables))}"
            )
    return [name for name in sorted(tables) if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _export_table(
    root: Location,
    entry: Mapping[str, Any],
    stem: Path,
    form: ExportFormat,
    states: bool,
    average: Mapping[str, Any] | None,
    on_rows: Callable[[int], None],
) -> None:
    schema = BlockSchema.from_dict(entry)
    columns = [column for column in schema.columns if states or column.name == ROW]
    make = _create_safetensors_file if form == "safetensors" else _create_numpy_files
    with make(stem, schema, columns, entry["num_embeddings"]) as arrays:
        for files in group_files_by_block(entry):
            block, values = files[0], read_chain(root, schema, files)
            if average is not None:
                values = {**values, ROW: average_values(average, values)}
            for column in columns:
                stored = values[column.name]
                if form == "numpy" and column.dtype == "bfloat16":
                    stored = widen_bfloat16(stored)
                arrays[column.name].write(block["first_row"], stored)
            on_rows(block["num_rows"])


@dataclass(frozen=True)
# A write to a full disk raises OSError. Through a memory map, it would kill the process.
class _ArrayFile:
    """File with the rows of one column, one after the other."""

    file: BinaryIO
    offset: int
    """Position of the first row in the file, in bytes."""

    def write(self, first_row: int, values: np.ndarray) -> None:
        if values.size:
            self.file.seek(self.offset + first_row * (values.nbytes // len(values)))
            self.file.write(np.ascontiguousarray(values).data.cast("B"))


@contextmanager
def _create_numpy_files(
    stem: Path, schema: BlockSchema, columns: Sequence[Column], num_rows: int
) -> Iterator[dict[str, _ArrayFile]]:
    stem.mkdir()
    arrays: dict[str, _ArrayFile] = {}
    with ExitStack() as files:
        for column in columns:
            file = files.enter_context((stem / array_file_name(column.name)).open("wb"))
            shape = schema.shape(column, num_rows)
            header = {"descr": array_dtype(column).str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            arrays[column.name] = _ArrayFile(file, file.tell())
        yield arrays


@contextmanager
def _create_safetensors_file(
    stem: Path, schema: BlockSchema, columns: Sequence[Column], num_rows: int
) -> Iterator[dict[str, _ArrayFile]]:
    # The safetensors library writes tensors from memory only, so the file is written here. Its format is 8 bytes with
    # the length of the JSON header, the header, and the numbers.
    header: dict[str, Any] = {}
    at = 0
    for column in columns:
        shape = schema.shape(column, num_rows)
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(column.stored_dtype).itemsize
        if column.dtype not in SAFETENSORS_TYPES:
            raise MesetaError(f"export: safetensors does not support dtype {column.dtype}; use --format numpy")
        header[column.name] = {
            "dtype": SAFETENSORS_TYPES[column.dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with stem.with_name(f"{stem.name}.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        yield {column.name: _ArrayFile(file, start + header[column.name]["data_offsets"][0]) for column in columns}


def _export_dense(root: Location, entry: Mapping[str, Any], out: Path, form: ExportFormat, *, averages: bool) -> None:
    tensors = read_tensors(root, entry)
    if averages:
        tensors = select_averages(tensors)
    if form == "safetensors" and averages:
        save_file(tensors, out / DENSE_PATH)
        return
    if form == "safetensors":
        copy_file(root / entry["path"], out / DENSE_PATH, entry["num_bytes"])
        return
    arrays: dict[str, Any] = {
        name: (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
        for name, tensor in tensors.items()
    }
    # Pack in memory: after a failed write to a full disk, ZipFile reports the error a second time when it is freed.
    packed = io.BytesIO()
    # np.savez rejects an array named 'file', so use ZipFile.
    with ZipFile(packed, "w") as archive:
        for name, array in arrays.items():
            if fault := invalid_relative_path_reason(f"{name}.npy"):
                way_out = "export with --format safetensors"
                raise MesetaError(
                    f"export: dense tensor {format_value(name)} cannot name a file of an archive: {fault}; {way_out}"
                )
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
    (out / ARCHIVE_PATH).write_bytes(packed.getvalue())


EXPORT_FORMAT = "meseta.export/1"
EXPORT_PATH = "export.json"
ARCHIVE_PATH = "dense.npz"
"""Archive of the dense tensors in format `numpy`."""
SAFETENSORS_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
# Exceptions that libraries raise for damaged files.
_READ_ERRORS = (SafetensorError, BadZipFile, OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError,
                MemoryError,
           OverflowError, SyntaxError, TokenError)  # fmt: skip


class _ExportedTable(ManifestPart):
    num_embeddings: PositiveCount
    embedding_dim: Annotated[int, Field(ge=1, lt=1 << 31)]
    dtype: TableDtype
    optimizer: OptimizerEntry
    columns: Annotated[list[ColumnEntry], Field(min_length=1, max_length=1000)]


class _ExportManifest(ManifestPart):
    format: Literal["meseta.export/1"]
    files: ExportFormat
    states: bool
    step: Count
    embedding_step: Count | None
    dense_optimizer: str | None
    tables: dict[str, Any]


def export_manifest(manifest: Mapping[str, Any], form: ExportFormat, tables: Sequence[str], *, states: bool) -> str:
    """Return the text of export.json for some tables of a checkpoint. Entries keep all columns and optimizers, with or
    without `states`."""
    state = manifest["state"]
    kept = ("num_embeddings", "embedding_dim", "dtype", "optimizer", "columns")
    entries = {name: {key: manifest["tables"][name][key] for key in kept} for name in tables}
    document = {
        "format": EXPORT_FORMAT,
        "files": form,
        "states": states,
        "step": manifest["step"],
        "embedding_step": state.get("embedding_step"),
        "dense_optimizer": state.get("dense_optimizer"),
        "tables": entries,
    }
    return format_json(document)


@dataclass(frozen=True)
class ExportReader:
    """Reader for a folder that `export` wrote, with a checked manifest."""

    root: Path
    file_format: ExportFormat
    has_states: bool
    embedding_step: int | None
    """Number of steps that row optimizers use for bias correction. `None` if the checkpoint had no training state."""
    dense_optimizer: str | None
    """Class of the dense optimizer. `None` if the checkpoint had no training state."""
    tables: Mapping[str, Mapping[str, Any]]
    """Entries of the tables, as in the manifest of a checkpoint but without blocks."""

    @staticmethod
    def open(root: Path) -> ExportReader:
        """Read and check export.json. Raises MesetaError if it is missing, damaged, or has another format."""
        where = f"export {str(root)!r}"
        try:
            document = parse_json(read_inner_file(root, EXPORT_PATH))
        except OSError as error:
            raise MesetaError(
                f"{where}: cannot read {EXPORT_PATH}: {error.strerror or error}; choose a folder that "
                "`meseta checkpoint export` of this version wrote in format safetensors or numpy"
            ) from None
        except ValueError as error:
            raise MesetaError(f"{where}: {EXPORT_PATH} is not JSON ({error}); export again") from None
        file_format = document.get("format") if isinstance(document, dict) else None
        if file_format != EXPORT_FORMAT:
            raise MesetaError(
                f"{where}: format of {EXPORT_PATH} must be {EXPORT_FORMAT!r}, got {format_value(file_format)}; import "
                "the folder with the version that wrote it"
            )
        problem = invalid_value_reason("", document, _ExportManifest)
        for name, entry in document["tables"].items() if problem is None else ():
            problem = problem or invalid_value_reason(f"tables.{name}.", entry, _ExportedTable)
            fault = (
                None if problem else invalid_table_name_reason(name) or BlockSchema.from_dict(entry).invalid_reason()
            )
            problem = f"table {format_value(name)}: {fault}" if fault else problem
        if problem is not None:
            raise MesetaError(f"{where}: {EXPORT_PATH} is malformed ({problem}); export again")
        keys = ("files", "states", "embedding_step", "dense_optimizer", "tables")
        return ExportReader(root, *(document[key] for key in keys))

    @contextmanager
    def open_table(self, layout: TableLayout) -> Iterator[Callable[[int, int], Values]]:
        """Context manager that yields a function `read(first, stop)`, which returns the columns of `layout` for a range
        of rows.

        The context manager and `read` raise MesetaError unless the files have exactly the shapes and types of `layout`,
        and finite values.
        """
        name, num_rows = layout.spec.name, layout.spec.num_embeddings
        columns = {column.name: column for column in layout.schema.columns}
        with ExitStack() as opened:
            readers = {}
            for column in columns.values():
                path = self._path(name, column.name)
                shape = layout.schema.shape(column, num_rows)
                with _wrap_read_errors(path):
                    opening = _open_safetensors if self.file_format == "safetensors" else _open_numpy
                    readers[column.name] = path, opened.enter_context(opening(self._file(path), column, shape))

            def read(first: int, stop: int) -> Values:
                values: Values = {}
                for key, (path, rows) in readers.items():
                    with _wrap_read_errors(path):
                        values[key] = np.ascontiguousarray(rows(first, stop))
                        _check_finite(columns[key], values[key])
                return values

            yield read

    def read_dense(self) -> dict[str, Tensor]:
        """Return the dense tensors by name, on the CPU. Raises MesetaError if missing, damaged or not finite."""
        path = self.root / (DENSE_PATH if self.file_format == "safetensors" else ARCHIVE_PATH)
        with _wrap_read_errors(path):
            file = self._file(path)
            if self.file_format == "safetensors":
                check_header(file)
                tensors: dict[str, Tensor] = load_file(file)
            else:
                tensors = _read_archive(file)
            for name, tensor in tensors.items():
                if has_control_characters(name):
                    raise ValueError(f"the name {format_value(name)} has control characters")
                if not tensor.isfinite().all():
                    raise ValueError(f"{name!r} has values that are not finite")
        return tensors

    def _path(self, table: str, column: str) -> Path:
        suffix = ".safetensors" if self.file_format == "safetensors" else f"/{array_file_name(column)}"
        return self.root / f"{table_folder(table)}{suffix}"

    def _file(self, path: Path) -> Path:
        return resolve_inside(self.root, str(path.relative_to(self.root)))


def array_file_name(column: str) -> str:
    """Return the file name of a column in format `numpy`, inside the folder of its table."""
    return f"{to_file_name(column)}.npy"


def array_dtype(column: Column) -> np.dtype[Any]:
    """Return the dtype of a column in format `numpy`. Columns of bfloat16, which numpy lacks, are stored as float32."""
    return np.dtype("float32" if column.dtype == "bfloat16" else column.stored_dtype)


@contextmanager
def _wrap_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except MesetaError:
        raise
    except _READ_ERRORS as error:
        why = getattr(error, "strerror", None) or error_summary(error)
        raise MesetaError(f"export file {str(path)!r} does not match its manifest ({why}); export again") from None


RowReader = Callable[[int, int], np.ndarray]
"""Function (first, stop) that returns the rows first..stop-1 of a column as stored."""


@contextmanager
def _open_safetensors(path: Path, column: Column, shape: tuple[int, ...]) -> Iterator[RowReader]:
    check_header(path)
    with safe_open(path, framework="pt") as file:
        rows = file.get_slice(column.name)
        _check_dtype_and_shape(
            column, (rows.get_dtype(), tuple(rows.get_shape())), (SAFETENSORS_TYPES[column.dtype], shape)
        )
        yield lambda first, stop: as_stored(rows[first:stop]).numpy()


@contextmanager
def _open_numpy(path: Path, column: Column, shape: tuple[int, ...]) -> Iterator[RowReader]:
    rows = np.lib.format.open_memmap(path, mode="r")
    _check_dtype_and_shape(column, (rows.dtype, rows.shape), (array_dtype(column), shape))
    yield lambda first, stop: narrow_to_bfloat16(rows[first:stop]) if column.dtype == "bfloat16" else rows[first:stop]


def _check_dtype_and_shape(column: Column, actual: object, expected: object) -> None:
    if actual != expected:
        raise ValueError(f"type and shape of {column.name!r} must be {expected}, got {actual}")


def _check_finite(column: Column, values: np.ndarray) -> None:
    if not np.isfinite(widen_bfloat16(values) if column.dtype == "bfloat16" else values).all():
        raise ValueError(f"{column.name!r} has values that are not finite")


def _read_archive(path: Path) -> dict[str, Tensor]:
    tensors = {}
    with ZipFile(path) as archive:
        for member in archive.infolist():
            # `export` writes only uncompressed .npy files.
            if member.compress_type != ZIP_STORED or not member.filename.endswith(".npy"):
                raise ValueError(f"{format_value(member.filename)} is not an uncompressed .npy file")
            with archive.open(member) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            tensors[member.filename.removesuffix(".npy")] = torch.from_numpy(array)
    return tensors
