"""Dispatcher, an Arrow Flight server that describes datasets and assigns windows to readers."""

from __future__ import annotations

from collections.abc import Iterator

from pyarrow import flight

from meseta.data.service.connection import to_flight_error
from meseta.data.service.keys import TlsKeys
from meseta.data.service.messages import (
    CountRequest,
    DescribeRequest,
    Heartbeat,
    HeartbeatReply,
    LeaseRequest,
    Message,
    ReaderServiceStatus,
    ScaleTarget,
    TableRequest,
)
from meseta.data.service.server.autoscaler import ReaderAutoscaler
from meseta.data.service.server.catalog import Catalog
from meseta.data.service.server.endpoint_server import Endpoint, EndpointServer
from meseta.data.service.server.lease_table import LeaseTable
from meseta.data.service.server.window_store import cancellation_check
from meseta.spec import MesetaError
from meseta.system.remote import check_reachable

ACTIONS = ("describe", "count", "table", "lease", "heartbeat", "status")


class DispatchServer(EndpointServer):
    """Flight server that answers requests of trainers and heartbeats of readers."""

    def __init__(
        self, endpoint: Endpoint, catalog: Catalog, leases: LeaseTable, scale: ReaderAutoscaler | None = None
    ) -> None:
        """Start the server. With `scale`, its status includes the target number of readers."""
        super().__init__(endpoint)
        self._catalog, self._leases, self._autoscaler = catalog, leases, scale

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:
        """Handle one of `ACTIONS`. The body is a serialized `Message`."""
        try:
            answer = self._handle(action.type, action.body.to_pybytes(), context)
        except Exception as error:
            raise to_flight_error(error) from None
        if isinstance(answer, Message):
            return iter([answer.to_bytes()])
        return iter([answer]) if isinstance(answer, bytes) else answer

    def status(self) -> ReaderServiceStatus:
        """Return the status of datasets, readers and sessions."""
        scale, target = self._autoscaler, None
        if scale is not None:
            target = ScaleTarget(
                target=scale.target_readers, min_readers=scale.min_readers, max_readers=scale.max_readers
            )
        return ReaderServiceStatus(
            scale=target,
            datasets=self._catalog.folders,
            readers=tuple(self._leases.readers()),
            sessions=tuple(self._leases.sessions()),
            num_moved=dict(self._leases.num_reassigned),
        )

    def _handle(self, what: str, body: bytes, context: flight.ServerCallContext) -> Message | bytes | Iterator[bytes]:
        sender = f"peer {context.peer()}"
        match what:
            case "describe":
                return self._catalog.describe(DescribeRequest.from_bytes(body, sender).dataset)
            case "count":
                return self._catalog.count(CountRequest.from_bytes(body, sender).rows, cancellation_check(context))
            case "table":
                return self._catalog.read_table(TableRequest.from_bytes(body, sender))
            case "lease":
                return self._leases.lease(LeaseRequest.from_bytes(body, sender))
            case "heartbeat" | "beat":  # Readers of earlier versions send "beat".
                heartbeat = Heartbeat.from_bytes(body, sender)
                check_reachable(heartbeat.reader, has_keys=isinstance(self.credentials, TlsKeys))
                self._leases.record_heartbeat(heartbeat)
                return HeartbeatReply(datasets=self._catalog.folders)
            case "status":
                return self.status()
        raise MesetaError(f"{sender} sent unknown action {what[:80]!r}; known actions: {', '.join(ACTIONS)}")
