"""The dispatcher as a trainer or a reader sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from pyarrow import flight

from meseta.data.read.served.connection import Connection
from meseta.data.read.served.credentials import Credentials, credentials_for
from meseta.data.read.served.messages import (
    MAX_TABLE_BYTES,
    CountRequest,
    DatasetDescription,
    DescribeRequest,
    Heartbeat,
    HeartbeatReply,
    LeaseRequest,
    Leases,
    Message,
    ReaderServiceStatus,
    RowCounts,
    TableRequest,
)
from meseta.errors import MesetaError

CALL_TIMEOUT_S = 10.0
"""How long one call to the dispatcher may take, but for `count` and `table`, for which it may have to read much."""
COUNT_TIMEOUT_S = 3600.0

Reply = TypeVar("Reply", bound=Message)


class DispatcherClient:
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
        return self._request("describe", DescribeRequest(dataset=dataset), DatasetDescription)

    def count(self, request: CountRequest) -> RowCounts:
        """The rows of a split that are read."""
        return self._request("count", request, RowCounts, COUNT_TIMEOUT_S)

    def request_leases(self, request: LeaseRequest) -> Leases:
        """Who decodes windows."""
        return self._request("lease", request, Leases)

    def send_heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """A reader is there."""
        return self._request("beat", beat, HeartbeatReply)

    def fetch_table(self, request: TableRequest) -> Iterator[bytes]:
        """A file, piece by piece. Raises MesetaError for one larger than TABLE_BYTES, too."""
        num_bytes = 0
        with self._connection.wrap_errors():
            action, options = flight.Action("table", request.to_bytes()), self._connection.call_options(COUNT_TIMEOUT_S)
            for result in self._connection.client.do_action(action, options):
                num_bytes += result.body.size
                if num_bytes > MAX_TABLE_BYTES:
                    raise MesetaError(f"{self} sends a file of more than {MAX_TABLE_BYTES:,} bytes, which is no table")
                yield result.body.to_pybytes()

    def status(self) -> ReaderServiceStatus:
        """What it knows of readers and of those who read."""
        return ReaderServiceStatus.from_bytes(self._call("status", b"", CALL_TIMEOUT_S), str(self))

    def connect_reader(self, url: str) -> Connection:
        """A reader that it has named; one connection to each, until `forget`."""
        if url not in self._readers:
            self._readers[url] = Connection("reader", url, self.credentials)
        return self._readers[url]

    def forget_reader(self, url: str) -> None:
        """That reader has failed: whoever is there later is connected to anew."""
        self._readers.pop(url, None)

    def close(self) -> None:
        self._connection.client.close()

    def _request(self, what: str, request: Message, answer: type[Reply], timeout_s: float = CALL_TIMEOUT_S) -> Reply:
        return answer.from_bytes(self._call(what, request.to_bytes(), timeout_s), str(self))

    def _call(self, what: str, content: bytes, timeout_s: float) -> bytes:
        with self._connection.wrap_errors():
            action, options = flight.Action(what, content), self._connection.call_options(timeout_s)
            [result] = self._connection.client.do_action(action, options)
            return result.body.to_pybytes()
