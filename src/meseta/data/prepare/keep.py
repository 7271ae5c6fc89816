"""The files that encoding further rows takes, beside a description of another folder: a run's, or new rows'."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.touched import TOUCHED_NAME
from meseta.data.dataset.vocabulary import FOLDER
from meseta.machine.files import file_name, first_alike, move
from meseta.spec import MesetaError


def keep_tables(dataset: Dataset, folder: Path) -> Dataset:
    """Vocabularies, and the bits of the rows that training looks up, in `folder` too, under the names that `prepare`
    gives them: hard links where the file system has them, else copies. Returns the description of the dataset with
    these names; of a file that is not there, or is none of the dataset's folder, it has the former one.

    A file of such a name is replaced. Raises OSError where the folder cannot be written.
    """
    names = {f.name: f"{FOLDER}/{file_name(f.name)}.parquet" for f in dataset.sparse if f.vocabulary is not None}
    if first_alike(names.values()):  # prepare makes none such
        return dataset
    sparse = [
        feature.model_copy(update={"vocabulary": _keep(dataset, feature.vocabulary, folder, names[feature.name])})
        if feature.vocabulary is not None
        else feature
        for feature in dataset.sparse
    ]
    touched = None if dataset.touched is None else _keep(dataset, dataset.touched, folder, TOUCHED_NAME)
    return dataset.model_copy(update={"sparse": tuple(sparse), "touched": touched})


def _keep(dataset: Dataset, path: str, folder: Path, name: str) -> str:
    try:
        source = dataset.place(path).resolve()
    except MesetaError:
        return path
    target = folder / name
    with suppress(OSError):
        if target.samefile(source):
            return name
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_name(f".{target.name[-100:]}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(source, temporary)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, temporary)
        move(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return name
