"""The files that encoding further rows takes, beside a description of another folder: a run's, or new rows'."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from meseta.data.dataset.dataset import Dataset, SparseFeature
from meseta.data.dataset.touched_rows import TOUCHED_ROWS_FILE
from meseta.data.dataset.vocabulary import VOCABULARY_FOLDER, read_vocabulary_values
from meseta.machine.files import first_name_collision, move, to_file_name
from meseta.spec import MesetaError

Fetch = Callable[[str | None], Iterable[bytes]]
"""The vocabulary of a feature, or of None the bits of the rows that training looks up, as a file in pieces."""


def copy_tables(dataset: Dataset, folder: Path, fetch: Fetch | None = None) -> Dataset:
    """Vocabularies, and the bits of the rows that training looks up, in `folder` too, under the names that `prepare`
    gives them: hard links where the file system has them, else copies; of a dataset that lies elsewhere, what `fetch`
    gives. Returns the description of the dataset with these names; of a file that is not there, or is none of the
    dataset's folder, it has the former one.

    A file of such a name is replaced. Raises OSError where the folder cannot be written, what `fetch` raises, and
    MesetaError for a vocabulary from there that is not the one that ids were made with.
    """
    names = {
        f.name: f"{VOCABULARY_FOLDER}/{to_file_name(f.name)}.parquet"
        for f in dataset.sparse
        if f.vocabulary is not None
    }
    if first_name_collision(names.values()):  # prepare makes none such
        return dataset

    def keep(path: str, name: str, feature: SparseFeature | None = None) -> str:
        if fetch is None:
            return _link_or_copy(dataset, path, folder, name)
        _store_fetched(fetch, feature, folder, name)
        return name

    sparse = [
        feature.model_copy(update={"vocabulary": keep(feature.vocabulary, names[feature.name], feature)})
        if feature.vocabulary is not None
        else feature
        for feature in dataset.sparse
    ]
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
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, temporary)

    _replace_atomically(target, fill)
    return name


def _store_fetched(fetch: Fetch, feature: SparseFeature | None, folder: Path, name: str) -> None:
    """Unless it is there already, which the digest of a vocabulary tells."""
    if feature is not None and feature.vocabulary_digest is not None:
        with suppress(MesetaError):
            read_vocabulary_values(folder, feature.model_copy(update={"vocabulary": name}))
            return

    def fill(temporary: Path) -> None:
        with temporary.open("xb") as file:
            for piece in fetch(None if feature is None else feature.name):
                file.write(piece)
        if feature is not None:
            inner = temporary.relative_to(folder).as_posix()
            try:
                read_vocabulary_values(folder, feature.model_copy(update={"vocabulary": inner}))
            except MesetaError:
                raise MesetaError(
                    f"the vocabulary of {feature.name!r} that has come is not the one that its ids were made with; "
                    "prepare the dataset again where the dispatcher reads it"
                ) from None

    _replace_atomically(folder / name, fill)


def _replace_atomically(target: Path, fill: Callable[[Path], None]) -> None:
    """Let a file be what `fill` makes at another name, whole or not at all."""
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_name(f".{target.name[-100:]}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        fill(temporary)
        move(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
