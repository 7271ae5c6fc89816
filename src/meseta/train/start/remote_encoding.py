"""Config and encoding of a run next to its checkpoints at a URL, so that other runs can start from there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.spec import MesetaError
from meseta.system.files import MAX_DOCUMENT_BYTES, is_folder, move
from meseta.system.remote import RemotePath

ENCODING_FOLDER = "encoding"
"""Folder next to the checkpoints with config.yaml, dataset.json, and the files that the latter names."""
FETCHED_FOLDER = "parent_encoding"
"""Folder in a run folder with a copy of that of its parent."""
_CONFIG_FILE = "config.yaml"
_CHUNK_BYTES = 64 << 20


def upload_encoding(run_dir: Path, checkpoints: RemotePath) -> None:
    """Copy the config, the description and the vocabularies of a run to the URL of its checkpoints, unless they are
    there.

    Raises MesetaError if the URL cannot be written, and OSError if a file cannot be read.
    """
    root, names = checkpoints / ENCODING_FOLDER, (_CONFIG_FILE, DATASET_FILE)
    contents = [(run_dir / name).read_bytes() for name in names]
    if set(names) <= root.entries().keys() and [_read(root / name) for name in names] == contents:
        return
    for name in root.files():
        (root / name).delete()
    for path in (_CONFIG_FILE, *_encoding_files(Dataset.load(run_dir)), DATASET_FILE):
        # The description is the last file, so that the folder is complete if it exists.
        (root / path).create((run_dir / path).read_bytes())


def fetch_encoding(checkpoint: RemotePath, run_dir: Path) -> Path | None:
    """Copy config and encoding of a checkpoint to a run folder. Return their folder, or `None` without them.

    Raises MesetaError if it cannot be read, or is invalid.
    """
    root, folder = checkpoint.parent / ENCODING_FOLDER, run_dir / FETCHED_FOLDER
    if is_folder(folder):
        return folder
    try:
        content = _read(root / DATASET_FILE)
    except FileNotFoundError:
        return None
    growing = run_dir / f".{FETCHED_FOLDER}-{os.getpid()}.tmp"  # Each rank may fetch it.
    shutil.rmtree(growing, ignore_errors=True)
    try:
        growing.mkdir(parents=True)
        (growing / DATASET_FILE).write_bytes(content)
        for path in (_CONFIG_FILE, *_encoding_files(Dataset.load(growing))):
            (growing / path).parent.mkdir(parents=True, exist_ok=True)
            with (growing / path).open("xb") as file:
                for start in range(0, (root / path).num_bytes(), _CHUNK_BYTES):
                    file.write((root / path).read(start, start + _CHUNK_BYTES))
        if not is_folder(folder):
            move(growing, folder)
    except FileNotFoundError as error:
        raise MesetaError(
            f"encoding {str(root)!r} lacks a file ({error}); pass --like RUN or DATASET with the same encoding"
        ) from None
    except OSError as error:
        if not is_folder(folder):  # Otherwise another rank was faster.
            raise MesetaError(f"run_dir {str(run_dir)!r} cannot be written: {error.strerror}; choose another") from None
    finally:
        shutil.rmtree(growing, ignore_errors=True)
    return folder


def _read(file: RemotePath) -> bytes:
    return file.read(0, MAX_DOCUMENT_BYTES + 1)


def _encoding_files(dataset: Dataset) -> list[str]:
    """Return the paths of the files that encoding needs, relative to the dataset."""
    paths = [path for feature in dataset.sparse for path in (feature.vocabulary, feature.candidates)]
    return [path for path in (*paths, dataset.touched) if path is not None]
