"""The datasets of a dispatcher, by name: what they are, and how many rows are read of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.encoding import with_vocabulary_digests
from meseta.data.read.options import Check, unchecked
from meseta.data.read.selection import Selection
from meseta.data.read.served.messages import Counts, DatasetDescription, RowsAsked, TableRequest
from meseta.data.read.split import SplitRows, rows_of_split
from meseta.readers.cancelling import locked
from meseta.readers.window_store import forget_oldest
from meseta.spec import MesetaError, nearest

MOST_COUNTS = 64
"""Choices of rows whose counts are kept."""
PIECE_BYTES = 1 << 20
"""Of a file, as it is sent."""


def describe(name: str, dataset: Dataset) -> DatasetDescription:
    """A dataset for those who do not have its files."""
    document = with_vocabulary_digests(dataset).to_dict()
    digest = sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return DatasetDescription(name=name, document=document, digest=digest)


def open_split(
    dataset: Dataset, rows: RowsAsked, check: Check = unchecked, counted: Mapping[int, int] | None = None
) -> SplitRows:
    """The rows of a split that are asked for. Raises MesetaError as `rows_of_split` does."""
    selection = Selection(dataset, condition=rows.filter, negative_keep=rows.negative_keep, seed=rows.seed)
    described = dataset.with_labels(rows.labels)
    return rows_of_split(described, rows.split, selection, counted, shuffles=rows.shuffle, check=check)


class Catalog:
    """Datasets that trainers may ask for, and no others. Threads may share it."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """Raises MesetaError for a folder without a dataset."""
        self.folders = {name: str(folder) for name, folder in folders.items()}
        self._datasets = {name: Dataset.load(folder) for name, folder in folders.items()}
        self._descriptions = {name: describe(name, dataset) for name, dataset in self._datasets.items()}
        self._counts: dict[RowsAsked, Counts] = {}
        self._lock = threading.Lock()

    def describe(self, name: str | None) -> DatasetDescription:
        """A dataset by name; None: the only one. Raises MesetaError where there is none, or no only one."""
        if name is None:
            if len(self._descriptions) != 1:
                raise MesetaError(f"there are several datasets: say which in data.service.dataset: {self._names()}")
            [name] = self._descriptions
        if name not in self._descriptions:
            raise MesetaError(f"there is no dataset {name!r}; {nearest(name, self._descriptions)}")
        return self._descriptions[name]

    def count(self, rows: RowsAsked, check: Check = unchecked) -> Counts:
        """The rows that are read; of a choice that is new, its columns are read. Raises MesetaError for rows of another
        dataset, a filter that does not fit and a damaged file, and what `check` raises."""
        self._check(rows.dataset, rows.digest)
        with locked(self._lock, check):
            if rows not in self._counts:
                split = open_split(self._datasets[rows.dataset], rows, check)
                counted = split.counted
                forget_oldest(self._counts, MOST_COUNTS - 1)
                self._counts[rows] = Counts(
                    groups=tuple(counted),
                    group_rows=tuple(counted.values()),
                    by_filter=split.left_out.by_filter,
                    negatives=split.left_out.negatives,
                    wide_features=tuple(split.wide_features),
                )
            return self._counts[rows]

    def table(self, request: TableRequest) -> Iterator[bytes]:
        """A file that encoding further rows takes, in pieces. Raises MesetaError for a feature without a vocabulary,
        and where the file cannot be read."""
        self._check(request.dataset, request.digest)
        dataset = self._datasets[request.dataset]
        paths = {feature.name: feature.vocabulary for feature in dataset.sparse if feature.vocabulary is not None}
        name = dataset.touched if request.feature is None else paths.get(request.feature)
        if name is None:
            what = "touched rows" if request.feature is None else f"vocabulary of a feature {request.feature!r}"
            raise MesetaError(f"dataset {request.dataset!r} has no {what}")
        try:
            file = dataset.place(name).open("rb")
        except OSError as error:
            raise MesetaError(f"dataset {request.dataset!r}: {name!r} cannot be read: {error.strerror}") from None

        def pieces() -> Iterator[bytes]:
            with file:
                while piece := file.read(PIECE_BYTES):
                    yield piece

        return pieces()

    def _check(self, name: str, digest: str) -> None:
        """Raise MesetaError unless that is the description that trainers have."""
        if self.describe(name).digest != digest:
            raise MesetaError(f"dataset {name!r} has been prepared anew; begin a new run")

    def _names(self) -> str:
        return ", ".join(self._descriptions)
