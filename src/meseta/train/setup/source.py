"""Sources of the rows of a run: a local folder, or the readers of a dispatcher."""

# `meseta plan` needs no batches, so torch is imported only when a reader is created.

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from meseta.config import DataConfig
from meseta.config.run import ServiceConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.encoding import with_vocabulary_digests
from meseta.data.prepare.copy_tables import copy_tables
from meseta.spec import MesetaError
from meseta.system.environment_variables import environ

if TYPE_CHECKING:
    from meseta.comm import World
    from meseta.data.read.batch_reader import BatchReader
    from meseta.data.read.options import ReaderOptions
    from meseta.data.service.client.reader import ReaderServiceAddress, RunAttempt
    from meseta.data.service.dispatcher_client import DispatcherClient
    from meseta.data.service.messages import DatasetDescription


READERS_VARIABLE = "MESETA_READERS"
"""Environment variable with the dispatcher's address, for the ranks of `meseta train --readers N`."""


class RowSource(ABC):
    """Source of the rows of one dataset. Messages name it by `str(source)`."""

    is_served: bool
    """Whether readers decode the rows. If so, the files need not be on this machine."""

    @abstractmethod
    def dataset(self) -> Dataset:
        """Return the dataset description with all vocabulary digests. Raises MesetaError if it cannot be read."""

    @abstractmethod
    def reader(
        self, dataset: Dataset, split: str, options: ReaderOptions, world: World, run: RunAttempt | None = None
    ) -> BatchReader:
        """Return a reader of this rank's batches of a split. Collective if rows are served.

        `dataset` is the result of `dataset()` with the labels to read. `run` is the result of `new_attempt`, or `None`
        to read without training. Raises MesetaError if the options do not fit the data.
        """

    @abstractmethod
    def new_attempt(self, run_dir: Path, world: World) -> RunAttempt | None:
        """Return an identifier of this start of the training in `run_dir`, or `None` if not needed. Collective. Readers
        reject earlier attempts."""

    @abstractmethod
    def keep_tables(self, dataset: Dataset, folder: Path) -> Dataset:
        """Copy the files that encoding new rows requires to `folder`. Return a description with their paths there.

        Raises OSError if the folder cannot be written, and MesetaError if a file cannot be fetched.
        """


@dataclass(frozen=True)
class LocalSource(RowSource):
    """Folder written by `meseta prepare`."""

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
    is_served = True

    @property
    @abstractmethod
    def _service(self) -> ReaderServiceAddress: ...

    def reader(
        self, dataset: Dataset, split: str, options: ReaderOptions, world: World, run: RunAttempt | None = None
    ) -> BatchReader:
        from meseta.data.service.client.reader import RunAttempt, ServedReader

        # The ranks of one epoch share windows with each other and with no other reader, so the name must be unique.
        run = run or world.broadcast_from_rank_0(
            lambda: RunAttempt(name=f"{socket.gethostname()}:{time.time_ns()}", attempt=0)
        )
        reader, problem = None, None
        try:
            reader = ServedReader(
                replace(self._service, without=dataset.without),
                split,
                options,
                labels=dataset.labels,
                rank=world.rank,
                num_ranks=world.size,
                run=run,
            )
            described = reader.dataset.model_copy(update={"dir": dataset.dir})
            if described != dataset:  # `dataset` was checked, so the readers must decode the same one.
                raise MesetaError(
                    f"dataset {str(dataset.dir)!r} was prepared again while this command ran; run the command again"
                )
        except MesetaError as error:
            problem = error
        world.raise_on_all_ranks(problem)
        assert reader is not None
        return reader

    def new_attempt(self, run_dir: Path, world: World) -> RunAttempt | None:
        from meseta.data.service.client.reader import RunAttempt

        def begin() -> RunAttempt:
            # Runs on several machines may have equal paths.
            name = f"{socket.gethostname()}:{run_dir.absolute()}"
            return RunAttempt(name=name[-1024:], attempt=time.time_ns() // 1000)

        return world.broadcast_from_rank_0(begin)


@dataclass(frozen=True)
class LocallyServedSource(_ServiceSource):
    """Folder on this machine that readers on this machine decode, for this command only."""

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
        from meseta.data.service.client.reader import ReaderServiceAddress

        return ReaderServiceAddress(url=self.url)


@dataclass(frozen=True)
class ServedSource(_ServiceSource):
    """Dataset of a dispatcher."""

    config: ServiceConfig

    def __str__(self) -> str:
        return str(self.config.url)

    def dataset(self) -> Dataset:
        from meseta.data.service.client.reader import dataset_from_description

        return dataset_from_description(self._description, str(self))

    def keep_tables(self, dataset: Dataset, folder: Path) -> Dataset:
        from meseta.data.service.messages import TableRequest

        described = self._description

        def fetch(feature: str | None, candidates: bool) -> Iterator[bytes]:
            request = TableRequest(
                dataset=described.name, digest=described.digest, feature=feature, candidates=candidates
            )
            with self._dispatcher() as dispatcher:
                yield from dispatcher.fetch_table(request)

        return copy_tables(dataset, folder, fetch)

    @property
    def _service(self) -> ReaderServiceAddress:
        from meseta.data.service.client.reader import ReaderServiceAddress

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
        from meseta.data.service.connection import UnreachableError

        dispatcher = self._service.dispatcher()
        try:
            yield dispatcher
        except UnreachableError as error:
            raise MesetaError(
                f"{error}; start it with `meseta readers dispatch`, or set data.service.url to a running dispatcher"
            ) from None
        finally:
            dispatcher.close()


def make_row_source(config: DataConfig, data: Path | None = None) -> RowSource:
    """Return the source that section `data` of a config names, or the dataset folder `data` if it is given."""
    if data is None and config.dir is None:
        return ServedSource(config.service)
    if data is None and config.dir is not None and (url := environ.get(READERS_VARIABLE)) is not None:
        return LocallyServedSource(config.dir, url)
    return LocalSource(data or config.dir or Path())
