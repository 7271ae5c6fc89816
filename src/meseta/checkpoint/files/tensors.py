"""Files with named tensors in safetensors format: the dense part, and prefetched embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from meseta.checkpoint.failures import (
    check_checksum,
    damaged_file_error,
    locate_file,
    read_with_retry,
    wrap_write_errors,
)
from meseta.checkpoint.files import digest
from meseta.checkpoint.files.direct_io import write_buffered
from meseta.checkpoint.files.rate_limit import WriteRateLimiter
from meseta.errors import error_summary
from meseta.spec import MesetaError
from meseta.system.files import has_control_characters, read_bounded, sync
from meseta.system.remote import Location, RemotePath

DenseFileName = Literal["dense.safetensors"]
DENSE_PATH: DenseFileName = "dense.safetensors"
PrefetchedFileName = Literal["carried.safetensors"]
PREFETCHED_PATH: PrefetchedFileName = "carried.safetensors"
# Parsing the header with names, types and shapes takes a multiple of its size in memory.
_MAX_HEADER_BYTES = 16 << 20


def write_tensors(
    root: Location,
    name: DenseFileName | PrefetchedFileName,
    tensors: Mapping[str, Tensor],
    rate: WriteRateLimiter | None = None,
) -> dict[str, Any]:
    """Write and sync a file of tensors, and return its entry in the manifest. Raises MesetaError if writing fails."""
    # The format rejects tensors that share memory, so clone all.
    clones = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    path = root / name
    if isinstance(path, RemotePath):
        content = save(clones)
        with wrap_write_errors(path):
            path.create(content)
        return {"path": name, "num_bytes": len(content), "checksum": digest.hash_tensors(clones)}
    try:
        if rate is None:
            save_file(clones, path)
            sync(path)
        else:  # The library cannot limit the rate. Serializing first takes more memory.
            write_buffered(path, save(clones), rate)
        num_bytes = path.stat().st_size
    except (SafetensorError, OSError) as error:
        raise MesetaError(f"checkpoint file {str(path)!r} cannot be written ({error}); make room there") from None
    return {"path": name, "num_bytes": num_bytes, "checksum": digest.hash_tensors(clones)}


def read_tensors(root: Location, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of a file by name, on the CPU.

    Raises DamagedCheckpoint if the file is missing, truncated or changed, and StorageError if it cannot be read.
    """
    path = locate_file(root, entry)
    try:
        tensors = _parse_tensors(read_with_retry(root, path, lambda: _read_content(path, entry["num_bytes"])))
    except MesetaError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, MemoryError) as error:
        raise damaged_file_error(path, f"is not a whole safetensors file ({error_summary(error)})") from None
    if any(has_control_characters(name) for name in tensors):
        raise damaged_file_error(path, "has a tensor whose name has control characters")
    check_checksum(path, entry["checksum"], digest.hash_tensors(tensors))
    return tensors


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a local file, on the CPU. Raises ValueError as `check_header` does, and errors of
    safetensors."""
    check_header(path)
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


def check_header(path: Path) -> None:
    """Raise ValueError if the header of a file is too long."""
    with path.open("rb") as file:
        _check_header_bytes(file.read(8))


def _check_header_bytes(begin: bytes) -> None:
    header_bytes = int.from_bytes(begin, "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"its header has {header_bytes:,} bytes, more than the limit of {_MAX_HEADER_BYTES:,}")


def _read_content(path: Location, num_bytes: int) -> bytes:
    # With a memory map, an unreadable page would kill the process.
    return read_bounded(path, num_bytes) if isinstance(path, Path) else path.read(0, num_bytes)


def _parse_tensors(content: bytes) -> dict[str, Tensor]:
    _check_header_bytes(content[:8])
    # `load` returns tensors in an order that differs between processes, but ranks exchange them one by one.
    return dict(sorted(load(content).items()))
