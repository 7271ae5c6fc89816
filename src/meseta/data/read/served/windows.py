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
from meseta.data.read.batch_reader import Waits
from meseta.data.read.cut import BatchCut
from meseta.data.read.options import ReaderOptions
from meseta.data.read.order import EpochOrder
from meseta.data.read.rows import Rows, concatenate
from meseta.data.read.served.connection import Connection, Unreachable
from meseta.data.read.served.messages import (
    LeaseRequest,
    Leases,
    ReaderTrouble,
    Session,
    WindowMade,
    WindowTicket,
)
from meseta.data.read.served.record_batches import ReceivedRows
from meseta.data.read.served.service import Dispatcher
from meseta.errors import MesetaError
from meseta.telemetry.row_waits import NO_READER, RowWait

LOOK_AGAIN_S = 1.0
"""After so long without rows, a rank asks whether a window is still its reader's."""
SLOW_S = 10.0
"""After so long without rows, it asks for another reader."""
SAY_S = 10.0
"""So often a rank that waits says why."""
TRY_AGAIN_S = 0.5
"""Between questions for a reader, where there is none, or none but the one that has just failed."""
TELL_S = 3.0
"""So often a rank tells how long it has waited."""
MOST_AHEAD = 8
"""Windows that are asked for before their turn, at most."""


