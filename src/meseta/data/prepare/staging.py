"""Record of the sources and options of a dataset: `prepare.json`, stored next to dataset.json."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.data.dataset.growth import DEFAULT_MAX_CANDIDATES
from meseta.data.formats.format import Source
from meseta.data.prepare.options import PrepareOptions
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.system.files import is_disk_full, move, parse_json, read_if_exists, sync_all, to_json_types
from meseta.system.kernel import boot_id
from meseta.system.locks import try_lock
from meseta.system.remote import is_url

PREPARE_RECORD_FILE = "prepare.json"
SPOOL_FOLDER = ".meseta-spool"
"""Folder in a run folder with rows from memory until they are prepared. A hash of its rows is the name of a file."""
_JOURNAL_VERSION = 2
"""Version of the files in the staging folder. Files of other versions are not reused."""
_IRRELEVANT_OPTIONS = {"sources", "test_files", "valid_files", "out", "force", "num_threads"}


def make_record(options: PrepareOptions, sources: Sequence[Source], earlier: Dataset | None = None) -> dict[str, Any]:
    """Return everything that determines the rows of a dataset as plain data: the options, the files with size and
    change time, and a digest of the `earlier` dataset of `options.like`.

    Includes the content of a schema file. Raises MesetaError if it cannot be read.
    """
    chosen = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _IRRELEVANT_OPTIONS}
    chosen["valid_fraction"] = options.valid_fraction or None  # Both mean that there is no valid split.
    # Earlier versions did not have these options, so their records agree if the option is not used.
    if options.schema is None and options.time_features is None:
        chosen["time_features"] = "the time"
    for name in (
        "recipe_only",
        "encoding",
        "multi_valued",
        "valid_by_time",
        "time_features",
        "buckets",
        "default_buckets",
        "like",
        "grow",
        "recount",
        "retire_after",
        "without",
    ):
        if not chosen[name]:
            del chosen[name]
    if options.max_candidates == DEFAULT_MAX_CANDIDATES:
        del chosen["max_candidates"]
    if earlier is not None:
        chosen["like"] = earlier_digest(earlier)
    if options.schema is not None:
        try:
            chosen["schema"] = options.schema.read_text(errors="replace")
        except OSError as error:
            raise MesetaError(f"schema {str(options.schema)!r}: {error.strerror}") from None
    document: dict[str, Any] = to_json_types({"options": chosen, "sources": source_entries(sources)})
    return document


def earlier_digest(dataset: Dataset) -> str:
    """Return a SHA-256 of the description of a dataset without paths. It is the same in the folders of its runs."""
    paths = {"vocabulary", "candidates"}
    document = dataset.model_dump(mode="json", exclude={"sparse": {"__all__": paths}, "touched": True, "splits": True})
    document["splits"] = {name: split.num_rows for name, split in dataset.splits.items()}
    return sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def source_entries(sources: Sequence[Source]) -> dict[str, dict[str, Any]]:
    """Return the recorded properties of each file by absolute path or URL, or by the name of spooled rows."""
    return {
        _recorded_path(source.path): {
            "split": source.split,
            "size_bytes": source.size_bytes,
            "changed": source.changed,
            "partition": dict(source.partition),
        }
        for source in sources
    }


def _recorded_path(path: str) -> str:
    if is_url(path):
        return path
    folder, name = os.path.split(os.path.abspath(path))  # A file matches from another working directory.
    if os.path.basename(folder) == SPOOL_FOLDER:
        return f"{SPOOL_FOLDER}/{name}"  # Rows match in another run folder.
    return os.path.join(folder, name)


def load_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a folder, or `None` if it is missing or invalid. Raises StorageError if reading fails."""
    content = read_if_exists(folder / PREPARE_RECORD_FILE)
    try:
        record = parse_json(content or b"", finite=False)
        return {"options": dict(record["options"]), "sources": dict(record["sources"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def record_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first difference between two records, or return `None` if they agree."""
    for name, entry in now["sources"].items():
        if name not in before["sources"]:
            return f"{name!r} was not one of its sources"
        former = before["sources"][name]
        # Earlier versions did not make columns from folders.
        if {key: entry[key] for key in entry if key != "partition" or key in former} != former:
            return f"{name!r} has changed, or is in another split"
    for name in before["sources"]:
        if name not in now["sources"]:
            return f"{name!r} is not one of the sources now"
    if list(before["sources"]) != list(now["sources"]):
        return "its sources were in another order"
    for name in {**before["options"], **now["options"]}:
        was, now_value = before["options"].get(name), now["options"].get(name)
        if name == "like" and was and now_value and was != now_value:
            return "the dataset of --like has changed, or is another one"
        if was != now_value and (was or now_value):  # Records of earlier versions lack newer options.
            return f"the option {name} was {_format_value(was)} and is {_format_value(now_value)} now"
    return None


def _format_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


JOURNAL_FILE = "meseta-prepare-unfinished.json"
# If the process is killed, about this much work is lost.
COMMIT_INTERVAL_S = 20.0
"""Minimum interval in seconds between two commits to the journal."""


class Staging:
    """Temporary folder with a journal of the work that is complete."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        """Load the journal of `folder`. It is ignored unless it was written with the same `key`, which contains
        everything that the work depends on."""
        self.folder = folder
        self.scratch = folder / "spool"
        """Folder for temporary files that are not part of the finished folder."""
        # Files that were written before a crash of the machine may not have reached the disk, so they are not reused.
        self._key = to_json_types({**key, "version": _JOURNAL_VERSION, "boot": boot_id()})
        self.state: dict[str, Any] = self._load()
        """State of the last commit of this process or of the interrupted one. Empty if nothing was committed."""
        self._committed_s = time.monotonic()

    def _load(self) -> dict[str, Any]:
        content = read_if_exists(self.folder / JOURNAL_FILE)  # Raises if reading fails, so that no work is discarded.
        try:
            journal = parse_json(content or b"", finite=False)
            return dict(journal["state"]) if journal["key"] == self._key else {}
        except (ValueError, KeyError, TypeError):
            return {}

    def commit(self, state: Mapping[str, Any]) -> None:
        """Record `state`, plain data, to resume from. All files that it refers to must be written already."""
        # Written by a rename, so that an interruption never leaves a partial journal.
        temporary = self.folder / f"{JOURNAL_FILE}.tmp"
        temporary.write_text(json.dumps({"key": self._key, "state": state}))
        move(temporary, self.folder / JOURNAL_FILE)
        self.state = dict(state)
        self._committed_s = time.monotonic()

    @property
    def is_commit_due(self) -> bool:
        """Whether the last commit is old enough for another one."""
        return time.monotonic() - self._committed_s >= COMMIT_INTERVAL_S

    @property
    def is_complete(self) -> bool:
        """Whether all files are written and only cleanup and rename remain. `finish` removes the journal first."""
        return not (self.folder / JOURNAL_FILE).exists() and load_record(self.folder) == self._key["record"]

    def begin(self) -> None:
        """Start or resume the work. All files are removed if the journal has no state of this work."""
        if not self.state:
            for path in self.folder.iterdir():
                _remove(path)
            self.commit({})
        self.scratch.mkdir(exist_ok=True)

    def finish(self) -> None:
        """Remove everything that is not part of the finished folder. Calling it again after an interruption is safe."""
        if (self.folder / JOURNAL_FILE).exists():
            # `is_complete` relies on this order: first the record, then the removal of the journal.
            record = json.dumps(self._key["record"], indent=1)
            (self.folder / PREPARE_RECORD_FILE).write_text(record + "\n")
            (self.folder / JOURNAL_FILE).unlink()
        shutil.rmtree(self.scratch, ignore_errors=True)


@contextmanager
def staged_folder(out: Path, record: Mapping[str, Any], *, force: bool, columns: str = "") -> Iterator[Staging]:
    """Context manager that yields a staging folder `out`.tmp and renames it to `out` at the end.

    `record` is stored in the folder as prepare.json. `columns` is the inferred schema, which other versions may infer
    differently.

    After a MesetaError or a full disk the staging folder is removed. After any other failure, such as an interrupt, a
    kill or a failed read, it remains if something was committed. The next call with equal `record`, `columns` and
    `force` resumes it, unless the machine was restarted. The resumed folder may be complete, so that nothing is left to
    write.

    Raises MesetaError if `out` exists (unless `force` is set and it is a prepared dataset or empty), if `out`.tmp is
    not a leftover of an earlier run, or if another process is writing it.
    """
    _restore_replaced(out)
    _check_replaceable(out, force=force)
    tmp = out.with_name(out.name + ".tmp")
    try:
        with _folder_lock(tmp):
            if any(tmp.iterdir()) and not ((tmp / DATASET_FILE).exists() or list(tmp.glob(f"{JOURNAL_FILE}*"))):
                raise MesetaError(
                    f"prepare: {str(tmp)!r} must not exist, because prepare did not make it; move it, or change --out"
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
        kept = "after this is fixed, run the same command to resume"
        way_on = kept if tmp.exists() else "free space there, or choose another --out"
        raise MesetaError(f"prepare: cannot write {str(tmp)!r}: {error.strerror or error}; {way_on}") from None


@contextmanager
def _discard_on_failure(staging: Staging) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # A MesetaError about the content would be raised again, but a failed read may succeed.
        is_permanent = isinstance(error, MesetaError) and not isinstance(error, StorageError)
        useless = is_permanent or (isinstance(error, OSError) and is_disk_full(error))
        if useless or not (staging.state or staging.is_complete):
            shutil.rmtree(staging.folder, ignore_errors=True)
        raise


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    # The OS releases the lock if the process dies.
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            # Another process may have finished and renamed the folder between the two calls.
            taken = not try_lock(descriptor) or not os.path.samestat(os.fstat(descriptor), folder.stat())
        except FileNotFoundError:
            taken = True
        if taken:
            raise MesetaError(
                f"prepare: another process is writing {str(folder)!r}; wait for it, or choose another --out"
            )
        yield
    finally:
        os.close(descriptor)


def _check_replaceable(out: Path, *, force: bool) -> None:
    if not (out.exists() or out.is_symlink()):
        return
    if not force:
        raise MesetaError(f"prepare: {str(out)!r} exists; choose another --out, or replace it with --force")
    if not out.is_dir() or (any(out.iterdir()) and not (out / DATASET_FILE).exists()):
        raise MesetaError(f"prepare: {str(out)!r} is not a prepared dataset, so --force does not replace it")


def _replace(out: Path, tmp: Path) -> None:
    if not out.exists():
        move(tmp, out)
        return
    old = _replaced_path(out)
    # A rename cannot replace a folder with files, so move the old one aside. `_restore_replaced` handles an
    # interruption between the two renames.
    move(out, old)
    move(tmp, out)
    shutil.rmtree(old)


def _restore_replaced(out: Path) -> None:
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
