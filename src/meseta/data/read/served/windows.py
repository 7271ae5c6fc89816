"""Windows of an epoch as they come from readers: asked for before their turn, and of another reader where one fails."""

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
from meseta.data.read.served.connection import Connection, UnreachableError
from meseta.data.read.served.dispatcher_client import DispatcherClient
from meseta.data.read.served.messages import (
    LeaseRequest,
    Leases,
    ReaderFailure,
    Session,
    WindowTicket,
    WindowTimings,
)
from meseta.data.read.served.record_batches import ReceivedRows
from meseta.data.read.slicing import BatchSlicer
from meseta.errors import MesetaError
from meseta.telemetry.row_waits import NO_READER, RowWait

LEASE_CHECK_INTERVAL_S = 1.0
"""After so long without rows, a rank asks whether a window is still its reader's."""
SLOW_READER_TIMEOUT_S = 10.0
"""After so long without rows, it asks for another reader."""
LOG_INTERVAL_S = 10.0
"""So often a rank that waits says why."""
RETRY_DELAY_S = 0.5
"""Between questions for a reader, where there is none, or none but the one that has just failed."""
STATUS_INTERVAL_S = 3.0
"""So often a rank tells how long it has waited."""
MAX_WINDOWS_AHEAD = 8
"""Windows that are asked for before their turn, at most."""


@dataclass(frozen=True, kw_only=True)
class EpochRequest:
    """What one rank asks readers for in an epoch."""

    session: Session
    epoch: int
    first_row: int
    """Row where the first batch begins."""
    options: ReaderOptions
    dataset: Dataset
    schema: pa.Schema
    """Of what comes."""

    def ticket(self, window: int, num_had: int) -> flight.Ticket:
        """For a window, of which this rank has `num_had` rows."""
        ticket = WindowTicket(
            session=self.session,
            epoch=self.epoch,
            window=window,
            begin=self.first_row,
            batch_size=self.options.batch_size,
            last_batch=self.options.last_batch,
            num_had=num_had,
        )
        return flight.Ticket(ticket.to_bytes())

    def lease_request(
        self, windows: Sequence[int], troubles: Sequence[ReaderFailure], standing: tuple[float, float]
    ) -> LeaseRequest:
        """The question who reads windows; `standing`: for how long this rank has stood still, and of how long."""
        waited_s, passed_s = standing
        return LeaseRequest(
            session=self.session,
            epoch=self.epoch,
            windows=tuple(windows),
            troubles=tuple(troubles),
            waited_s=waited_s,
            passed_s=passed_s,
        )

    def check_rows(self, batch: pa.RecordBatch, sender: str) -> ReceivedRows:
        """What came, checked."""
        return ReceivedRows(batch, self.dataset, self.schema, sender)

    def empty_rows(self) -> Rows:
        """None."""
        return self.check_rows(pa.RecordBatch.from_pylist([], self.schema), "nobody").take(0, 0)


class WindowStream:
    """This rank's rows of one window, as one reader sends them: a thread reads, one record batch ahead."""

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
        """What the reader has told of the window, with the first rows."""
        self._wait_s = 0.0
        """Since the last `pop_wait`."""
        threading.Thread(target=self._run, name="meseta-window", daemon=True).start()

    def next_rows(self, waits: WaitTracker) -> ReceivedRows | Exception | None:
        """The next rows, or why there are none; None where neither has come for LEASE_CHECK_INTERVAL_S."""
        begin_s = time.monotonic()
        try:
            while time.monotonic() < begin_s + LEASE_CHECK_INTERVAL_S:
                try:
                    return self._ready.get(timeout=0.1)
                except queue.Empty:
                    waits.sleep(0)
            return None
        finally:
            self._wait_s += time.monotonic() - begin_s

    def pop_wait(self) -> RowWait:
        """How long `next` has waited since the last call, by cause, as the reader has told them."""
        wait = attribute_wait(self._wait_s, self._timings)
        self._wait_s, self._timings = 0.0, None
        return wait

    def close(self) -> None:
        """Tell the reader that nobody wants its rows any more."""
        self._is_closed.set()
        for call in self._calls:
            call.cancel()

    def _run(self) -> None:
        who = str(self._connection)
        try:
            with self._connection.wrap_errors():
                call = self._connection.client.do_get(self._ticket, self._connection.call_options())
                self._calls.append(call)
                if self._is_closed.is_set():
                    call.cancel()
                for chunk in call:
                    if chunk.app_metadata is not None:
                        self._timings = WindowTimings.from_bytes(chunk.app_metadata.to_pybytes(), who)
                    if not self._put(self._open_rows(chunk.data, who)):
                        call.cancel()
                        return
            self._put(UnreachableError(f"{who} has sent fewer rows than were asked for"))
        except Exception as error:
            self._put(error)

    def _put(self, item: ReceivedRows | Exception) -> bool:
        """Whether anybody wants it."""
        while not self._is_closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def attribute_wait(waited_s: float, made: WindowTimings | None) -> RowWait:
    """What a wait of so long, which has just ended, was for; `made`: what the reader tells with the first rows.

    Of the last `made.ready_s` of it the window was decoded, and before that for as long as it took; whatever this
    covers of the wait is shared out as the reader's time was. The rest is the way there and back.

        waited   |-----------------------------|
        reader       | storage decode |  ready |       wire: what is before and behind
    """
    making_s = 0.0 if made is None else made.storage_s + made.decode_s + made.transform_s
    if made is None or not making_s:
        return RowWait(transfer_s=waited_s)
    share = min(max(waited_s - made.ready_s, 0.0), making_s) / making_s
    return RowWait(
        storage_s=share * made.storage_s,
        decode_s=share * made.decode_s,
        transform_s=share * made.transform_s,
        transfer_s=waited_s - share * making_s,
    )


