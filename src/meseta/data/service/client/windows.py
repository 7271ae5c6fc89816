"""Windows of an epoch that readers send. They are requested ahead, and from another reader if one fails."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import flight

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch_reader import WaitTracker
from meseta.data.read.options import ReaderOptions
from meseta.data.read.order import EpochOrder
from meseta.data.read.rows import Rows, concatenate_rows
from meseta.data.read.slicing import BatchSlicer
from meseta.data.service.connection import Connection, UnreachableError
from meseta.data.service.dispatcher_client import DispatcherClient
from meseta.data.service.messages import LeaseRequest, Leases, ReaderFailure, Session, WindowTicket, WindowTimings
from meseta.data.service.record_batches import ReceivedRows
from meseta.errors import MesetaError
from meseta.telemetry.span import NO_READER, RowWait

LEASE_CHECK_INTERVAL_S = 1.0
"""Seconds without rows after which a rank asks whether a window still has the same reader."""
SLOW_READER_TIMEOUT_S = 10.0
"""Seconds without rows after which a rank asks for another reader."""
LOG_INTERVAL_S = 10.0
"""Interval in seconds at which a waiting rank logs the reason."""
RETRY_DELAY_S = 0.5
"""Delay in seconds between requests for a reader if none is available, or only the one that just failed."""
STATUS_INTERVAL_S = 3.0
"""Interval in seconds at which a rank reports its waits to the dispatcher."""
MAX_WINDOWS_AHEAD = 8
"""Maximum number of windows that are requested ahead."""


@dataclass(frozen=True, kw_only=True)
class EpochRequest:
    """Request of one rank for the rows of an epoch."""

    session: Session
    epoch: int
    first_row: int
    """Row at which the first batch starts."""
    options: ReaderOptions
    dataset: Dataset
    schema: pa.Schema

    def ticket(self, window: int, num_received: int) -> flight.Ticket:
        """Return the ticket for a window of which this rank already has `num_received` rows."""
        ticket = WindowTicket(
            session=self.session,
            epoch=self.epoch,
            window=window,
            first_row=self.first_row,
            batch_size=self.options.batch_size,
            last_batch=self.options.last_batch,
            num_received=num_received,
        )
        return flight.Ticket(ticket.to_bytes())

    def lease_request(
        self, windows: Sequence[int], failures: Sequence[ReaderFailure], standing: tuple[float, float]
    ) -> LeaseRequest:
        """Return the request for the readers of windows. `standing` is (seconds of waiting for rows, seconds in total)
        since the first batch."""
        waited_s, elapsed_s = standing
        return LeaseRequest(
            session=self.session,
            epoch=self.epoch,
            windows=tuple(windows),
            failures=tuple(failures),
            wait_s=waited_s,
            elapsed_s=elapsed_s,
        )

    def check_rows(self, batch: pa.RecordBatch, sender: str) -> ReceivedRows:
        """Validate a record batch. Raises MesetaError that names `sender` if it is invalid."""
        return ReceivedRows(batch, self.dataset, self.schema, sender)

    def empty_rows(self) -> Rows:
        return self.check_rows(pa.RecordBatch.from_pylist([], self.schema), "nobody").take(0, 0)


class WindowStream:
    """Stream of this rank's rows of one window from one reader. A thread reads one record batch ahead."""

    def __init__(
        self,
        connection: Connection,
        ticket: flight.Ticket,
        open_rows: Callable[[pa.RecordBatch, str], ReceivedRows],
    ) -> None:
        self.reader = connection.url
        self._connection, self._ticket, self._open_rows = connection, ticket, open_rows
        self._ready: queue.Queue[ReceivedRows | Exception] = queue.Queue(1)
        self._calls: list[flight.FlightStreamReader] = []
        self._is_closed = threading.Event()
        self._timings: WindowTimings | None = None
        self._wait_s = 0.0
        threading.Thread(target=self._run, name="meseta-window", daemon=True).start()

    def next_rows(self, waits: WaitTracker) -> ReceivedRows | Exception | None:
        """Return the next rows, the error that ended the stream, or `None` after LEASE_CHECK_INTERVAL_S without
        either."""
        begin_s = time.monotonic()
        try:
            while time.monotonic() < begin_s + LEASE_CHECK_INTERVAL_S:
                try:
                    return self._ready.get(timeout=0.1)
                except queue.Empty:
                    # Raises WaitCancelled if the consumer has closed its iterator.
                    waits.sleep(0)
            return None
        finally:
            self._wait_s += time.monotonic() - begin_s

    def pop_wait(self) -> RowWait:
        """Return and reset the waits since the last call, attributed to causes by the timings that the reader sent."""
        wait = attribute_wait(self._wait_s, self._timings)
        self._wait_s, self._timings = 0.0, None
        return wait

    def close(self) -> None:
        """Cancel the call, so that the reader stops sending."""
        self._is_closed.set()
        for call in self._calls:
            call.cancel()

    def _run(self) -> None:
        who = str(self._connection)
        try:
            with self._connection.wrap_errors():
                call = self._connection.client.do_get(self._ticket, self._connection.call_options())
                self._calls.append(call)
                # `close` may have run before the call was in the list.
                if self._is_closed.is_set():
                    call.cancel()
                for chunk in call:
                    if chunk.app_metadata is not None:
                        self._timings = WindowTimings.from_bytes(chunk.app_metadata.to_pybytes(), who)
                    if not self._put(self._open_rows(chunk.data, who)):
                        call.cancel()
                        return
            self._put(UnreachableError(f"{who} sent fewer rows than requested"))
        except Exception as error:
            self._put(error)

    def _put(self, item: ReceivedRows | Exception) -> bool:
        while not self._is_closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def attribute_wait(waited_s: float, made: WindowTimings | None) -> RowWait:
    """Divide a wait of `waited_s` seconds that has just ended by cause. `made` are the timings from the reader.

    The window was ready for the last `made.buffered_s` seconds. Before that, the reader was making it. The overlap of
    the wait with this time is divided in proportion to the reader's timings. The rest is transfer time.

        waited   |-----------------------------|
        reader       | storage decode |  ready |       wire: the time before and after
    """
    making_s = 0.0 if made is None else made.storage_s + made.decode_s + made.transform_s
    if made is None or not making_s:
        return RowWait(transfer_s=waited_s)
    share = min(max(waited_s - made.buffered_s, 0.0), making_s) / making_s
    return RowWait(
        storage_s=share * made.storage_s,
        decode_s=share * made.decode_s,
        transform_s=share * made.transform_s,
        transfer_s=waited_s - share * making_s,
    )


