"""Raw files: finding them, and telling their formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import Literal

from meseta.data.dataset.dataset import DATASET_FILE, SourceSplit, TeacherMetrics
from meseta.data.formats import registry
from meseta.data.formats.encodings import UTF_8, check_encoding
from meseta.data.formats.format import FileHead, Source, wrap_source_errors
from meseta.data.formats.partitions import Partition, parse_partition
from meseta.machine.files import parse_json
from meseta.machine.remote import file_status, find_files, is_url, open_file
from meseta.spec import MesetaError


def find_sources(
    patterns: Sequence[str],
    split_files: Mapping[Literal["valid", "test"], Sequence[str]],
    *,
    split_rest: bool,
    delimiter: str | None = None,
    header: Sequence[str] = (),
    encoding: str | None = None,
) -> tuple[Source, ...]:
    """Files in the given order, what a folder holds or a pattern matches in order of path; those of `split_files`
    go there as a whole and come last, and the rest to training, or is parted row by row.

    Where a `delimiter` is given, all text is CSV with it; where a `header` is, it is CSV without one. Text has the
    `encoding`, if one is given, else that of its byte order mark, else UTF-8.
    Raises MesetaError for a missing, unreadable, empty or doubled file, for a prepared dataset, and for two kinds of
    files.
    """
    whole: dict[str, SourceSplit] = {}
    partitions: dict[str, Partition] = {}
    for split, named in split_files.items():
        for path, partition in _expand(named).items():
            partitions[path] = partition
            if path in whole:
                raise MesetaError(
                    f"prepare: {path!r} is named by --{whole[path]}-files and by --{split}-files; give it to one"
                )
            whole[path] = split
    rest: SourceSplit = "both" if split_rest else "train"
    given = _expand(patterns)
    splits = {path: rest for path in given if path not in whole}
    # A file for testing that is named itself is also below the folder of the others, and has their columns.
    partitions = {path: max(partitions.get(path, {}), given.get(path, {}), key=len) for path in partitions | given}
    if not splits:
        options = " or ".join(f"--{split}-files" for split, named in split_files.items() if named)
        raise MesetaError(f"prepare: no source is left for training; every file is named by {options}")
    encoding = None if encoding is None else check_encoding(encoding)
    sources = tuple(
        replace(_make_source(path, split, delimiter, tuple(header), encoding), partition=partitions[path])
        for path, split in (splits | whole).items()
    )
    formats = {source.format: source.path for source in sources}
    if len(formats) > 1:
        shown = " and ".join(f"{path!r} is {raw_format.title}" for raw_format, path in formats.items())
        raise MesetaError(f"prepare: {shown}; give one kind at a time")
    return sources


def find_teacher(sources: Sequence[Source]) -> TeacherMetrics | None:
    """What the teacher.json beside synthetic sources says of the test split, or None where it does not cover it.

    A test split of one whole file takes that file's figures; one drawn from all rows takes those of all files.
    """
    folders = {Path(source.path).parent for source in sources}
    path = next(iter(folders)) / "teacher.json"  # no URL has one
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
        # Without positives, or negatives, the teacher has no AUC either.
        return TeacherMetrics(auc=entry["auc"], ne=entry["ne"]) if entry and entry["auc"] is not None else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MesetaError(
            f"{str(path)!r} is not what `meseta data synth` writes ({error!r}); remove or repair it"
        ) from None


def _expand(patterns: Sequence[str]) -> dict[str, Partition]:
    """Files, and the columns that their folders make."""
    partitions: dict[str, Partition] = {}
    for pattern in patterns:
        try:
            found = find_files(pattern)
        except OSError as error:
            raise MesetaError(f"source {error.filename or pattern!r}: {error.strerror}") from None
        if not found:
            if not is_url(pattern) and Path(pattern).is_dir():
                raise MesetaError(
                    f"source {pattern!r} is a folder without files, except for names that begin with _ or ., which are "
                    "skipped; give a folder with raw files"
                )
            raise MesetaError(f"source {pattern!r}: no such file, and no file matches it as a pattern")
        for name, inner in found:
            path = name if is_url(name) else str(Path(name))
            is_below_folder = "/" in inner or (inner and not has_magic(pattern))
            if is_below_folder and path.endswith(f"/{DATASET_FILE}"):
                raise MesetaError(
                    f"source {path.removesuffix(f'/{DATASET_FILE}')!r} is a dataset that `meseta prepare` wrote, and "
                    f"not "
                    "raw files; train on it with data.dir"
                )
            if path in partitions:
                raise MesetaError(f"source {name!r} is given twice; its rows would count double")
            partitions[path] = parse_partition(path, inner)
    return partitions


def _make_source(
    path: str, split: SourceSplit, delimiter: str | None, header: tuple[str, ...], encoding: str | None
) -> Source:
    try:
        stat = file_status(path)
        if stat.is_folder:
            raise MesetaError(f"source {path!r} is a folder; give files or a pattern such as '{path}/*.tsv'")
        if stat.size_bytes == 0:
            raise MesetaError(f"source {path!r} is empty; leave it out, or fetch it again")
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
        raise AssertionError("the last format takes any file")
    raw_format.check_content(head)
    return Source(
        path=path,
        split=split,
        format=raw_format,
        size_bytes=stat.size_bytes or 1,
        changed=stat.change_stamp,
        delimiter=form.delimiter,
        header=form.header,
        is_typed=form.is_typed,
        encoding=head.encoding if raw_format.is_text else UTF_8,
    )
