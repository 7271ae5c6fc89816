"""Tests of direct I/O: any size, short transfers, and file systems without it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from meseta.checkpoint.files import direct_io
from meseta.checkpoint.files.direct_io import PAGE_BYTES, read_direct, scratch_buffer, write_direct

SIZES = (1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES + 77)


@pytest.fixture(autouse=True)
def always_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "MIN_DIRECT_BYTES", 0)


def there_and_back(path: Path, size: int) -> None:
    content = os.urandom(size)
    scratch_buffer(size)[:size] = content
    write_direct(path, scratch_buffer(size), size)
    assert path.read_bytes() == content
    scratch_buffer(size)[:size] = bytes(size)
    assert read_direct(path, size) == content
    assert read_direct(path, size - size // 3) == content[: size - size // 3]
    assert read_direct(path, size + 2 * PAGE_BYTES) == content  # the file ends before


@pytest.mark.parametrize("size", SIZES)
def test_any_size(tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(bytes(10 * PAGE_BYTES))
    there_and_back(tmp_path / "file", size)


@pytest.mark.parametrize("limit", [PAGE_BYTES, PAGE_BYTES + 100])
def test_short_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """The system may transfer less than requested."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, content, at: min(pwrite(file, content, at), limit))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: min(preadv(file, buffers, at), limit))
    there_and_back(tmp_path / "file", 3 * PAGE_BYTES + 5)


def test_file_systems_without_direct_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, refused = os.open, []

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    there_and_back(tmp_path / "file", PAGE_BYTES + 9)
    assert refused


def test_errors_of_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_direct(tmp_path / "missing", 10)
    with pytest.raises(FileNotFoundError):
        write_direct(tmp_path / "no" / "file", scratch_buffer(3), 3)
