"""Copies of the files with which further rows are encoded, for a run or for new rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.growth import candidates_path, vocabulary_path
from meseta.data.dataset.records import SparseFeature
from meseta.data.dataset.statistics import TOUCHED_ROWS_FILE
from meseta.data.dataset.vocabulary import read_vocabulary_values
from meseta.spec import MesetaError
from meseta.system.files import first_name_collision, move

Fetch = Callable[[str | None, bool], Iterable[bytes]]
"""Returns the content of a file in chunks: the vocabulary of a feature, its candidates if the second argument is true,
or the bits of trained rows for `None`."""


def copy_tables(dataset: Dataset, folder: Path, fetch: Fetch | None = None) -> Dataset:
    """Copy the vocabularies, their candidates and the bits of trained rows to `folder`, and return the description with
    the new paths.

    Files are hard links if the file system allows it, otherwise copies. If the dataset is on another machine, `fetch`
    returns their content. Existing files are replaced. Files that are missing or outside of the dataset folder keep
    their paths.

    Raises OSError if the folder cannot be written, MesetaError if a fetched vocabulary has another digest, and any
    error of `fetch`.
    """
    names = {f.name: vocabulary_path(f.name) for f in dataset.sparse if f.vocabulary is not None}
    if first_name_collision(names.values()):  # Not made by prepare.
        return dataset

    def keep(path: str, name: str, feature: SparseFeature | None = None) -> str:
        if fetch is None:
            return _link_or_copy(dataset, path, folder, name)
        _store_fetched(fetch, feature, folder, name)
        return name

    def keep_candidates(feature: SparseFeature, path: str) -> str:
        name = candidates_path(feature.name)
        if fetch is None:
            return _link_or_copy(dataset, path, folder, name)
        if not (folder / name).exists() or not _has_vocabulary(folder, feature, names[feature.name]):
            _replace_atomically(folder / name, partial(_write_chunks, fetch(feature.name, True)))
        return name

    def keep_tables(feature: SparseFeature) -> SparseFeature:
        if feature.vocabulary is None:
            return feature
        candidates = None if feature.candidates is None else keep_candidates(feature, feature.candidates)
        paths = {"vocabulary": keep(feature.vocabulary, names[feature.name], feature), "candidates": candidates}
        return feature.model_copy(update=paths)

    sparse = [keep_tables(feature) for feature in dataset.sparse]
    touched = None if dataset.touched is None else keep(dataset.touched, TOUCHED_ROWS_FILE)
    return dataset.model_copy(update={"sparse": tuple(sparse), "touched": touched})


def _link_or_copy(dataset: Dataset, path: str, folder: Path, name: str) -> str:
    try:
        source = dataset.resolve_file(path).resolve()
    except MesetaError:
        return path
    target = folder / name
    with suppress(OSError):
        if target.samefile(source):
            return name

    def fill(temporary: Path) -> None:
        try:
            os.link(source, temporary)
        except OSError:  # Another file system, or one without links.
            shutil.copyfile(source, temporary)

    _replace_atomically(target, fill)
    return name


def _store_fetched(fetch: Fetch, feature: SparseFeature | None, folder: Path, name: str) -> None:
    """Store a fetched file, unless the folder already has the vocabulary with the right digest."""
    if feature is not None and _has_vocabulary(folder, feature, name):
        return

    def fill(temporary: Path) -> None:
        _write_chunks(fetch(None if feature is None else feature.name, False), temporary)
        if feature is not None:
            inner = temporary.relative_to(folder).as_posix()
            try:
                read_vocabulary_values(folder, feature.model_copy(update={"vocabulary": inner}))
            except MesetaError:
                raise MesetaError(
                    f"the vocabulary of {feature.name!r} from the dispatcher is not the one that its ids were made "
                    "with; prepare the dataset again on the host of the dispatcher"
                ) from None

    _replace_atomically(folder / name, fill)


def _has_vocabulary(folder: Path, feature: SparseFeature, name: str) -> bool:
    """Whether the file `name` has the values of which `feature` has the digest."""
    if feature.vocabulary_digest is None:
        return False
    with suppress(MesetaError):
        read_vocabulary_values(folder, feature.model_copy(update={"vocabulary": name}))
        return True
    return False


def _write_chunks(chunks: Iterable[bytes], path: Path) -> None:
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)


def _replace_atomically(target: Path, fill: Callable[[Path], None]) -> None:
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_name(f".{target.name[-100:]}.tmp")
    # Remove the leftover of an interrupted call, because a hard link cannot replace a file.
    temporary.unlink(missing_ok=True)
    try:
        fill(temporary)
        move(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