@dataclass
class PendingWindow:
    """Window whose rows are still arriving."""

    num_remaining: int
    """Number of rows of this rank that have not arrived."""
    num_received: int = 0
    stream: WindowStream | None = None
    rows: ReceivedRows | None = None
    offset: int = 0
    """Number of rows taken from `rows`."""

    def add_rows(self, rows: ReceivedRows) -> None:
        """Record that `rows` arrived. Raises MesetaError if there are more than requested."""
        if not 0 < rows.num_rows <= self.num_remaining:
            raise MesetaError(
                f"readers: received {rows.num_rows} rows of a window, but only {self.num_remaining} were left; run the "
                "same version everywhere"
            )
        self.num_remaining -= rows.num_rows
        self.num_received += rows.num_rows
        if self.num_remaining == 0:
            self.stream = None

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None


class ServedRows:
    """Rows of one epoch that readers decode, for the slices of one rank."""

    def __init__(
        self,
        order: EpochOrder,
        cut: BatchSlicer,
        asked: EpochRequest,
        dispatcher: DispatcherClient,
        waits: WaitTracker,
        reader_timeout_s: float,
        next_epoch: Callable[[], ServedRows] | None = None,
    ) -> None:
        """Create the rows. `next_epoch` creates those of the next epoch, which are requested ahead too. `None` means
        there is none."""
        self._order, self._slicer, self._request = order, cut, asked
        self._dispatcher = dispatcher
        self._waits, self._reader_timeout_s = waits, reader_timeout_s
        self._windows: dict[int, PendingWindow] = {}
        self._next_window = order.find_window(asked.first_row)
        self._next_epoch = next_epoch
        self._prefetched_epoch: ServedRows | None = None
        self._num_ahead = 1
        self._closed = threading.Event()
        threading.Thread(target=self._report_waits, name="meseta-tell", daemon=True).start()

    def take(self, first: int, last: int) -> Rows:
        """Take the rows. Raises MesetaError if a reader reports an error, or none sends rows before the timeout."""
        parts: list[Rows] = []
        while first < last:
            index = self._order.find_window(first)
            stop = min(last, self._order.bounds(index)[1])
            parts += self._take_from_window(index, stop - first)
            first = stop
        return concatenate_rows(parts or [self._request.empty_rows()])

    def close(self) -> None:
        self._closed.set()
        for window in self._windows.values():
            window.close()
        if self._prefetched_epoch is not None:
            self._prefetched_epoch.close()

    def take_next_epoch(self) -> ServedRows | None:
        following, self._prefetched_epoch = self._prefetched_epoch, None
        return following

    def _take_from_window(self, index: int, num_rows: int) -> list[Rows]:
        while (passed := next(iter(self._windows), index)) < index:  # Windows are requested in order.
            self._windows.pop(passed).close()
        parts = []
        while num_rows:
            self._request_windows(index + self._num_ahead)
            window = self._windows[index]
            if window.rows is None or window.offset == window.rows.num_rows:
                window.rows, window.offset = self._receive_rows(index, window), 0
            stop = min(window.offset + num_rows, window.rows.num_rows)
            parts.append(window.rows.take(window.offset, stop))
            num_rows -= stop - window.offset
            window.offset = stop
        return parts

    def _request_windows(self, last: int) -> None:
        """Request windows up to `last`. If the epoch ends before, continue with the next epoch."""
        was_next = self._next_window
        while self._next_window <= last and self._next_window < len(self._order):
            num_rows = self._slicer.num_rows_between(self._request.first_row, *self._order.bounds(self._next_window))
            if num_rows:
                self._windows[self._next_window] = PendingWindow(num_rows)
            self._next_window += 1
        if self._next_window > was_next:
            with suppress(UnreachableError):  # Requested again when they are needed.
                self._open_streams()
        if last < len(self._order):
            return
        if self._next_epoch is not None:
            self._prefetched_epoch, self._next_epoch = self._next_epoch(), None
        if self._prefetched_epoch is not None:
            self._prefetched_epoch._request_windows(last - len(self._order))

    def _open_streams(self, failures: Sequence[ReaderFailure] = ()) -> None:
        """Open streams for all windows without one, from the readers to which they are leased."""
        waiting = [number for number, window in self._windows.items() if window.stream is None and window.num_remaining]
        leases = self._request_leases(waiting, failures)
        # One window per reader, so that all readers have work.
        self._num_ahead = max(1, min(leases.num_readers, MAX_WINDOWS_AHEAD))
        for lease in leases.leases:
            window = self._windows.get(lease.window)
            if window is not None and window.stream is None:
                ticket = self._request.ticket(lease.window, window.num_received)
                window.stream = WindowStream(
                    self._dispatcher.connect_reader(lease.reader), ticket, self._request.check_rows
                )

    def _request_leases(self, windows: Sequence[int], failures: Sequence[ReaderFailure] = ()) -> Leases:
        with self._count_as_no_reader():
            return self._dispatcher.request_leases(
                self._request.lease_request(windows, failures, self._waits.wait_totals())
            )

    def _report_waits(self) -> None:
        # A rank reports its waits even if it requests nothing.
        while not self._closed.wait(STATUS_INTERVAL_S):
            with suppress(MesetaError):  # Requests for windows raise it too.
                self._dispatcher.request_leases(self._request.lease_request((), (), self._waits.wait_totals()))

    @contextmanager
    def _count_as_no_reader(self) -> Iterator[None]:
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self._waits.record(NO_READER, RowWait(no_lease_s=time.monotonic() - begin_s))

    def _receive_rows(self, index: int, window: PendingWindow) -> ReceivedRows:
        wait = _WindowWait(index, self._reader_timeout_s)
        while True:
            received = None if window.stream is None else window.stream.next_rows(self._waits)
            if isinstance(received, ReceivedRows):
                self._count_wait(window)
                window.add_rows(received)
                return received
            if isinstance(received, Exception) and not isinstance(received, UnreachableError):
                raise received
            wait.report_or_raise("no reader is available" if received is None else str(received))
            failed = None if received is None or window.stream is None else window.stream.reader
            try:
                self._change_reader(index, window, received, wait)
            except UnreachableError as error:
                wait.report_or_raise(str(error))
            if window.stream is None or window.stream.reader == failed:
                with self._count_as_no_reader():
                    self._waits.sleep(RETRY_DELAY_S)

    def _count_wait(self, window: PendingWindow) -> None:
        assert window.stream is not None
        self._waits.record(window.stream.reader, window.stream.pop_wait())

    def _change_reader(self, index: int, window: PendingWindow, received: Exception | None, wait: _WindowWait) -> None:
        if window.stream is None:
            return self._open_streams()
        reader = window.stream.reader
        if received is not None:
            self._count_wait(window)
            window.close()
            self._dispatcher.forget_reader(reader)
            return self._open_streams(
                [ReaderFailure(window=index, reader=reader, kind="failed", reason=str(received)[:4096])]
            )
        failures = [ReaderFailure(window=index, reader=reader, kind="slow")] if wait.should_change_reader() else []
        leases = self._request_leases([index], failures).leases
        if leases and leases[0].reader != reader:
            self._count_wait(window)
            window.close()
            self._open_streams()
        return None