@dataclass
class PendingWindow:
    """A window of which rows are to come."""

    num_remaining: int
    """Rows of this rank that have not come."""
    num_received: int = 0
    stream: WindowStream | None = None
    rows: ReceivedRows | None = None
    offset: int = 0
    """Rows of them that were taken."""

    def add_rows(self, rows: ReceivedRows) -> None:
        """These have come. Raises MesetaError where they are more than were asked for."""
        if not 0 < rows.num_rows <= self.num_remaining:
            raise MesetaError(
                f"readers: {rows.num_rows} rows came where {self.num_remaining} were left of a window; run the same "
                f"version "
                "everywhere"
            )
        self.num_remaining -= rows.num_rows
        self.num_received += rows.num_rows
        if self.num_remaining == 0:
            self.stream = None

    def close(self) -> None:
        """Nobody wants the rest."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None


class ServedRows:
    """Rows of one epoch by their place in its order, as a BatchSlicer takes them for one rank."""

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
        """`next_epoch` makes the rows of the epoch that follows, which are asked for ahead too; None: there is none."""
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
        """Rows first..last-1 of the epoch; slice after slice of the cut. Raises MesetaError for what a reader has met,
        and where no reader gives any rows."""
        parts: list[Rows] = []
        while first < last:
            index = self._order.find_window(first)
            stop = min(last, self._order.bounds(index)[1])
            parts += self._take_from_window(index, stop - first)
            first = stop
        return concatenate_rows(parts or [self._request.empty_rows()])

    def close(self) -> None:
        """Nobody wants rows any more."""
        self._closed.set()
        for window in self._windows.values():
            window.close()
        if self._prefetched_epoch is not None:
            self._prefetched_epoch.close()

    def take_next_epoch(self) -> ServedRows | None:
        """Those of the next epoch, where windows of it were asked for."""
        following, self._prefetched_epoch = self._prefetched_epoch, None
        return following

    def _take_from_window(self, index: int, num_rows: int) -> list[Rows]:
        while (passed := next(iter(self._windows), index)) < index:  # they were asked for in order
            self._windows.pop(passed).close()
        parts = []
        while num_rows:
            window = self._request_ahead(index)
            if window.rows is None or window.offset == window.rows.num_rows:
                window.rows, window.offset = self._receive_rows(index, window), 0
            stop = min(window.offset + num_rows, window.rows.num_rows)
            parts.append(window.rows.take(window.offset, stop))
            num_rows -= stop - window.offset
            window.offset = stop
        return parts

    def _request_ahead(self, index: int) -> PendingWindow:
        """Window `index`; those behind it that are worth asking for are asked for too."""
        self._request_windows(index + self._num_ahead)
        return self._windows[index]

    def _request_windows(self, last: int) -> None:
        """Ask for the windows up to `last` that were not asked for; where the epoch ends before, for the first of the
        next one."""
        was_next = self._next_window
        while self._next_window <= last and self._next_window < len(self._order):
            num_rows = self._slicer.num_rows_between(self._request.first_row, *self._order.bounds(self._next_window))
            if num_rows:
                self._windows[self._next_window] = PendingWindow(num_rows)
            self._next_window += 1
        if self._next_window > was_next:
            with suppress(UnreachableError):  # asked again at their turn
                self._open_streams()
        if last < len(self._order):
            return
        if self._next_epoch is not None:
            self._prefetched_epoch, self._next_epoch = self._next_epoch(), None
        if self._prefetched_epoch is not None:
            self._prefetched_epoch._request_windows(last - len(self._order))

    def _open_streams(self, troubles: Sequence[ReaderFailure] = ()) -> None:
        """Ask for all windows that nobody sends, of the readers that are to read them."""
        waiting = [number for number, window in self._windows.items() if window.stream is None and window.num_remaining]
        leases = self._request_leases(waiting, troubles)
        self._num_ahead = max(1, min(leases.num_readers, MAX_WINDOWS_AHEAD))
        for lease in leases.leases:
            window = self._windows.get(lease.window)
            if window is not None and window.stream is None:
                ticket = self._request.ticket(lease.window, window.num_received)
                window.stream = WindowStream(
                    self._dispatcher.connect_reader(lease.reader), ticket, self._request.check_rows
                )

    def _request_leases(self, windows: Sequence[int], troubles: Sequence[ReaderFailure] = ()) -> Leases:
        with self._count_as_no_reader():
            return self._dispatcher.request_leases(
                self._request.lease_request(windows, troubles, self._waits.wait_totals())
            )

    def _report_waits(self) -> None:
        """Tell the dispatcher now and then how this rank fares, also while it asks for nothing."""
        while not self._closed.wait(STATUS_INTERVAL_S):
            with suppress(MesetaError):  # who asks for windows meets it too
                self._dispatcher.request_leases(self._request.lease_request((), (), self._waits.wait_totals()))

    @contextmanager
    def _count_as_no_reader(self) -> Iterator[None]:
        """What is done inside is waited for, and no reader is to blame."""
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self._waits.record(NO_READER, RowWait(no_lease_s=time.monotonic() - begin_s))

    def _receive_rows(self, index: int, window: PendingWindow) -> ReceivedRows:
        """Rows of window `index` that have not come yet, from whoever has them."""
        wait = _WindowWait(index, self._reader_timeout_s)
        while True:
            came = None if window.stream is None else window.stream.next_rows(self._waits)
            if isinstance(came, ReceivedRows):
                self._count_wait(window)
                window.add_rows(came)
                return came
            if isinstance(came, Exception) and not isinstance(came, UnreachableError):
                raise came
            wait.report_or_raise("no reader is there" if came is None else str(came))
            failed = None if came is None or window.stream is None else window.stream.reader
            try:
                self._change_reader(index, window, came, wait)
            except UnreachableError as error:
                wait.report_or_raise(str(error))
            if window.stream is None or window.stream.reader == failed:
                with self._count_as_no_reader():
                    self._waits.sleep(RETRY_DELAY_S)

    def _count_wait(self, window: PendingWindow) -> None:
        """Count what its stream was waited for."""
        assert window.stream is not None
        self._waits.record(window.stream.reader, window.stream.pop_wait())

    def _change_reader(self, index: int, window: PendingWindow, came: Exception | None, wait: _WindowWait) -> None:
        """Ask for window `index` again, where its reader has failed, is slow, or has lost it."""
        if window.stream is None:
            return self._open_streams()
        reader = window.stream.reader
        if came is not None:
            self._count_wait(window)
            window.close()
            self._dispatcher.forget_reader(reader)
            return self._open_streams(
                [ReaderFailure(window=index, reader=reader, kind="failed", what=str(came)[:4096])]
            )
        troubles = [ReaderFailure(window=index, reader=reader, kind="slow")] if wait.should_change_reader() else []
        leases = self._request_leases([index], troubles).leases
        if leases and leases[0].reader != reader:
            self._count_wait(window)
            window.close()
            self._open_streams()
        return None


class _WindowWait:
    """How long rows of a window are waited for, and why."""

    def __init__(self, window: int, reader_timeout_s: float) -> None:
        self._window, self._reader_timeout_s = window, reader_timeout_s
        self._start_s = self._last_log_s = self._last_change_s = time.monotonic()

    def report_or_raise(self, why: str) -> None:
        """Say so now and then. Raises MesetaError where it has been too long."""
        now_s = time.monotonic()
        waited = f"window {self._window} has not come for {now_s - self._start_s:.0f} s: {why}"
        if now_s - self._start_s >= self._reader_timeout_s:
            raise MesetaError(
                f"readers: {waited}; start `meseta readers work`, or see `meseta readers status`, and run the command "
                "again, which goes on from the last checkpoint"
            )
        if now_s - self._last_log_s >= LOG_INTERVAL_S:
            print(f"readers: {waited}; waiting", file=sys.stderr, flush=True)
            self._last_log_s = now_s

    def should_change_reader(self) -> bool:
        """Whether it is time to ask for another reader, once in SLOW_READER_TIMEOUT_S."""
        is_long = time.monotonic() - self._last_change_s >= SLOW_READER_TIMEOUT_S
        if is_long:
            self._last_change_s = time.monotonic()
        return is_long
