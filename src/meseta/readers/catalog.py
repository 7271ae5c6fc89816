"""The datasets of a dispatcher, by name: what they are, and how many rows are read of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.encoding import with_vocabulary_digests
from meseta.data.read.options import CancellationCheck, never_cancelled
from meseta.data.read.selection import RowSelection
from meseta.data.read.served.messages import DatasetDescription, RowCounts, RowOrder, TableRequest
from meseta.data.read.split import SplitRows, open_split_rows
from meseta.readers.cancellation import acquire
from meseta.readers.window_store import evict_oldest
from meseta.spec import MesetaError, suggest

MAX_CACHED_COUNTS = 64
"""Choices of rows whose counts are kept."""
CHUNK_BYTES = 1 << 20
"""Of a file, as it is sent."""


def describe_dataset(name: str, dataset: Dataset) -> DatasetDescription:
    """A dataset for those who do not have its files."""
    document = with_vocabulary_digests(dataset).to_dict()
    digest = sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return DatasetDescription(name=name, document=document, digest=digest)


def open_split(
    dataset: Dataset,
    rows: RowOrder,
    check: CancellationCheck = never_cancelled,
    group_row_counts: Mapping[int, int] | None = None,
) -> SplitRows:
    """The rows of a split that are asked for. Raises MesetaError as `open_split_rows` does."""
    selection = RowSelection(dataset, condition=rows.filter, negative_keep=rows.negative_keep, seed=rows.seed)
    described = dataset.with_labels(rows.labels)
    return open_split_rows(
        described, rows.split, selection, group_row_counts, shuffle=rows.shuffle, check_cancelled=check
    )


class Catalog:
    """Datasets that trainers may ask for, and no others. Threads may share it."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """Raises MesetaError for a folder without a dataset."""
        self.folders = {name: str(folder) for name, folder in folders.items()}
        self._datasets = {name: Dataset.load(folder) for name, folder in folders.items()}
        self._descriptions = {name: describe_dataset(name, dataset) for name, dataset in self._datasets.items()}
        self._counts: dict[RowOrder, RowCounts] = {}
        self._lock = threading.Lock()

    def describe(self, name: str | None) -> DatasetDescription:
        """A dataset by name; None: the only one. Raises MesetaError where there is none, or no only one."""
        if name is None:
            if len(self._descriptions) != 1:
                raise MesetaError(f"there are several datasets: say which in data.service.dataset: {self._names()}")
            [name] = self._descriptions
        if name not in self._descriptions:
            raise MesetaError(f"there is no dataset {name!r}; {suggest(name, self._descriptions)}")
        return self._descriptions[name]

    def count(self, rows: RowOrder, check: CancellationCheck = never_cancelled) -> RowCounts:
        """The rows that are read; of a choice that is new, its columns are read. Raises MesetaError for rows of another
        dataset, a filter that does not fit and a damaged file, and what `check` raises."""
        self._check_digest(rows.dataset, rows.digest)
        with acquire(self._lock, check):
            if rows not in self._counts:
                split = open_split(self._datasets[rows.dataset], rows, check)
                counted = split.group_row_counts
                evict_oldest(self._counts, MAX_CACHED_COUNTS - 1)
                self._counts[rows] = RowCounts(
                    groups=tuple(counted),
                    group_rows=tuple(counted.values()),
                    by_filter=split.excluded_rows.by_filter,
                    negatives=split.excluded_rows.negatives,
                    wide_features=tuple(split.int64_features),
                )
            return self._counts[rows]

    def read_table(self, request: TableRequest) -> Iterator[bytes]:
        """A file that encoding further rows takes, in pieces. Raises MesetaError for a feature without a vocabulary,
        and where the file cannot be read."""
        self._check_digest(request.dataset, request.digest)
        dataset = self._datasets[request.dataset]
        paths = {feature.name: feature.vocabulary for feature in dataset.sparse if feature.vocabulary is not None}
        name = dataset.touched if request.feature is None else paths.get(request.feature)
        if name is None:
            what = "touched rows" if request.feature is None else f"vocabulary of a feature {request.feature!r}"
            raise MesetaError(f"dataset {request.dataset!r} has no {what}")
        try:
            file = dataset.resolve_file(name).open("rb")
        except OSError as error:
            raise MesetaError(f"dataset {request.dataset!r}: {name!r} cannot be read: {error.strerror}") from None

        def pieces() -> Iterator[bytes]:
            with file:
                while piece := file.read(CHUNK_BYTES):
                    yield piece

        return pieces()

    def _check_digest(self, name: str, digest: str) -> None:
        """Raise MesetaError unless that is the description that trainers have."""
        if self.describe(name).digest != digest:
            raise MesetaError(f"dataset {name!r} has been prepared anew; begin a new run")

    def _names(self) -> str:
        return ", ".join(self._descriptions)