@dataclass(frozen=True, kw_only=True)
class EpochAsked:
    """What one rank asks readers for in an epoch."""

    session: Session
    epoch: int
    begin: int
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
            begin=self.begin,
            batch_size=self.options.batch_size,
            last_batch=self.options.last_batch,
            num_had=num_had,
        )
        return flight.Ticket(ticket.to_bytes())

    def leases(
        self, windows: Sequence[int], troubles: Sequence[ReaderTrouble], standing: tuple[float, float]
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

    def rows(self, batch: pa.RecordBatch, sender: str) -> ReceivedRows:
        """What came, checked."""
        return ReceivedRows(batch, self.dataset, self.schema, sender)

    def no_rows(self) -> Rows:
        """None."""
        return self.rows(pa.RecordBatch.from_pylist([], self.schema), "nobody").take(0, 0)


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
        self._made: WindowMade | None = None
        """What the reader has told of the window, with the first rows."""
        self._waited_s = 0.0
        """Since the last `take_wait`."""
        threading.Thread(target=self._run, name="meseta-window", daemon=True).start()

    def next(self, waits: Waits) -> ReceivedRows | Exception | None:
        """The next rows, or why there are none; None where neither has come for LOOK_AGAIN_S."""
        begin_s = time.monotonic()
        try:
            while time.monotonic() < begin_s + LOOK_AGAIN_S:
                try:
                    return self._ready.get(timeout=0.1)
                except queue.Empty:
                    waits.sleep(0)
            return None
        finally:
            self._waited_s += time.monotonic() - begin_s

    def take_wait(self) -> RowWait:
        """How long `next` has waited since the last call, by cause, as the reader has told them."""
        wait = wait_by_cause(self._waited_s, self._made)
        self._waited_s, self._made = 0.0, None
        return wait

    def close(self) -> None:
        """Tell the reader that nobody wants its rows any more."""
        self._is_closed.set()
        for call in self._calls:
            call.cancel()

    def _run(self) -> None:
        who = str(self._connection)
        try:
            with self._connection.told():
                call = self._connection.client.do_get(self._ticket, self._connection.options())
                self._calls.append(call)
                if self._is_closed.is_set():
                    call.cancel()
                for chunk in call:
                    if chunk.app_metadata is not None:
                        self._made = WindowMade.from_bytes(chunk.app_metadata.to_pybytes(), who)
                    if not self._put(self._open_rows(chunk.data, who)):
                        call.cancel()
                        return
            self._put(Unreachable(f"{who} has sent fewer rows than were asked for"))
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


def wait_by_cause(waited_s: float, made: WindowMade | None) -> RowWait:
    """What a wait of so long, which has just ended, was for; `made`: what the reader tells with the first rows.

    Of the last `made.ready_s` of it the window was decoded, and before that for as long as it took; whatever this
    covers of the wait is shared out as the reader's time was. The rest is the way there and back.

        waited   |-----------------------------|
        reader       | storage decode |  ready |       wire: what is before and behind
    """
    making_s = 0.0 if made is None else made.storage_s + made.decode_s + made.transform_s
    if made is None or not making_s:
        return RowWait(wire_s=waited_s)
    share = min(max(waited_s - made.ready_s, 0.0), making_s) / making_s
    return RowWait(
        storage_s=share * made.storage_s,
        decode_s=share * made.decode_s,
        transform_s=share * made.transform_s,
        wire_s=waited_s - share * making_s,
    )


@dataclass
class ComingWindow:
    """A window of which rows are to come."""

    num_left: int
    """Rows of this rank that have not come."""
    num_had: int = 0
    stream: WindowStream | None = None
    rows: ReceivedRows | None = None
    place: int = 0
    """Rows of them that were taken."""

    def had(self, rows: ReceivedRows) -> None:
        """These have come. Raises MesetaError where they are more than were asked for."""
        if not 0 < rows.num_rows <= self.num_left:
            raise MesetaError(
                f"readers: {rows.num_rows} rows came where {self.num_left} were left of a window; run the same version "
                "everywhere"
            )
        self.num_left -= rows.num_rows
        self.num_had += rows.num_rows
        if self.num_left == 0:
            self.stream = None

    def close(self) -> None:
        """Nobody wants the rest."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None


class ServedRows:
    """Rows of one epoch by their place in its order, as a BatchCut takes them for one rank."""

    def __init__(
        self,
        order: EpochOrder,
        cut: BatchCut,
        asked: EpochAsked,
        dispatcher: Dispatcher,
        waits: Waits,
        give_up_s: float,
        next_epoch: Callable[[], ServedRows] | None = None,
    ) -> None:
        """`next_epoch` makes the rows of the epoch that follows, which are asked for ahead too; None: there is none."""
        self._order, self._cut, self._asked = order, cut, asked
        self._dispatcher = dispatcher
        self._waits, self._give_up_s = waits, give_up_s
        self._windows: dict[int, ComingWindow] = {}
        self._next = order.find(asked.begin)
        self._next_epoch = next_epoch
        self._following: ServedRows | None = None
        self._num_ahead = 1
        self._is_over = threading.Event()
        threading.Thread(target=self._tell, name="meseta-tell", daemon=True).start()

    def take(self, first: int, last: int) -> Rows:
        """Rows first..last-1 of the epoch; slice after slice of the cut. Raises MesetaError for what a reader has met,
        and where no reader gives any rows."""
        parts: list[Rows] = []
        while first < last:
            index = self._order.find(first)
            stop = min(last, self._order.bounds(index)[1])
            parts += self._take(index, stop - first)
            first = stop
        return concatenate(parts or [self._asked.no_rows()])

    def close(self) -> None:
        """Nobody wants rows any more."""
        self._is_over.set()
        for window in self._windows.values():
            window.close()
        if self._following is not None:
            self._following.close()

    def following(self) -> ServedRows | None:
        """Those of the next epoch, where windows of it were asked for."""
        following, self._following = self._following, None
        return following

    def _take(self, index: int, num_rows: int) -> list[Rows]:
        while (passed := next(iter(self._windows), index)) < index:  # they were asked for in order
            self._windows.pop(passed).close()
        parts = []
        while num_rows:
            window = self._look_ahead(index)
            if window.rows is None or window.place == window.rows.num_rows:
                window.rows, window.place = self._next_rows(index, window), 0
            stop = min(window.place + num_rows, window.rows.num_rows)
            parts.append(window.rows.take(window.place, stop))
            num_rows -= stop - window.place
            window.place = stop
        return parts

    def _look_ahead(self, index: int) -> ComingWindow:
        """Window `index`; those behind it that are worth asking for are asked for too."""
        self._ask(index + self._num_ahead)
        return self._windows[index]

    def _ask(self, last: int) -> None:
        """Ask for the windows up to `last` that were not asked for; where the epoch ends before, for the first of the
        next one."""
        was_next = self._next
        while self._next <= last and self._next < len(self._order):
            num_rows = self._cut.num_rows_between(self._asked.begin, *self._order.bounds(self._next))
            if num_rows:
                self._windows[self._next] = ComingWindow(num_rows)
            self._next += 1
        if self._next > was_next:
            with suppress(Unreachable):  # asked again at their turn
                self._open()
        if last < len(self._order):
            return
        if self._next_epoch is not None:
            self._following, self._next_epoch = self._next_epoch(), None
        if self._following is not None:
            self._following._ask(last - len(self._order))

    def _open(self, troubles: Sequence[ReaderTrouble] = ()) -> None:
        """Ask for all windows that nobody sends, of the readers that are to read them."""
        waiting = [number for number, window in self._windows.items() if window.stream is None and window.num_left]
        leases = self._lease(waiting, troubles)
        self._num_ahead = max(1, min(leases.num_readers, MOST_AHEAD))
        for lease in leases.leases:
            window = self._windows.get(lease.window)
            if window is not None and window.stream is None:
                ticket = self._asked.ticket(lease.window, window.num_had)
                window.stream = WindowStream(self._dispatcher.reader(lease.reader), ticket, self._asked.rows)

    def _lease(self, windows: Sequence[int], troubles: Sequence[ReaderTrouble] = ()) -> Leases:
        with self._without_reader():
            return self._dispatcher.lease(self._asked.leases(windows, troubles, self._waits.standing()))

    def _tell(self) -> None:
        """Tell the dispatcher now and then how this rank fares, also while it asks for nothing."""
        while not self._is_over.wait(TELL_S):
            with suppress(MesetaError):  # who asks for windows meets it too
                self._dispatcher.lease(self._asked.leases((), (), self._waits.standing()))

    @contextmanager
    def _without_reader(self) -> Iterator[None]:
        """What is done inside is waited for, and no reader is to blame."""
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self._waits.count(NO_READER, RowWait(no_lease_s=time.monotonic() - begin_s))

    def _next_rows(self, index: int, window: ComingWindow) -> ReceivedRows:
        """Rows of window `index` that have not come yet, from whoever has them."""
        wait = _WindowWait(index, self._give_up_s)
        while True:
            came = None if window.stream is None else window.stream.next(self._waits)
            if isinstance(came, ReceivedRows):
                self._count_wait(window)
                window.had(came)
                return came
            if isinstance(came, Exception) and not isinstance(came, Unreachable):
                raise came
            wait.goes_on("no reader is there" if came is None else str(came))
            failed = None if came is None or window.stream is None else window.stream.reader
            try:
                self._find_another(index, window, came, wait)
            except Unreachable as error:
                wait.goes_on(str(error))
            if window.stream is None or window.stream.reader == failed:
                with self._without_reader():
                    self._waits.sleep(TRY_AGAIN_S)

    def _count_wait(self, window: ComingWindow) -> None:
        """Count what its stream was waited for."""
        assert window.stream is not None
        self._waits.count(window.stream.reader, window.stream.take_wait())

    def _find_another(self, index: int, window: ComingWindow, came: Exception | None, wait: _WindowWait) -> None:
        """Ask for window `index` again, where its reader has failed, is slow, or has lost it."""
        if window.stream is None:
            return self._open()
        reader = window.stream.reader
        if came is not None:
            self._count_wait(window)
            window.close()
            self._dispatcher.forget(reader)
            return self._open([ReaderTrouble(window=index, reader=reader, kind="failed", what=str(came)[:4096])])
        troubles = [ReaderTrouble(window=index, reader=reader, kind="slow")] if wait.is_long() else []
        leases = self._lease([index], troubles).leases
        if leases and leases[0].reader != reader:
            self._count_wait(window)
            window.close()
            self._open()
        return None


class _WindowWait:
    """How long rows of a window are waited for, and why."""

    def __init__(self, window: int, give_up_s: float) -> None:
        self._window, self._give_up_s = window, give_up_s
        self._since_s = self._said_s = self._asked_s = time.monotonic()

    def goes_on(self, why: str) -> None:
        """Say so now and then. Raises MesetaError where it has been too long."""
        now_s = time.monotonic()
        waited = f"window {self._window} has not come for {now_s - self._since_s:.0f} s: {why}"
        if now_s - self._since_s >= self._give_up_s:
            raise MesetaError(
                f"readers: {waited}; start `meseta readers work`, or see `meseta readers status`, and run the command "
                "again, which goes on from the last checkpoint"
            )
        if now_s - self._said_s >= SAY_S:
            print(f"readers: {waited}; waiting", file=sys.stderr, flush=True)
            self._said_s = now_s

    def is_long(self) -> bool:
        """Whether it is time to ask for another reader, once in SLOW_S."""
        is_long = time.monotonic() - self._asked_s >= SLOW_S
        if is_long:
            self._asked_s = time.monotonic()
        return is_long
