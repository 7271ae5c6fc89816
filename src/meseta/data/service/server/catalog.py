"""Datasets that a dispatcher serves: descriptions, row counts and the files that encoding needs."""

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
from meseta.data.read.split import SplitRows, open_split_rows
from meseta.data.service.messages import DatasetDescription, RowCounts, RowOrder, TableRequest
from meseta.data.service.server.window_store import acquire, evict_oldest
from meseta.spec import MesetaError, suggest

MAX_CACHED_COUNTS = 64
"""Maximum number of row selections whose counts are cached."""
CHUNK_BYTES = 1 << 20
"""Size of the chunks in which a file is sent."""


def describe_dataset(name: str, dataset: Dataset) -> DatasetDescription:
    """Return the description of a dataset for clients without its files. Its digest identifies the description."""
    document = with_vocabulary_digests(dataset).to_dict()
    digest = sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return DatasetDescription(name=name, document=document, digest=digest)


def open_split(
    dataset: Dataset,
    rows: RowOrder,
    check: CancellationCheck = never_cancelled,
    group_row_counts: Mapping[int, int] | None = None,
) -> SplitRows:
    """Open the rows that `rows` selects.

    `group_row_counts` has the number of selected rows of each row group. `None` counts them, which reads columns.
    Raises MesetaError as `open_split_rows` does, and the error of `check`.
    """
    selection = RowSelection(dataset, condition=rows.filter, negative_keep=rows.negative_keep, seed=rows.seed)
    labeled_dataset = dataset.select(rows.labels, rows.without, allow_missing=True)
    return open_split_rows(
        labeled_dataset, rows.split, selection, group_row_counts, shuffle=rows.shuffle, check_cancelled=check
    )


class Catalog:
    """Thread-safe registry of the datasets that trainers may request."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """Load the dataset of each folder. Raises MesetaError if a folder has none."""
        self.folders = {name: str(folder) for name, folder in folders.items()}
        self._datasets = {name: Dataset.load(folder) for name, folder in folders.items()}
        self._descriptions = {name: describe_dataset(name, dataset) for name, dataset in self._datasets.items()}
        self._counts: dict[RowOrder, RowCounts] = {}
        self._lock = threading.Lock()

    def describe(self, name: str | None) -> DatasetDescription:
        """Return the description of a dataset. `None` is the only one. Raises MesetaError if unknown or ambiguous."""
        if name is None:
            if len(self._descriptions) != 1:
                raise MesetaError(
                    f"the dispatcher serves several datasets ({self._names()}); set data.service.dataset to one of them"
                )
            [name] = self._descriptions
        if name not in self._descriptions:
            raise MesetaError(f"the dispatcher has no dataset {name!r}; {suggest(name, self._descriptions)}")
        return self._descriptions[name]

    def count(self, rows: RowOrder, check: CancellationCheck = never_cancelled) -> RowCounts:
        """Return the number of selected rows in each row group. The first request for a selection reads columns.

        Raises MesetaError if the dataset has changed, the filter is invalid or a file is damaged, and the error of
        `check`.
        """
        self._check_digest(rows.dataset, rows.digest)
        # The lock is held while columns are read, so that concurrent ranks count a selection only once.
        with acquire(self._lock, check):
            if rows not in self._counts:
                split = open_split(self._datasets[rows.dataset], rows, check)
                row_counts = split.group_row_counts
                evict_oldest(self._counts, MAX_CACHED_COUNTS - 1)
                self._counts[rows] = RowCounts(
                    groups=tuple(row_counts),
                    group_rows=tuple(row_counts.values()),
                    num_filtered=split.excluded_rows.by_filter,
                    num_dropped_negatives=split.excluded_rows.negatives,
                    int64_features=tuple(split.int64_features),
                )
            return self._counts[rows]

    def read_table(self, request: TableRequest) -> Iterator[bytes]:
        """Return chunks of a file that trainers need to encode new rows.

        The file is the vocabulary of `request.feature` or its candidates, or the list of touched rows if that is
        `None`. Raises MesetaError if the dataset has no such file, or it cannot be opened.
        """
        self._check_digest(request.dataset, request.digest)
        dataset = self._datasets[request.dataset]
        paths = {f.name: f.candidates if request.candidates else f.vocabulary for f in dataset.sparse}
        name = dataset.touched if request.feature is None else paths.get(request.feature)
        if name is None:
            kind = "candidates" if request.candidates else "vocabulary"
            content = "touched rows" if request.feature is None else f"{kind} of a feature {request.feature!r}"
            raise MesetaError(f"dataset {request.dataset!r} has no {content}")
        try:
            file = dataset.resolve_file(name).open("rb")
        except OSError as error:
            raise MesetaError(f"dataset {request.dataset!r}: cannot open {name!r}: {error.strerror}") from None

        # A nested generator, so that the checks above run before the first chunk is requested.
        def chunks() -> Iterator[bytes]:
            with file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk

        return chunks()

    def _check_digest(self, name: str, digest: str) -> None:
        """Raise MesetaError unless `digest` is that of the loaded dataset."""
        if self.describe(name).digest != digest:
            raise MesetaError(f"dataset {name!r} has been prepared again since the run started; start a new run")

    def _names(self) -> str:
        return ", ".join(self._descriptions)
