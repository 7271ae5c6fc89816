"""The dispatcher as a trainer or a reader sees it, and how errors come over the wire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pyarrow import flight

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
from meseta.errors import MesetaError, one_line
from meseta.machine.remote import checked_url

CALL_S = 10.0
"""How long one call to the dispatcher may take, but for `count` and `table`, for which it may have to read much."""
COUNT_S = 3600.0

Answer = TypeVar("Answer", bound=Message)


class Unreachable(MesetaError):
    """Nobody answers, or the answer broke off: to ask again may help."""


@contextmanager
def told_by(sender: str) -> Iterator[None]:
    """Turn what Arrow Flight raises into `Unreachable`, or into the MesetaError that the other side has met."""
    try:
        yield
    except flight.FlightServerError as error:
        if error.extra_info:
            text = error.extra_info.decode(errors="replace")
            raise MesetaError(f"{sender}: {text[:4096]}") from None
        raise Unreachable(f"{sender} failed: {one_line(error)}") from None
    except (flight.FlightError, OSError, ValueError, RuntimeError) as error:  # Arrow maps codes of gRPC to these
        if isinstance(error, MesetaError):
            raise
        raise Unreachable(f"{sender} cannot be reached: {one_line(error)[:300]}") from None


def as_flight_error(error: Exception) -> flight.FlightServerError:
    """What a server raises for `told_by` to turn back: another reader may do better where this one could not reach
    somebody else, but not where it has met bad data."""
    text = str(error) if isinstance(error, MesetaError) else one_line(error)
    return flight.FlightServerError(text, extra_info=b"" if isinstance(error, Unreachable) else text.encode())


class Dispatcher:
    """Asks the dispatcher at a URL. Every method raises Unreachable where nobody answers, and MesetaError for what the
    dispatcher refuses, or an answer that is none. Threads may share one."""

    def __init__(self, url: str) -> None:
        self.url = checked_url(url)
        self._client = flight.connect(url)

    def __repr__(self) -> str:
        return f"dispatcher {self.url}"

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
        with told_by(str(self)):
            options = flight.FlightCallOptions(timeout=COUNT_S)
            for result in self._client.do_action(flight.Action("table", request.to_bytes()), options):
                num_bytes += result.body.size
                if num_bytes > TABLE_BYTES:
                    raise MesetaError(f"{self} sends a file of more than {TABLE_BYTES:,} bytes, which is no table")
                yield result.body.to_pybytes()

    def status(self) -> TierStatus:
        """What it knows of readers and of those who read."""
        return TierStatus.from_bytes(self._call("status", b"", CALL_S), str(self))

    def close(self) -> None:
        self._client.close()

    def _ask(self, what: str, request: Message, answer: type[Answer], timeout_s: float = CALL_S) -> Answer:
        return answer.from_bytes(self._call(what, request.to_bytes(), timeout_s), str(self))

    def _call(self, what: str, content: bytes, timeout_s: float) -> bytes:
        with told_by(str(self)):
            options = flight.FlightCallOptions(timeout=timeout_s)
            [result] = self._client.do_action(flight.Action(what, content), options)
            return result.body.to_pybytes()
