"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meseta.data.dataset import FILE_NAME
from meseta.spec import MesetaError

_MARKER = "meseta-prepare-unfinished"


@contextmanager
def staged_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Gives `out`.tmp to write into and renames it to `out` at the end; on any error or interrupt removes it.

    Raises MesetaError where `out` exists, unless `force` and it is a prepared dataset or empty, or where `out`.tmp is
    not a leftover of an earlier run.
    """
    _check_free(out, force=force)
    tmp = out.with_name(out.name + ".tmp")
    if tmp.exists():
        if not ((tmp / _MARKER).exists() or (tmp / FILE_NAME).exists()):
            raise MesetaError(
                f"prepare: {str(tmp)!r} is in the way and was not made by prepare; move it or change --out"
            )
        shutil.rmtree(tmp)
    try:
        try:
            tmp.mkdir(parents=True)
            (tmp / _MARKER).touch()
            yield tmp
            (tmp / _MARKER).unlink()
            _replace(out, tmp)
        except OSError as error:
            raise MesetaError(f"prepare: cannot write {str(tmp)!r}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _check_free(out: Path, *, force: bool) -> None:
    if not (out.exists() or out.is_symlink()):
        return
    if not force:
        raise MesetaError(f"prepare: {str(out)!r} exists; choose another --out, or --force to replace it")
    if not out.is_dir() or (any(out.iterdir()) and not (out / FILE_NAME).exists()):
        raise MesetaError(f"prepare: {str(out)!r} is not a prepared dataset, so --force does not replace it")


def _replace(out: Path, tmp: Path) -> None:
    if not out.exists():
        tmp.rename(out)
        return
    old = out.with_name(out.name + ".old.tmp")
    out.rename(old)
    tmp.rename(out)
    shutil.rmtree(old)
