"""Named tensors of a checkpoint: a safetensors file for the dense part, and one for answers that it carries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from meseta.checkpoint.failures import broken_file, check_checksum, file_of, read, writing
from meseta.checkpoint.files import digest
from meseta.checkpoint.files.rate import WriteRate
from meseta.checkpoint.files.raw import write_cached
from meseta.errors import one_line
from meseta.machine.files import has_controls, read_bounded, sync
from meseta.machine.remote import Location, RemotePath
from meseta.spec import MesetaError

DensePath = Literal["dense.safetensors"]
DENSE_PATH: DensePath = "dense.safetensors"
CarriedPath = Literal["carried.safetensors"]
CARRIED_PATH: CarriedPath = "carried.safetensors"
_HEADER_BYTES = 16 << 20
"""The most for names, types and shapes: the library takes memory many times their text."""


def write_tensors(
    root: Location, name: DensePath | CarriedPath, tensors: Mapping[str, Tensor], rate: WriteRate | None = None
) -> dict[str, Any]:
    """Write and fsync the file of this name; returns its entry in the manifest. Raises MesetaError, for example on a
    full disk."""
    # The format refuses tensors that share memory; a clone of each has its own.
    own = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    path = root / name
    if isinstance(path, RemotePath):
        content = save(own)
        with writing(path):
            path.create(content)
        return {"path": name, "num_bytes": len(content), "checksum": digest.of_tensors(own)}
    try:
        if rate is None:
            save_file(own, path)
            sync(path)
        else:  # the library writes files in one go, and their content takes memory
            write_cached(path, save(own), rate)
        num_bytes = path.stat().st_size
    except (SafetensorError, OSError) as error:
        raise MesetaError(f"checkpoint file {str(path)!r} cannot be written ({error}); make room there") from None
    return {"path": name, "num_bytes": num_bytes, "checksum": digest.of_tensors(own)}


def read_tensors(root: Location, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by name, on the CPU. Raises DamagedCheckpoint if the file is missing, truncated or has other content, and
    StorageError if it cannot be read."""
    path = file_of(root, entry)
    try:
        tensors = _parse(read(root, path, lambda: _content(path, entry["num_bytes"])))
    except MesetaError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, MemoryError) as error:
        raise broken_file(path, f"is not a whole safetensors file ({one_line(error)})") from None
    if any(has_controls(name) for name in tensors):
        raise broken_file(path, "has a tensor whose name has control characters")
    check_checksum(path, entry["checksum"], digest.of_tensors(tensors))
    return tensors


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a local file, on the CPU. Raises what safetensors raises, and ValueError as `check_header`
    does."""
    check_header(path)
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


def check_header(path: Path) -> None:
    """Raise ValueError for a file whose header is too long to be read."""
    with path.open("rb") as file:
        _check_header(file.read(8))


def _check_header(begin: bytes) -> None:
    header_bytes = int.from_bytes(begin, "little")
    if header_bytes > _HEADER_BYTES:
        raise ValueError(f"its header has {header_bytes:,} bytes, over {_HEADER_BYTES:,}")


def _content(path: Location, num_bytes: int) -> bytes:
    # Not mapped: a page that cannot be read would end the process.
    return read_bounded(path, num_bytes) if isinstance(path, Path) else path.read(0, num_bytes)


def _parse(content: bytes) -> dict[str, Tensor]:
    _check_header(content[:8])
    # `load` gives them in an order that differs from process to process, and ranks exchange them one by one.
    return dict(sorted(load(content).items()))
