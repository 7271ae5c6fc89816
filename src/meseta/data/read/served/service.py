"""The dispatcher as a trainer or a reader sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from pyarrow import flight

from meseta.data.read.served.connection import Connection
from meseta.data.read.served.credentials import Credentials, credentials_for
from meseta.data.read.served.messages import (
    TABLE_BYTES,
    Beat,
    BeatAnswer,
    CountRequest,
    Counts,
    DatasetDescription,
    DescribeRequest,
    LeaseRequest,
    Leases,
    Message,
    TableRequest,
    TierStatus,
)
from meseta.errors import MesetaError

CALL_S = 10.0
"""How long one call to the dispatcher may take, but for `count` and `table`, for which it may have to read much."""
COUNT_S = 3600.0

Answer = TypeVar("Answer", bound=Message)


class Dispatcher:
    """Asks the dispatcher at a URL. Every method raises Unreachable where nobody answers, and MesetaError for what the
    dispatcher refuses, or an answer that is none. Threads may share one."""

    def __init__(self, url: str, credentials: Credentials | None = None) -> None:
        """`credentials`: None: those of an address without keys. Raises MesetaError for what is no address, or does not
        go with them."""
        self.url, self.credentials = url, credentials or credentials_for(url)
        self._connection = Connection("dispatcher", url, self.credentials)
        self._readers: dict[str, Connection] = {}

    def __repr__(self) -> str:
        return str(self._connection)

    def describe(self, dataset: str | None) -> DatasetDescription:
        """A dataset by name; None: the only one."""
        return self._ask("describe", DescribeRequest(dataset=dataset), DatasetDescription)

    def count(self, request: CountRequest) -> Counts:
        """The rows of a split that are read."""
        return self._ask("count", request, Counts, COUNT_S)

    def lease(self, request: LeaseRequest) -> Leases:
        """Who decodes windows."""
        return self._ask("lease", request, Leases)

    def beat(self, beat: Beat) -> BeatAnswer:
        """A reader is there."""
        return self._ask("beat", beat, BeatAnswer)

    def table(self, request: TableRequest) -> Iterator[bytes]:
        """A file, piece by piece. Raises MesetaError for one larger than TABLE_BYTES, too."""
        num_bytes = 0
        with self._connection.told():
            action, options = flight.Action("table", request.to_bytes()), self._connection.options(COUNT_S)
            for result in self._connection.client.do_action(action, options):
                num_bytes += result.body.size
                if num_bytes > TABLE_BYTES:
                    raise MesetaError(f"{self} sends a file of more than {TABLE_BYTES:,} bytes, which is no table")
                yield result.body.to_pybytes()

    def status(self) -> TierStatus:
        """What it knows of readers and of those who read."""
        return TierStatus.from_bytes(self._call("status", b"", CALL_S), str(self))

    def reader(self, url: str) -> Connection:
        """A reader that it has named; one connection to each, until `forget`."""
        if url not in self._readers:
            self._readers[url] = Connection("reader", url, self.credentials)
        return self._readers[url]

    def forget(self, url: str) -> None:
        """That reader has failed: whoever is there later is connected to anew."""
        self._readers.pop(url, None)

    def close(self) -> None:
        self._connection.client.close()

    def _ask(self, what: str, request: Message, answer: type[Answer], timeout_s: float = CALL_S) -> Answer:
        return answer.from_bytes(self._call(what, request.to_bytes(), timeout_s), str(self))

    def _call(self, what: str, content: bytes, timeout_s: float) -> bytes:
        with self._connection.told():
            action, options = flight.Action(what, content), self._connection.options(timeout_s)
            [result] = self._connection.client.do_action(action, options)
            return result.body.to_pybytes()