class _WindowWait:
    """Time since rows of a window are awaited, with logging and a timeout."""

    def __init__(self, window: int, reader_timeout_s: float) -> None:
        self._window, self._reader_timeout_s = window, reader_timeout_s
        self._start_s = self._last_log_s = self._last_change_s = time.monotonic()

    def report_or_raise(self, why: str) -> None:
        """Log the wait at intervals. Raises MesetaError after the timeout."""
        now_s = time.monotonic()
        waited = f"window {self._window} has not arrived for {now_s - self._start_s:.0f} s: {why}"
        if now_s - self._start_s >= self._reader_timeout_s:
            raise MesetaError(
                f"readers: {waited}; start `meseta readers work`, or check `meseta readers status`, and run the "
                "command again to resume from the last checkpoint"
            )
        if now_s - self._last_log_s >= LOG_INTERVAL_S:
            print(f"readers: {waited}; waiting", file=sys.stderr, flush=True)
            self._last_log_s = now_s

    def should_change_reader(self) -> bool:
        """Whether to ask for another reader now. True at most once per SLOW_READER_TIMEOUT_S."""
        is_long = time.monotonic() - self._last_change_s >= SLOW_READER_TIMEOUT_S
        if is_long:
            self._last_change_s = time.monotonic()
        return is_long
