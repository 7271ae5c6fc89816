"""The dense tensors of a model: one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from meseta.checkpoint import digest
from meseta.checkpoint.failures import broken_file, check_checksum, file_of
from meseta.errors import one_line
from meseta.machine.files import has_controls, sync
from meseta.spec import MesetaError

DensePath = Literal["dense.safetensors"]
DENSE_PATH: DensePath = "dense.safetensors"
_HEADER_BYTES = 16 << 20
"""The most for names, types and shapes: the library takes memory many times their text."""


def write_dense(root: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write and fsync; returns the entry in the manifest. Raises MesetaError, for example on a full disk."""
    # The format refuses tensors that share memory; a clone of each has its own.
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path = root / DENSE_PATH
    try:
        save_file(own, path)
        sync(path)
        num_bytes = path.stat().st_size
    except (SafetensorError, OSError) as error:
        raise MesetaError(f"checkpoint file {str(path)!r} cannot be written ({error}); make room there") from None
    return {"path": DENSE_PATH, "num_bytes": num_bytes, "checksum": digest.of_tensors(own)}


def read_dense(root: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by name, on the CPU; raises MesetaError when the file is missing, truncated or has other content."""
    path = file_of(root, entry)
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _HEADER_BYTES:
            raise ValueError(f"its header has {header_bytes:,} bytes, over {_HEADER_BYTES:,}")
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, MemoryError) as error:
        raise broken_file(path, f"is not a whole safetensors file ({one_line(error)})") from None
    if any(has_controls(name) for name in tensors):
        raise broken_file(path, "has a tensor whose name has control characters")
    check_checksum(path, entry["checksum"], digest.of_tensors(tensors))
    return tensors
