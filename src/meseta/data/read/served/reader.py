"""A reader whose rows other processes decode: the same batches, and the same state, as those of a Reader."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch_reader import BatchReader, WaitTracker, check_rank
from meseta.data.read.options import ReaderOptions
from meseta.data.read.order import epoch_order
from meseta.data.read.selection import ExcludedRows
from meseta.data.read.served.dispatcher_client import DispatcherClient
from meseta.data.read.served.keys import TlsKeys
from meseta.data.read.served.messages import (
    CountRequest,
    DatasetDescription,
    RowOrder,
    Session,
)
from meseta.data.read.served.record_batches import record_batch_schema
from meseta.data.read.served.windows import EpochRequest, ServedRows

DEFAULT_READER_TIMEOUT_S = 300.0
"""Where nobody says more."""


@dataclass(frozen=True, kw_only=True)
class ReaderServiceAddress:
    """Where rows come from."""

    url: str
    """Of the dispatcher."""
    dataset: str | None = None
    """As it calls it; None: the only one."""
    keys: Path | None = None
    """Folder of keys, as `meseta readers keys` makes it; None: without encryption, by the token of the address."""
    reader_timeout_s: float = DEFAULT_READER_TIMEOUT_S
    """How long rows are waited for where no reader gives any."""

    def dispatcher(self) -> DispatcherClient:
        """Raises MesetaError for what is no address, or no keys for it."""
        return DispatcherClient(self.url, None if self.keys is None else TlsKeys.load(self.keys))


@dataclass(frozen=True, kw_only=True)
class RunAttempt:
    """Whose rows they are, for the dispatcher to turn away ranks of a former attempt at the same run."""

    name: str
    attempt: int


class ServedReader(BatchReader):
    """Batches of one split for one rank, whose rows come from the readers of a dispatcher.

    service = Service(url="grpc://127.0.0.1:7077")
    reader = ServedReader(service, "train", ReaderOptions(batch_size=2048, shuffle=True))
    """

    def __init__(
        self,
        service: ReaderServiceAddress,
        split: str,
        options: ReaderOptions,
        *,
        labels: tuple[str, ...] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        run: RunAttempt | None = None,
    ) -> None:
        """`labels`: those to read; None: all. `run`: None: one of its own.

        Raises MesetaError for a bad rank, keys that cannot be used, a dispatcher that does not answer, and whatever it
        refuses.
        """
        check_rank(rank, num_ranks)
        self._dispatcher = service.dispatcher()
        description = self._dispatcher.describe(service.dataset)
        described = dataset_from_description(description, service.url).with_labels(labels)
        described.split(split)
        asked = RowOrder.from_options(description, split, described.labels, options)
        counts = self._dispatcher.count(CountRequest(rows=asked))
        self._group_rows = counts.group_rows
        self._schema = record_batch_schema(described, counts.wide_features)
        run = run or RunAttempt(name=f"{time.time_ns()}-{id(self)}", attempt=0)
        self._session = Session(rows=asked, run=run.name, attempt=run.attempt, rank=rank, num_ranks=num_ranks)
        self._reader_timeout_s = service.reader_timeout_s
        super().__init__(
            described,
            split,
            options,
            rank=rank,
            num_ranks=num_ranks,
            num_rows=sum(counts.group_rows),
            excluded_rows=ExcludedRows(counts.by_filter, counts.negatives),
        )

    def _rows(self, epoch: int, row: int, waits: WaitTracker, num_epochs: int) -> ServedRows:
        asked = EpochRequest(
            session=self._session,
            epoch=epoch,
            first_row=row,
            options=self.options,
            dataset=self.dataset,
            schema=self._schema,
        )
        order = epoch_order(self._group_rows, self.options, epoch, is_served=True)
        next_epoch = partial(self._rows, epoch + 1, 0, waits, num_epochs) if epoch + 1 < num_epochs else None
        return ServedRows(order, self._slicer, asked, self._dispatcher, waits, self._reader_timeout_s, next_epoch)


def dataset_from_description(description: DatasetDescription, url: str) -> Dataset:
    """The dataset that the dispatcher at `url` describes; its files are elsewhere, and its folder is but a name."""
    return Dataset.from_dict(description.document, f"{description.name} at {url.partition('://')[2]}")
