"""Find raw files and detect their formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import Literal

from meseta.data.dataset.dataset import DATASET_FILE, TeacherMetrics
from meseta.data.dataset.records import SourceSplit
from meseta.data.formats import registry
from meseta.data.formats.encodings import UTF_8
from meseta.data.formats.format import FileHead, Source, wrap_source_errors
from meseta.data.formats.partitions import Partition, parse_partition
from meseta.data.schema.text_syntax import check_encoding
from meseta.spec import MesetaError
from meseta.system.files import parse_json
from meseta.system.remote import file_status, find_files, is_url, open_file


def find_sources(
    patterns: Sequence[str],
    split_files: Mapping[Literal["valid", "test"], Sequence[str]],
    *,
    split_rest: bool,
    delimiter: str | None = None,
    header: Sequence[str] = (),
    encoding: str | None = None,
) -> tuple[Source, ...]:
    """Return the raw files in the order of `patterns`, which are files, folders, URLs or patterns. Files of a folder or
    pattern are sorted by path.

    The files that match `split_files` form a whole split, and come last in the result. With `split_rest`, each row of
    the other files gets its own split. Otherwise they are training rows. If the `delimiter` or the column names in
    `header` are set, all text is parsed as CSV. `encoding` of `None` means that of the byte order mark, or UTF-8.

    Raises MesetaError if a file is missing, unreadable, empty or listed twice, a folder is a prepared dataset, or the
    files have different formats.
    """
    whole: dict[str, SourceSplit] = {}
    partitions: dict[str, Partition] = {}
    for split, named in split_files.items():
        for path, partition in _expand(named).items():
            partitions[path] = partition
            if path in whole:
                raise MesetaError(
                    f"prepare: {path!r} is in --{whole[path]}-files and in --{split}-files; remove it from one of them"
                )
            whole[path] = split
    rest: SourceSplit = "both" if split_rest else "train"
    training_partitions = _expand(patterns)
    splits = {path: rest for path in training_partitions if path not in whole}
    # A test file may be listed by name and also be below the folder of the others, which determines its partition
    # columns.
    partitions = {
        path: max(partitions.get(path, {}), training_partitions.get(path, {}), key=len)
        for path in partitions | training_partitions
    }
    if not splits:
        options = " or ".join(f"--{split}-files" for split, named in split_files.items() if named)
        raise MesetaError(f"prepare: no source is left for training; every file is in {options}")
    encoding = None if encoding is None else check_encoding(encoding)
    sources = tuple(
        replace(_make_source(path, split, delimiter, tuple(header), encoding), partition=partitions[path])
        for path, split in (splits | whole).items()
    )
    formats = {source.format: source.path for source in sources}
    if len(formats) > 1:
        shown = " and ".join(f"{path!r} is {raw_format.title}" for raw_format, path in formats.items())
        raise MesetaError(f"prepare: all sources must have the same format, but {shown}; prepare one format at a time")
    return sources


def find_teacher(sources: Sequence[Source]) -> TeacherMetrics | None:
    """Return the teacher's metrics for the test split from the teacher.json of synthetic sources.

    If the test split is one file, the metrics of this file are returned. If its rows are drawn from all files, those of
    all files are returned. `None` means that teacher.json is missing or does not cover the test split.
    """
    folders = {Path(source.path).parent for source in sources}
    path = next(iter(folders)) / "teacher.json"  # URLs have no teacher.json.
    if len(folders) != 1 or not path.exists():
        return None
    try:
        document = parse_json(path.read_bytes())
        test = [source for source in sources if source.split == "test"]
        if test:
            entry = document["files"].get(Path(test[0].path).name) if len(test) == 1 else None
        else:
            drawn_from = {Path(source.path).name for source in sources if source.split == "both"}
            entry = document["all"] if drawn_from == set(document["files"]) else None
        # The teacher has no AUC if there are no positives or no negatives.
        return TeacherMetrics(auc=entry["auc"], ne=entry["ne"]) if entry and entry["auc"] is not None else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MesetaError(
            f"{str(path)!r} is not a valid teacher.json of `meseta data synth` ({error!r}); remove or repair it"
        ) from None


def _expand(patterns: Sequence[str]) -> dict[str, Partition]:
    partitions: dict[str, Partition] = {}
    for pattern in patterns:
        try:
            matches = find_files(pattern)
        except OSError as error:
            raise MesetaError(f"source {error.filename or pattern!r}: {error.strerror}") from None
        if not matches:
            if not is_url(pattern) and Path(pattern).is_dir():
                raise MesetaError(
                    f"source {pattern!r} is a folder without files, except for names that begin with _ or ., which are "
                    "skipped; choose a folder with raw files"
                )
            raise MesetaError(f"source {pattern!r}: no such file, and no file matches it as a pattern")
        for name, inner in matches:
            path = name if is_url(name) else str(Path(name))
            is_below_folder = "/" in inner or (inner and not has_magic(pattern))
            if is_below_folder and path.endswith(f"/{DATASET_FILE}"):
                raise MesetaError(
                    f"source {path.removesuffix(f'/{DATASET_FILE}')!r} is a dataset of `meseta prepare`, not a folder "
                    "of raw files; train on it with data.dir"
                )
            if path in partitions:
                raise MesetaError(f"source {name!r} is listed twice, so its rows would count twice; list it once")
            partitions[path] = parse_partition(path, inner)
    return partitions


def _make_source(
    path: str, split: SourceSplit, delimiter: str | None, header: tuple[str, ...], encoding: str | None
) -> Source:
    try:
        stat = file_status(path)
        if stat.is_folder:
            raise MesetaError(f"source {path!r} is a folder; use files or a pattern such as '{path}/*.tsv'")
        if stat.size_bytes == 0:
            raise MesetaError(f"source {path!r} is empty; leave it out, or download it again")
        with wrap_source_errors(path), open_file(path) as file:
            magic = file.read(4)
    except OSError as error:
        raise MesetaError(f"source {path!r}: {error.strerror}") from None
    head = FileHead(path, magic, delimiter, header, encoding)
    for raw_format in registry.FORMATS:
        form = raw_format.detect(head)
        if form is not None:
            break
    else:
        raise AssertionError("the last format accepts any file")
    raw_format.check_content(head)
    return Source(
        path=path,
        split=split,
        format=raw_format,
        # If a server does not report the size, the progress counts the file as one byte.
        size_bytes=stat.size_bytes or 1,
        changed=stat.change_stamp,
        delimiter=form.delimiter,
        header=form.header,
        is_typed=form.is_typed,
        encoding=head.encoding if raw_format.is_text else UTF_8,
    )
