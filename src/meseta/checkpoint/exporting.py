"""Export of tables and dense tensors to other formats, block by block, so that no table has to fit in memory."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, get_args
from zipfile import ZipFile

import numpy as np

from meseta.checkpoint.export_reader import (
    ARCHIVE_PATH,
    EXPORT_PATH,
    SAFETENSORS_TYPES,
    ExportFormat,
    array_dtype,
    array_file_name,
    export_manifest,
)
from meseta.checkpoint.files.chain import group_files_by_block, read_chain
from meseta.checkpoint.files.direct_io import copy_file
from meseta.checkpoint.files.layout import BlockSchema, Column, widen_bfloat16
from meseta.checkpoint.files.paths import table_folder
from meseta.checkpoint.files.tensors import DENSE_PATH, read_tensors
from meseta.checkpoint.manifest import read_manifest
from meseta.errors import format_value
from meseta.spec import MesetaError, suggest
from meseta.storage import ROW
from meseta.system.files import atomic_folder, invalid_relative_path_reason
from meseta.system.remote import Location, to_location

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
        states: Whether to export the states of the row optimizers.
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
        for name in names:
            _export_table(path, manifest["tables"][name], folder / table_folder(name), form, states, on_rows)
        _export_dense(path, manifest["dense"], folder, form)
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
    on_rows: Callable[[int], None],
) -> None:
    schema = BlockSchema.from_dict(entry)
    columns = [column for column in schema.columns if states or column.name == ROW]
    make = _create_safetensors_file if form == "safetensors" else _create_numpy_files
    with make(stem, schema, columns, entry["num_embeddings"]) as arrays:
        for files in group_files_by_block(entry):
            block, values = files[0], read_chain(root, schema, files)
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


def _export_dense(root: Location, entry: Mapping[str, Any], out: Path, form: ExportFormat) -> None:
    tensors = read_tensors(root, entry)
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
