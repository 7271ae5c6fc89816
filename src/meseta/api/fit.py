"""Train a model on files or on rows in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from itertools import count
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np
import pyarrow as pa
import yaml

from meseta.api.callbacks import Callback
from meseta.api.command import run_command
from meseta.api.errors import argument_errors, spooled_names
from meseta.api.rows import Rows, as_paths, file_paths, storage_errors
from meseta.api.run import Run, lock_spool
from meseta.config import RunConfig, read_config_document
from meseta.config.load import get_value
from meseta.data.formats.table_rows import parse_times
from meseta.data.prepare.staging import SPOOL_FOLDER, load_record
from meseta.data.schema.roles import COLUMN_OPTIONS
from meseta.errors import format_value
from meseta.spec import MesetaError
from meseta.train.interop.default_settings import default_run_dir

Files = str | Path | Sequence[str | Path]
"""Files, folders, URLs or patterns of raw files."""
_COMMAND_OPTIONS = ("schema", "split_by", "bad_rows", "start_from", "nproc")
HeldOut = float | int | date | str | Path | Sequence[str | Path] | Rows | None
"""Rows of a split, see `fit`."""


def fit(
    data: Files | Rows,
    label: str | Sequence[str] | None = None,
    *,
    time: str | None = None,
    time_features: Sequence[str] | None = None,
    buckets: Sequence[str] | None = None,
    valid: HeldOut = None,
    test: HeldOut = None,
    schema: str | Path | None = None,
    dense: Sequence[str] = (),
    sparse: Sequence[str] = (),
    multi_valued: Sequence[str] = (),
    ignore: Sequence[str] = (),
    split_by: Literal["time", "group"] | None = None,
    bad_rows: Literal["error", "skip"] = "error",
    start_from: str | Path | None = None,
    config: str | Path | Mapping[str, Any] | RunConfig | None = None,
    run_dir: str | Path | None = None,
    nproc: int = 1,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Prepare data, train a model, evaluate it, and return the run.

    It runs `meseta train --data` in a child process, and the result has the same bits. The same call with the same
    `run_dir` resumes a run that was interrupted. Rows in memory are copied to a Parquet file in `run_dir`, block by
    block, which is removed once they are prepared, or after an error.
    Raises MesetaError for invalid data or options, KeyboardInterrupt after Ctrl-C, when all ranks have ended, and
    errors of callbacks.

    Args:
        data: Files, or rows in memory.
        label: Columns of labels, as names or patterns. `None` finds the label by its name.
        time: Column of times. `None` finds it by its name.
        time_features: Columns of times whose hour, weekday and age become features, as names or patterns. `None` means
            the column of times. An empty list means no features.
        buckets: Columns of numbers whose 20 buckets of equal size ('NAME=N': N buckets) become features. `None` means
            all of up to 100 columns. An empty list means no features.
        valid: Validation split, by which settings and the best weights are selected. It is one of:
            a number from 0 to below 1, the share of rows (0 means no split);
            the time at which the split begins: a larger number (s, ms, us or ns since 1970, by its size), a date, a
            datetime, or text in ISO 8601 such as "2026-01-31";
            a file, folder, URL or pattern, or a list of them, whose rows may also be in `data`; rows in memory.
            `None` means 0.1, and the last rows if there is a column of times.
        test: Test split, in the same forms. By time, it follows the validation split. `None` means 0.1.
        schema: File that describes the columns, in place of the other arguments that name columns.
        dense: Numeric columns, as names or patterns.
        sparse: Categorical columns, as names or patterns.
        multi_valued: Categorical columns of text with several values. 'NAME=|' names a separator, else it is inferred.
        ignore: Columns that are left out, as names or patterns.
        split_by: Whether shares are the last rows by time, or whole groups. `None` draws rows.
        bad_rows: Whether rows of files that cannot be parsed are an error or skipped.
        start_from: Run or checkpoint with the first weights and settings. All rows are trained on by default.
        config: Settings of the run, as for `meseta train`.
        run_dir: Folder of the run. `None` takes that of `config`, or a new folder below runs/.
        nproc: Number of ranks on this machine.
        callbacks: Objects that this process calls with the events of the run. They may stop it.
    """
    arguments = locals()
    document = _config_document(config)
    folder = _choose_run_dir(run_dir, document, data)
    document["run_dir"] = str(folder)
    options = {name: arguments[name] for name in (*COLUMN_OPTIONS, *_COMMAND_OPTIONS)}
    with _open_spool(folder) as spool:
        paths = file_paths(data, spool)
        command = ["train", str(spool / "config.yaml"), *(part for path in paths for part in ("--data", path))]
        names = spooled_names(paths, spool)
        for name, value in options.items():
            command += _option(name, value)
        for split, rows in (("valid", valid), ("test", test)):
            split_options = _split_options(split, rows, spool)
            names |= spooled_names(split_options[1::2], spool, split)
            command += split_options
        with storage_errors(spool):
            (spool / "config.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        _check_same_rows(document, spool)
        names[f"config {str(spool / 'config.yaml')!r}"] = f"config {str(config)!r}" if _is_path(config) else "config"
        with argument_errors("fit", names):
            run_command(command, callbacks)
    return Run(folder)


@contextmanager
def _open_spool(run_dir: Path) -> Iterator[Path]:
    """Context manager around an empty folder in `run_dir`. Raises MesetaError as `lock_spool` does."""
    spool = run_dir / SPOOL_FOLDER
    with lock_spool("fit", run_dir):
        try:
            shutil.rmtree(spool, ignore_errors=True)  # The rows of a process that was killed.
            with storage_errors(spool):
                spool.mkdir()
            yield spool
        finally:
            shutil.rmtree(spool, ignore_errors=True)


def _config_document(config: str | Path | Mapping[str, Any] | RunConfig | None) -> dict[str, Any]:
    if isinstance(config, RunConfig):
        return config.model_dump(mode="json", exclude_unset=True)
    if config is None or _is_path(config):
        return read_config_document(config)
    if isinstance(config, Mapping):
        return dict(config)
    raise MesetaError(f"fit: config {format_value(config)} must be a path, a dict or a RunConfig")


def _is_path(value: Any) -> TypeGuard[str | Path]:
    return isinstance(value, (str, Path))


def _choose_run_dir(run_dir: str | Path | None, document: Mapping[str, Any], data: Any) -> Path:
    chosen = run_dir or get_value(dict(document), "run_dir")
    if chosen is not None:
        return Path(str(chosen))
    first = Path(default_run_dir(as_paths(data) or ["rows"]))
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise MesetaError(f"fit: {str(folder)!r}: {error.strerror}; choose a run_dir") from None
        return folder
    raise AssertionError


def _option(name: str, value: Any) -> list[str]:
    """Return the command-line option of an argument, or nothing for its default."""
    values = [value] if isinstance(value, (str, Path, int)) else value or ()
    if name in ("time_features", "buckets") and value is not None and not values:
        values = ["none"]
    if name in COLUMN_OPTIONS and (names := [one for one in values if "," in str(one).removesuffix("=,")]):
        raise MesetaError(f"fit: {name} {names[0]!r} has a comma, which separates names; use a schema for such columns")
    return [part for one in values for part in (f"--{name.replace('_', '-')}", str(one))]


def _split_options(split: str, value: HeldOut, spool: Path) -> list[str]:
    """Return the option that defines a held-out split."""
    if value is None:
        return []
    if isinstance(value, bool):
        raise MesetaError(f"fit: {split}={value} must be a share, a time, files or rows")
    if isinstance(value, Real) and 0 <= float(value) < 1:
        return [f"--{split}-fraction", str(value)]
    if isinstance(value, Real):
        return [f"--{split}-after", str(value)]
    if isinstance(value, date):
        return [f"--{split}-after", value.isoformat()]
    if isinstance(value, str) and _is_time(value):
        return [f"--{split}-after", value]
    with argument_errors("fit", {"data: ": f"{split}: "}):
        paths = file_paths(value, spool)
    return [part for path in paths for part in (f"--{split}-files", path)]


def _is_time(text: str) -> bool:
    try:
        # A text such as 2026/01/31 is a folder here, although raw files may contain it as a date.
        return "/" not in text and not np.isnan(parse_times(pa.array([text]))[0])
    except pa.ArrowInvalid:
        return False


def _check_same_rows(document: Mapping[str, Any], spool: Path) -> None:
    """Raise MesetaError if the run was prepared from other rows in memory."""
    record = load_record(Path(get_value(dict(document), "data.dir") or spool.parent / "data"))
    if record is None:
        return
    sources = [Path(path) for path in record["sources"]]
    earlier = {path.stem for path in sources if path.parent.name == SPOOL_FOLDER}
    digests = {path.stem for path in spool.glob("*.parquet")}
    if earlier != digests:
        before, now = (", ".join(sorted(hashes)) or "files" for hashes in (earlier, digests))
        raise MesetaError(
            f"fit: run_dir {str(spool.parent)!r} has a run on other rows than these (hash {before}, now {now}); choose "
            "another run_dir, or pass the same rows"
        )
