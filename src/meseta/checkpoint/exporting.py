"""A checkpoint's tables and dense tensors in other formats, block by block: a table never has to fit memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meseta.checkpoint.block import read_block
from meseta.checkpoint.dense import DENSE_PATH, read_dense
from meseta.checkpoint.layout import ROW, BlockSchema, Column, widened
from meseta.checkpoint.manifest import read_manifest
from meseta.spec import MesetaError, nearest
from meseta.spec.files import file_name

Format = Literal["safetensors", "numpy"]
FORMATS: tuple[Format, ...] = ("safetensors", "numpy")
_SAFETENSORS_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


def export(
    path: Path | str,
    out: Path | str,
    form: Format,
    *,
    tables: Sequence[str] = ("*",),
    states: bool = False,
    on_rows: Callable[[int], None] = lambda num_rows: None,
) -> list[Path]:
    """Write the tables that match `tables` (shell patterns) and the dense tensors of a checkpoint to a new folder.

    'safetensors' gives tables/TABLE.safetensors with a tensor 'row' [R, D], and with `states` one per state of the row
    optimizer, and dense.safetensors; 'numpy' gives tables/TABLE/row.npy, tables/TABLE/STATE.npy and dense.npz, with
    bfloat16 widened to float32. Names of tables are escaped as in the checkpoint. `on_rows` is told of rows as they are
    written. The folder appears by one rename when all is written and checked; returns its files.
    Raises MesetaError for a folder that exists, a pattern that matches nothing, and a damaged checkpoint.
    """
    path, out = Path(path), Path(out)
    manifest = read_manifest(path)
    names = _select(path, manifest["tables"], tables)
    if out.exists():
        raise MesetaError(f"export: {str(out)!r} exists; give a folder that does not")
    temporary = out.with_name(f".tmp-{out.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "tables").mkdir(parents=True)
        for name in names:
            _export_table(path, manifest["tables"][name], temporary / "tables" / file_name(name), form, states, on_rows)
        _export_dense(path, manifest["dense"], temporary, form)
        temporary.rename(out)
    except OSError as error:
        raise MesetaError(
            f"export: {str(out)!r} cannot be written: {error.strerror or error}; make room there"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(file for file in out.rglob("*") if file.is_file())


def _select(path: Path, tables: Mapping[str, Any], patterns: Sequence[str]) -> list[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tables):
            raise MesetaError(
                f"export: no table of checkpoint {str(path)!r} matches {pattern!r}; {nearest(pattern, sorted(tables))}"
            )
    return [name for name in sorted(tables) if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _export_table(
    root: Path, entry: Mapping[str, Any], stem: Path, form: Format, states: bool, on_rows: Callable[[int], None]
) -> None:
    schema = BlockSchema.from_dict(entry)
    columns = [column for column in schema.columns if states or column.name == ROW]
    make = _safetensors_arrays if form == "safetensors" else _numpy_arrays
    arrays = make(stem, schema, columns, entry["num_embeddings"])
    for block in entry["blocks"]:
        values = read_block(root, schema, block)
        rows = slice(block["first_row"], block["first_row"] + block["num_rows"])
        for column in columns:
            stored = values[column.name]
            if form == "numpy" and column.dtype == "bfloat16":
                stored = widened(stored)
            arrays[column.name][rows] = stored
        on_rows(block["num_rows"])
    for array in arrays.values():
        if isinstance(array, np.memmap):  # a table without elements has no file to flush
            array.flush()


def _numpy_arrays(stem: Path, schema: BlockSchema, columns: Sequence[Column], num_rows: int) -> dict[str, np.ndarray]:
    """Files of numpy's own format, mapped."""
    stem.mkdir()
    arrays: dict[str, np.ndarray] = {}
    for column in columns:
        dtype = "float32" if column.dtype == "bfloat16" else column.stored
        arrays[column.name] = np.lib.format.open_memmap(
            stem / f"{file_name(column.name)}.npy", mode="w+", dtype=dtype, shape=schema.shape(column, num_rows)
        )
    return arrays


def _safetensors_arrays(
    stem: Path, schema: BlockSchema, columns: Sequence[Column], num_rows: int
) -> dict[str, np.ndarray]:
    """One file, mapped: the library writes tensors from memory alone. Its format is eight bytes with the length of a
    JSON header, the header, and the numbers."""
    header: dict[str, Any] = {}
    at = 0
    for column in columns:
        shape = schema.shape(column, num_rows)
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(column.stored).itemsize
        if column.dtype not in _SAFETENSORS_TYPES:
            raise MesetaError(f"export: safetensors has no type {column.dtype}; export with --format numpy")
        header[column.name] = {
            "dtype": _SAFETENSORS_TYPES[column.dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = stem.with_name(f"{stem.name}.safetensors")
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    arrays = {}
    for column in columns:
        first, last = header[column.name]["data_offsets"]
        shape = schema.shape(column, num_rows)
        arrays[column.name] = (
            np.memmap(path, dtype=column.stored, mode="r+", offset=8 + len(text) + first, shape=shape)
            if last > first
            else np.empty(shape, column.stored)
        )
    return arrays


def _export_dense(root: Path, entry: Mapping[str, Any], out: Path, form: Format) -> None:
    tensors = read_dense(root, entry)
    if form == "safetensors":
        shutil.copyfile(root / entry["path"], out / DENSE_PATH)
        return
    arrays: dict[str, Any] = {
        name: (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
        for name, tensor in tensors.items()
    }
    np.savez(out / "dense.npz", **arrays)
