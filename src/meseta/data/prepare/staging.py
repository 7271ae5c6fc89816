"""A folder that appears whole or not at all, and whose making goes on where it was cut off."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meseta.data.dataset.dataset import DATASET_FILE
from meseta.data.prepare.record import load_record, save_record
from meseta.errors import StorageError
from meseta.machine.files import is_disk_full, move, parse_json, read_if_exists, sync_all, to_json_types
from meseta.machine.kernel import boot_id
from meseta.machine.locks import try_lock
from meseta.spec import MesetaError

JOURNAL_FILE = "meseta-prepare-unfinished.json"
COMMIT_INTERVAL_S = 20.0
"""Seconds between two entries of the journal: what a kill costs, about."""


class Staging:
    """The unfinished form of a folder, with a journal of what in it can be relied on."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        """`key`: all that the work depends on; a journal with another one is of other work."""
        self.folder = folder
        self.scratch = folder / "spool"
        """For files that the finished folder does not have."""
        # What was written before a machine went down may not have reached the disk: such a leftover is not used.
        self._key = to_json_types({**key, "boot": boot_id()})
        self.state: dict[str, Any] = self._load()
        """What was committed last, by this process or the one that was cut off; empty: nothing."""
        self._committed_s = time.monotonic()

    def _load(self) -> dict[str, Any]:
        content = read_if_exists(self.folder / JOURNAL_FILE)  # of which a failed read must not look like no work so far
        try:
            journal = parse_json(content or b"", finite=False)
            return dict(journal["state"]) if journal["key"] == self._key else {}
        except (ValueError, KeyError, TypeError):
            return {}

    def commit(self, state: Mapping[str, Any]) -> None:
        """From here on the work goes on from `state`, plain data; files that it speaks of are written already."""
        temporary = self.folder / f"{JOURNAL_FILE}.tmp"
        temporary.write_text(json.dumps({"key": self._key, "state": state}))
        move(temporary, self.folder / JOURNAL_FILE)
        self.state = dict(state)
        self._committed_s = time.monotonic()

    @property
    def is_commit_due(self) -> bool:
        """Whether what was done since the last commit is worth another one."""
        return time.monotonic() - self._committed_s >= COMMIT_INTERVAL_S

    @property
    def is_complete(self) -> bool:
        """Whether all is written, and only the tidying up and the rename are left: the journal goes first."""
        return not (self.folder / JOURNAL_FILE).exists() and load_record(self.folder) == self._key["record"]

    def begin(self) -> None:
        """Remove what no journal of this work speaks of."""
        if not self.state:
            for path in self.folder.iterdir():
                _remove(path)
            self.commit({})
        self.scratch.mkdir(exist_ok=True)

    def finish(self) -> None:
        """Leave nothing but the finished folder in it; can be cut off and called again."""
        if (self.folder / JOURNAL_FILE).exists():
            save_record(self._key["record"], self.folder)
            (self.folder / JOURNAL_FILE).unlink()
        shutil.rmtree(self.scratch, ignore_errors=True)


@contextmanager
def staged_folder(out: Path, record: Mapping[str, Any], *, force: bool, columns: str = "") -> Iterator[Staging]:
    """Gives `out`.tmp to write into and renames it to `out` at the end; `record` ends up in it as prepare.json.

    `columns`: the schema that was inferred, which another version may infer otherwise.

    A MesetaError and a full disk remove it. After anything else (an interrupt, a kill, a read that fails) it stays if
    something was committed, and the next call with equal `record`, `columns` and `force`, on a machine that was not
    restarted since, is given it with that state. It may be complete already; then there is nothing to write.

    Raises MesetaError where `out` exists, unless `force` and it is a prepared dataset or empty, where `out`.tmp is not
    a leftover of an earlier run, and where another process is at work on it.
    """
    _restore_replaced(out)
    _check_replaceable(out, force=force)
    tmp = out.with_name(out.name + ".tmp")
    try:
        with _folder_lock(tmp):
            if any(tmp.iterdir()) and not ((tmp / DATASET_FILE).exists() or list(tmp.glob(f"{JOURNAL_FILE}*"))):
                raise MesetaError(
                    f"prepare: {str(tmp)!r} is in the way and was not made by prepare; move it or change --out"
                )
            staging = Staging(tmp, {"record": record, "force": force, "columns": columns})
            with _discard_on_failure(staging):
                if not staging.is_complete:
                    staging.begin()
                yield staging
                staging.finish()
                sync_all(tmp)
                _replace(out, tmp)
    except OSError as error:
        kept = "once that is mended, the same command goes on where it was"
        way_on = kept if tmp.exists() else "make room there, or choose another --out"
        raise MesetaError(f"prepare: cannot write {str(tmp)!r}: {error.strerror or error}; {way_on}") from None


@contextmanager
def _discard_on_failure(staging: Staging) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        is_told = isinstance(error, MesetaError) and not isinstance(error, StorageError)  # it would come again
        useless = is_told or (isinstance(error, OSError) and is_disk_full(error))
        if useless or not (staging.state or staging.is_complete):
            shutil.rmtree(staging.folder, ignore_errors=True)
        raise


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Make `folder` if need be and hold it against other processes; the lock ends with this one, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            # Finished and renamed in between, it is another one.
            taken = not try_lock(descriptor) or not os.path.samestat(os.fstat(descriptor), folder.stat())
        except FileNotFoundError:
            taken = True
        if taken:
            raise MesetaError(
                f"prepare: another process is at work on {str(folder)!r}; wait for it, or choose another --out"
            )
        yield
    finally:
        os.close(descriptor)


def _check_replaceable(out: Path, *, force: bool) -> None:
    if not (out.exists() or out.is_symlink()):
        return
    if not force:
        raise MesetaError(f"prepare: {str(out)!r} exists; choose another --out, or --force to replace it")
    if not out.is_dir() or (any(out.iterdir()) and not (out / DATASET_FILE).exists()):
        raise MesetaError(f"prepare: {str(out)!r} is not a prepared dataset, so --force does not replace it")


def _replace(out: Path, tmp: Path) -> None:
    if not out.exists():
        move(tmp, out)
        return
    old = _replaced_path(out)
    move(out, old)
    move(tmp, out)
    shutil.rmtree(old)


def _restore_replaced(out: Path) -> None:
    """Undo, or complete, a replacement that was cut off."""
    old = _replaced_path(out)
    if not ((old / DATASET_FILE).exists() or (old.is_dir() and not any(old.iterdir()))):
        return
    if out.exists():
        shutil.rmtree(old)
    else:
        move(old, out)


def _replaced_path(out: Path) -> Path:
    return out.with_name(out.name + ".old.tmp")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
