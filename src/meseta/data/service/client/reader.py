"""Reader whose rows other processes decode. Its batches and state are identical to those of a Reader."""

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
from meseta.data.service.client.windows import EpochRequest, ServedRows
from meseta.data.service.dispatcher_client import DispatcherClient
from meseta.data.service.keys import TlsKeys
from meseta.data.service.messages import CountRequest, DatasetDescription, RowOrder, Session
from meseta.data.service.record_batches import record_batch_schema

DEFAULT_READER_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class ReaderServiceAddress:
    """Address of a reader service and of its columns."""

    url: str
    dataset: str | None = None
    """Name of the dataset at the dispatcher. `None` selects the only one."""
    keys: Path | None = None
    """Folder made by `meseta readers keys`. `None` means an unencrypted connection with the token of the address."""
    without: tuple[str, ...] = ()
    """Features that are not read."""
    reader_timeout_s: float = DEFAULT_READER_TIMEOUT_S
    """Seconds to wait for rows if no reader sends any."""

    def dispatcher(self) -> DispatcherClient:
        """Return a client of the dispatcher. Raises MesetaError if the address or the keys are invalid."""
        return DispatcherClient(self.url, None if self.keys is None else TlsKeys.load(self.keys))


@dataclass(frozen=True, kw_only=True)
class RunAttempt:
    """Name of a run and number of its attempt. The dispatcher rejects ranks of earlier attempts of the same run."""

    name: str
    attempt: int


class ServedReader(BatchReader):
    """Reader of the batches of one split for one rank. Its rows come from the readers of a dispatcher.

    service = ReaderServiceAddress(url="grpc://127.0.0.1:7077")
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
        """Connect to the dispatcher and count the rows. `labels` defaults to all labels, and `run` to a new run.

        Raises MesetaError if the rank is invalid, the keys cannot be used, or the dispatcher does not answer or refuses
        the request.
        """
        check_rank(rank, num_ranks)
        self._dispatcher = service.dispatcher()
        description = self._dispatcher.describe(service.dataset)
        dataset = dataset_from_description(description, service.url)
        dataset = dataset.select(labels, service.without, allow_missing=True)
        dataset.split(split)
        row_order = RowOrder.from_options(description, split, dataset.labels, options, dataset.without)
        counts = self._dispatcher.count(CountRequest(rows=row_order))
        self._group_rows = counts.group_rows
        self._schema = record_batch_schema(dataset, counts.int64_features)
        run = run or RunAttempt(name=f"{time.time_ns()}-{id(self)}", attempt=0)
        self._session = Session(rows=row_order, run=run.name, attempt=run.attempt, rank=rank, num_ranks=num_ranks)
        self._reader_timeout_s = service.reader_timeout_s
        super().__init__(
            dataset,
            split,
            options,
            rank=rank,
            num_ranks=num_ranks,
            num_rows=sum(counts.group_rows),
            excluded_rows=ExcludedRows(counts.num_filtered, counts.num_dropped_negatives),
        )

    def _rows(self, epoch: int, row: int, waits: WaitTracker, num_epochs: int) -> ServedRows:
        request = EpochRequest(
            session=self._session,
            epoch=epoch,
            first_row=row,
            options=self.options,
            dataset=self.dataset,
            schema=self._schema,
        )
        # The order must equal that of the readers, which decode the same windows.
        order = epoch_order(self._group_rows, self.options, epoch, is_served=True)
        next_epoch = partial(self._rows, epoch + 1, 0, waits, num_epochs) if epoch + 1 < num_epochs else None
        return ServedRows(order, self._slicer, request, self._dispatcher, waits, self._reader_timeout_s, next_epoch)


def dataset_from_description(description: DatasetDescription, url: str) -> Dataset:
    """Return the dataset that the dispatcher at `url` describes. Its files are elsewhere, its folder is only a name."""
    return Dataset.from_dict(description.document, f"{description.name} at {url.partition('://')[2]}")
