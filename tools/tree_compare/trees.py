"""The files of a source tree: of a folder, or of a commit of this repository."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath, PurePosixPath

PYTHON_SUFFIXES = {".py", ".pyi"}
CPP_SUFFIXES = {".cpp", ".cc", ".c", ".cu", ".h", ".hpp", ".cuh"}
PAGE_SUFFIX = ".md"


class TreeError(Exception):
    """A tree that cannot be read."""


def read_tree(name: str) -> dict[str, bytes]:
    """Return the files of a tree by their path. `name` is a folder, or a commit of the current repository.

    In a working tree of git, ignored files are left out. Raises TreeError if `name` is neither.
    """
    if Path(name).is_dir():
        return _read_folder(Path(name))
    if _git(".", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") is None:
        raise TreeError(f"{name!r} is neither a folder nor a commit of this repository")
    return dict(_read_commit(name))


def _git(folder: str | Path, *arguments: str, data: bytes | None = None) -> bytes | None:
    """Run git. Return what it prints, or `None` if it fails."""
    run = subprocess.run(["git", "-C", str(folder), *arguments], input=data, capture_output=True, check=False)
    return None if run.returncode else run.stdout


def _read_folder(folder: Path) -> dict[str, bytes]:
    tracked = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if tracked:
        paths: Iterable[Path] = [folder / name for name in tracked.decode().split("\0") if name]
    else:
        paths = [path for path in folder.rglob("*") if not _is_hidden(path.relative_to(folder))]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths) if path.is_file()}


def _is_hidden(path: PurePath) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _read_commit(commit: str) -> Iterator[tuple[str, bytes]]:
    listing = _git(".", "ls-tree", "-r", "-z", "--full-tree", commit) or b""
    entries = [entry.split(b"\t", 1) for entry in listing.split(b"\0") if entry]
    blobs = [(head.split()[2], path.decode()) for head, path in entries if head.split()[1] == b"blob"]
    output = _git(".", "cat-file", "--batch", data=b"".join(blob + b"\n" for blob, _ in blobs))
    if output is None:
        raise TreeError(f"git cannot read the files of {commit}")
    position = 0
    for _, path in blobs:
        end = output.index(b"\n", position)
        size = int(output[position:end].split()[2])
        yield path, output[end + 1 : end + 1 + size]
        position = end + 1 + size + 1


def suffix(path: str) -> str:
    return PurePosixPath(path).suffix


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether `path` is one of `folders` or in one of them."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
