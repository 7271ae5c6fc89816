"""Block-wise reader for folders that `export` wrote. Manifest and files are untrusted input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any, Literal
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meseta.checkpoint.files.block import Values
from meseta.checkpoint.files.layout import BlockSchema, Column, TableLayout, narrow_to_bfloat16, widen_bfloat16
from meseta.checkpoint.files.paths import table_folder
from meseta.checkpoint.files.tensors import DENSE_PATH, check_header, load_tensors
from meseta.checkpoint.manifest import (
    ColumnEntry,
    Count,
    ManifestPart,
    OptimizerEntry,
    PositiveCount,
    invalid_value_reason,
)
from meseta.errors import error_summary, format_value
from meseta.spec import MesetaError
from meseta.spec.tables import TableDtype, invalid_table_name_reason
from meseta.storage import as_stored
from meseta.system.files import format_json, has_control_characters, parse_json, resolve_inside, to_file_name
from meseta.system.remote import read_inner_file

ExportFormat = Literal["safetensors", "numpy"]
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
    """Return the text of export.json for an export of some tables of a checkpoint.

    The entries keep all columns and optimizers of the checkpoint, with or without `states`.
    """
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
        """Return the dense tensors by name, on the CPU.

        Raises MesetaError if the file is missing or damaged, or has values that are not finite.
        """
        path = self.root / (DENSE_PATH if self.file_format == "safetensors" else ARCHIVE_PATH)
        with _wrap_read_errors(path):
            file = self._file(path)
            tensors = load_tensors(file) if self.file_format == "safetensors" else _read_archive(file)
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
