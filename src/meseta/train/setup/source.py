"""Where the rows of a run come from: a folder of this machine, or the readers of a dispatcher. Loads no torch until
batches are wanted, since `meseta plan` wants none."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from meseta.config import DataConfig
from meseta.config.run import ServiceConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.encoding import with_vocabulary_digests
from meseta.data.prepare.copy_tables import copy_tables
from meseta.machine.environment_variables import environ
from meseta.spec import MesetaError

if TYPE_CHECKING:
    from meseta.comm import World
    from meseta.data.read.batch_reader import BatchReader
    from meseta.data.read.options import ReaderOptions
    from meseta.data.read.served.dispatcher_client import DispatcherClient
    from meseta.data.read.served.messages import DatasetDescription
    from meseta.data.read.served.reader import ReaderServiceAddress, RunAttempt


READERS_VARIABLE = "MESETA_READERS"
"""Tells the ranks of `meseta train --readers N` the address of their dispatcher."""


class RowSource(ABC):
    """One dataset. Its name in messages is `str` of it."""

    is_served: bool
    """Whether others decode the rows, and the files are not here."""

    @abstractmethod
    def dataset(self) -> Dataset:
        """What it holds, with the digests of all vocabularies. Raises MesetaError where that cannot be read."""

    @abstractmethod
    def reader(
        self, dataset: Dataset, split: str, options: ReaderOptions, world: World, run: RunAttempt | None = None
    ) -> BatchReader:
        """This rank's batches of a split; `dataset` is what `dataset()` gave, with the labels that are wanted. `run`:
        as `attempt` gave it; None: no training, and one of its own. Collective where rows are served. Raises
        MesetaError as Reader does."""

    @abstractmethod
    def new_attempt(self, run_dir: Path, world: World) -> RunAttempt | None:
        """This start of the training in `run_dir`, which turns away what is left of former ones; None where that needs
        no name. Collective."""

    @abstractmethod
    def keep_tables(self, dataset: Dataset, folder: Path) -> Dataset:
        """Put what encoding further rows takes into `folder`, see meseta.data.prepare.copy_tables; returns the
        description with the names there. Raises OSError where the folder cannot be written, and MesetaError for what
        does not come."""


@dataclass(frozen=True)
class LocalSource(RowSource):
    """A folder that `meseta prepare` wrote."""

    folder: Path
    is_served = False

    def __str__(self) -> str:
        return str(self.folder)

    def dataset(self) -> Dataset:
        return with_vocabulary_digests(Dataset.load(self.folder))

    def reader(
        self, dataset: Dataset, split: str, options: ReaderOptions, world: World, run: RunAttempt | None = None
    ) -> BatchReader:
        from meseta.data.read.reader import Reader

        return Reader(dataset, split, options, rank=world.rank, num_ranks=world.size)

    def new_attempt(self, run_dir: Path, world: World) -> RunAttempt | None:
        return None

    def keep_tables(self, dataset: Dataset, folder: Path) -> Dataset:
        return copy_tables(dataset, folder)


class _ServiceSource(RowSource):
    """Rows that the readers of a dispatcher decode."""

    is_served = True

    @property
    @abstractmethod
    def _service(self) -> ReaderServiceAddress:
        """Whom to ask."""

    def reader(
        self, dataset: Dataset, split: str, options: ReaderOptions, world: World, run: RunAttempt | None = None
    ) -> BatchReader:
        from meseta.data.read.served.reader import RunAttempt, ServedReader

        # All ranks of one pass, but of no other, share windows.
        run = run or world.broadcast_from_rank_0(
            lambda: RunAttempt(name=f"{socket.gethostname()}:{time.time_ns()}", attempt=0)
        )
        found, problem = None, None
        try:
            found = ServedReader(
                self._service, split, options, labels=dataset.labels, rank=world.rank, num_ranks=world.size, run=run
            )
            described = found.dataset.model_copy(update={"dir": dataset.dir})
            if described != dataset:  # what was checked is what is read
                raise MesetaError(
                    f"dataset {str(dataset.dir)!r} has been prepared anew since this command began; run it again"
                )
        except MesetaError as error:
            problem = error
        world.raise_on_all_ranks(problem)
        assert found is not None
        return found

    def new_attempt(self, run_dir: Path, world: World) -> RunAttempt | None:
        from meseta.data.read.served.reader import RunAttempt

        def begin() -> RunAttempt:
            # The folder alone may be that of another machine's run.
            name = f"{socket.gethostname()}:{run_dir.absolute()}"
            return RunAttempt(name=name[-1024:], attempt=time.time_ns() // 1000)

        return world.broadcast_from_rank_0(begin)


@dataclass(frozen=True)
class LocallyServedSource(_ServiceSource):
    """A folder of this machine, which readers of this machine decode, for this command alone."""

    folder: Path
    url: str

    def __str__(self) -> str:
        return str(self.folder)

    def dataset(self) -> Dataset:
        return LocalSource(self.folder).dataset()

    def keep_tables(self, dataset: Dataset, folder: Path) -> Dataset:
        return LocalSource(self.folder).keep_tables(dataset, folder)

    @property
    def _service(self) -> ReaderServiceAddress:
        from meseta.data.read.served.reader import ReaderServiceAddress

        return ReaderServiceAddress(url=self.url)


@dataclass(frozen=True)
class ServedSource(_ServiceSource):
    """A dataset of a dispatcher."""

    config: ServiceConfig

    def __str__(self) -> str:
        return str(self.config.url)

    def dataset(self) -> Dataset:
        from meseta.data.read.served.reader import dataset_from_description

        return dataset_from_description(self._description, str(self))

    def keep_tables(self, dataset: Dataset, folder: Path) -> Dataset:
        from meseta.data.read.served.messages import TableRequest

        described = self._description

        def fetch(feature: str | None) -> Iterator[bytes]:
            request = TableRequest(dataset=described.name, digest=described.digest, feature=feature)
            with self._dispatcher() as dispatcher:
                yield from dispatcher.fetch_table(request)

        return copy_tables(dataset, folder, fetch)

    @property
    def _service(self) -> ReaderServiceAddress:
        from meseta.data.read.served.reader import ReaderServiceAddress

        assert self.config.url is not None
        return ReaderServiceAddress(
            url=self.config.url,
            dataset=self.config.dataset,
            keys=self.config.keys,
            reader_timeout_s=self.config.reader_timeout_s,
        )

    @cached_property
    def _description(self) -> DatasetDescription:
        with self._dispatcher() as dispatcher:
            return dispatcher.describe(self.config.dataset)

    @contextmanager
    def _dispatcher(self) -> Iterator[DispatcherClient]:
        from meseta.data.read.served.connection import UnreachableError

        dispatcher = self._service.dispatcher()
        try:
            yield dispatcher
        except UnreachableError as error:
            raise MesetaError(
                f"{error}; start it with `meseta readers dispatch`, or set data.service.url to one that runs"
            ) from None
        finally:
            dispatcher.close()


def make_row_source(config: DataConfig, data: Path | None = None) -> RowSource:
    """What the section `data` of a config names, or the dataset in the folder `data` where there is one."""
    if data is None and config.dir is None:
        return ServedSource(config.service)
    if data is None and config.dir is not None and (url := environ.get(READERS_VARIABLE)) is not None:
        return LocallyServedSource(config.dir, url)
    return LocalSource(data or config.dir or Path())
