"""Client of the dispatcher, for trainers and readers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from pyarrow import flight

from meseta.data.service.connection import Connection
from meseta.data.service.credentials import Credentials, credentials_for
from meseta.data.service.messages import (
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
"""Timeout in seconds of calls to the dispatcher, except for `count` and `table`, which may read many files."""
COUNT_TIMEOUT_S = 3600.0
"""Timeout in seconds of `count` and `table` calls."""

Reply = TypeVar("Reply", bound=Message)


class DispatcherClient:
    """Thread-safe client of the dispatcher at a URL.

    All methods raise UnreachableError if there is no answer, and MesetaError if the dispatcher refuses a request or its
    answer is invalid.
    """

    def __init__(self, url: str, credentials: Credentials | None = None) -> None:
        """Create a client. `credentials` defaults to those of an address without keys. Raises MesetaError if the
        address is invalid or does not match."""
        self.url, self.credentials = url, credentials or credentials_for(url)
        self._connection = Connection("dispatcher", url, self.credentials)
        self._readers: dict[str, Connection] = {}

    def __repr__(self) -> str:
        return str(self._connection)

    def describe(self, dataset: str | None) -> DatasetDescription:
        return self._request("describe", DescribeRequest(dataset=dataset), DatasetDescription)

    def count(self, request: CountRequest) -> RowCounts:
        return self._request("count", request, RowCounts, COUNT_TIMEOUT_S)

    def request_leases(self, request: LeaseRequest) -> Leases:
        return self._request("lease", request, Leases)

    def send_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        return self._request("heartbeat", heartbeat, HeartbeatReply)

    def fetch_table(self, request: TableRequest) -> Iterator[bytes]:
        """Yield a file in chunks. Also raises MesetaError if it is larger than MAX_TABLE_BYTES."""
        num_bytes = 0
        with self._connection.wrap_errors():
            action, options = flight.Action("table", request.to_bytes()), self._connection.call_options(COUNT_TIMEOUT_S)
            for result in self._connection.client.do_action(action, options):
                # Checked while receiving, so that a faulty server cannot fill the disk.
                num_bytes += result.body.size
                if num_bytes > MAX_TABLE_BYTES:
                    raise MesetaError(
                        f"{self} sent a file of more than {MAX_TABLE_BYTES:,} bytes, which is too large for a table"
                    )
                yield result.body.to_pybytes()

    def status(self) -> ReaderServiceStatus:
        return ReaderServiceStatus.from_bytes(self._call("status", b"", CALL_TIMEOUT_S), str(self))

    def connect_reader(self, url: str) -> Connection:
        """Return the connection to a reader. It is cached until `forget_reader`."""
        if url not in self._readers:
            self._readers[url] = Connection("reader", url, self.credentials)
        return self._readers[url]

    def forget_reader(self, url: str) -> None:
        """Remove the cached connection to a reader that failed. Its URL is then connected again."""
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
