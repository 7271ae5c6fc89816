"""A reader: decodes the windows that ranks ask it for, and sends each rank its rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import flight

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.cut import BatchCut
from meseta.data.read.options import Check, unchecked
from meseta.data.read.order import EpochOrder, Window, epoch_order
from meseta.data.read.rows import Rows, concatenate
from meseta.data.read.served.connection import Unreachable, as_flight_error
from meseta.data.read.served.messages import Beat, CountRequest, RowsAsked, WindowMade, WindowTicket
from meseta.data.read.served.record_batches import MOST_ROWS, schema_of, to_record_batch
from meseta.data.read.served.service import Dispatcher
from meseta.data.read.split import SplitRows
from meseta.data.read.window_times import WindowTimes
from meseta.machine.system import give_back_freed_memory, give_back_large_blocks
from meseta.readers.cancelling import check_of, locked
from meseta.readers.catalog import describe, open_split
from meseta.readers.listening import Endpoint, OwnServer
from meseta.readers.rates import BusyTime
from meseta.readers.window_store import WindowStore, forget_oldest
from meseta.spec import MesetaError

BEAT_S = 1.0
"""Between signs of life."""
QUIET_S = 3.0
"""A reader that leaves has nothing left to give when it has held no window for so long, in which all have come to know
that it leaves."""
LEAVE_S = 120.0
"""It leaves after that in any case."""
BUFFER_BYTES = 512 << 20
"""Of decoded windows, where nobody says more."""
LEAST_RUN = 256
"""Rows, on average, that are copied as slices; shorter ones are gathered row by row."""
MOST_SPLITS = 16
"""Splits, and choices of their rows, that are held open."""


@dataclass(frozen=True)
class DecodedWindow:
    """A window as it is held for the ranks."""

    window: Window
    rows: Rows
    times: WindowTimes
    ready_at_s: float
    """On the clock of time.monotonic()."""

    def made(self) -> WindowMade:
        """What ranks are told of it now."""
        times, ready_s = self.times, time.monotonic() - self.ready_at_s
        return WindowMade(
            storage_s=times.storage_s, decode_s=times.decode_s, transform_s=times.transform_s, ready_s=ready_s
        )


@dataclass(frozen=True)
class OpenSplit:
    """A split whose windows can be decoded."""

    dataset: Dataset
    files: SplitRows
    schema: pa.Schema


def give_back_memory() -> None:
    """Let this process hold windows and little else: Arrow's own allocator, and the C library's, keep what they are
    given back. To be called before threads are made."""
    give_back_large_blocks()
    pa.set_memory_pool(pa.system_memory_pool())


class WindowReader:
    """Decodes windows and cuts them for ranks. Threads share it."""

    def __init__(self, dispatcher: Dispatcher, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.windows: WindowStore[DecodedWindow] = WindowStore(buffer_bytes, lambda held: num_bytes(held.rows))
        self.num_rows = 0
        """Decoded since it began."""
        self.busy = BusyTime()
        """While it decodes."""
        self._dispatcher = dispatcher
        self._folders: dict[str, Path] = {}
        self._splits: dict[RowsAsked, OpenSplit] = {}
        self._lock = threading.Lock()
        self._count_lock = threading.Lock()

    def set_folders(self, folders: dict[str, Path]) -> None:
        """Where the datasets lie, by name."""
        self._folders = folders

    def schema(self, rows: RowsAsked, check: Check = unchecked) -> pa.Schema:
        """Of the record batches of `read`. Raises what `read` raises."""
        return self._open(rows, check).schema

    def read(
        self, ticket: WindowTicket, check: Check = unchecked
    ) -> Iterator[tuple[pa.RecordBatch, WindowMade | None]]:
        """A rank's rows of a window, those that it has had left out; the first of them with how they came about. Raises
        MesetaError for rows that there are not, and for a damaged file, and what `check` raises, unless another rank
        waits for the window."""
        session = ticket.session
        split = self._open(session.rows, check)
        order = epoch_order(split.files.group_rows, session.rows.options, ticket.epoch, is_served=True)
        rank = session.rank
        if not (ticket.window < len(order) and rank < session.num_ranks and ticket.begin < order.num_rows):
            raise MesetaError(f"rank {rank} of {session.num_ranks} asks for window {ticket.window} of {len(order)}")
        start, stop = order.bounds(ticket.window)
        cut = BatchCut(
            num_rows=order.num_rows,
            batch_size=ticket.batch_size,
            last_batch=ticket.last_batch,
            rank=rank,
            num_ranks=session.num_ranks,
        )
        if not cut.num_rows_between(ticket.begin, start, stop):
            return
        with self.windows.window(
            (session.run, session.attempt, session.num_ranks, session.rows),
            (ticket.epoch, ticket.window),
            cut.ranks_between(ticket.begin, start, stop),
            rank,
            (stop - start) * _row_bytes(split.dataset),
            lambda check: self._decode(split, order, ticket.window, check, by_row=session.rows.shuffle),
            check,
        ) as content:
            places = cut.rows_between(ticket.begin, start, stop)[ticket.num_had :] - start
            for at in range(0, places.size, MOST_ROWS):
                # No name here holds the window while a trainer takes its time.
                taken, made = _taken(content(), places[at : at + MOST_ROWS]), None if at else content().made()
                yield to_record_batch(taken, split.dataset, split.schema), made

    def _decode(self, split: OpenSplit, order: EpochOrder, index: int, check: Check, *, by_row: bool) -> DecodedWindow:
        window, times = order.window(index), WindowTimes()
        with self.busy.at_work():
            rows = split.files.read(window.groups, by_row=by_row, times=times, check=check)
        with self._count_lock:
            self.num_rows += window.num_rows
        return DecodedWindow(window, rows, times, time.monotonic())

    def _open(self, rows: RowsAsked, check: Check) -> OpenSplit:
        with locked(self._lock, check):
            if rows not in self._splits:
                forget_oldest(self._splits, MOST_SPLITS - 1)
                self._splits[rows] = self._opened(rows)
            return self._splits[rows]

    def _opened(self, rows: RowsAsked) -> OpenSplit:
        if rows.dataset not in self._folders:
            raise Unreachable(f"this reader does not know dataset {rows.dataset!r} yet")
        dataset = Dataset.load(self._folders[rows.dataset])
        if describe(rows.dataset, dataset).digest != rows.digest:
            raise MesetaError(
                f"dataset {rows.dataset!r} in {str(dataset.dir)!r} is another than the dispatcher's; copy it anew"
            )
        counts = self._dispatcher.count(CountRequest(rows=rows))
        files = open_split(dataset, rows, counted=dict(zip(counts.groups, counts.group_rows, strict=True)))
        if files.group_rows != list(counts.group_rows):
            raise MesetaError(f"dataset {rows.dataset!r} in {str(dataset.dir)!r} has other row groups; copy it anew")
        described = dataset.with_labels(rows.labels)
        return OpenSplit(described, files, schema_of(described, counts.wide_features))


def _taken(decoded: DecodedWindow, places: NDArray[np.int64]) -> Rows:
    """Rows of a window by their places in its order, in memory of their own; those that lie side by side in one
    piece."""
    rows, order = decoded.rows, decoded.window.rows
    if order is not None:
        return rows.take(order[places])
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    if breaks.size * LEAST_RUN > places.size:
        return rows.take(places)
    runs = [rows.take(slice(int(run[0]), int(run[-1]) + 1)) for run in np.split(places, breaks)]
    return concatenate(runs) if breaks.size else runs[0].copy()


def _row_bytes(dataset: Dataset) -> int:
    """About what a decoded row takes."""
    plain = 4 * (len(dataset.labels) + len(dataset.dense)) + 16
    return plain + sum(
        8 + round((12 if f.weighted else 8) * f.statistics.mean_pooling_factor) if f.multi_valued else 8
        for f in dataset.sparse
    )


def num_bytes(rows: Rows) -> int:
    """Of decoded rows."""
    plain = [rows.label, rows.dense, rows.single, rows.weight, rows.group]
    lists = [array for bags in rows.bags for array in (bags.lengths, bags.values, bags.weights)]
    return sum(array.nbytes for array in [*plain, *lists] if array is not None)


class ReadServer(OwnServer):
    """Serves a WindowReader over Arrow Flight, and tells the dispatcher that it is there."""

    def __init__(self, endpoint: Endpoint, reader: WindowReader, dispatcher: Dispatcher) -> None:
        super().__init__(endpoint)
        self._reader, self._dispatcher = reader, dispatcher
        self._is_over = threading.Event()
        self._is_answered = threading.Event()
        self._refusal: MesetaError | None = None
        self._is_leaving = False
        threading.Thread(target=self._beat, name="meseta-beat", daemon=True).start()

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        """A WindowTicket's rows."""
        try:
            asked = WindowTicket.from_bytes(ticket.ticket, f"trainer {context.peer()}")
            check = check_of(context)
            return flight.GeneratorStream(self._reader.schema(asked.session.rows, check), self._read(asked, check))
        except Exception as error:
            raise as_flight_error(error) from None

    def _read(self, ticket: WindowTicket, check: Check) -> Iterator[pa.RecordBatch | tuple[pa.RecordBatch, bytes]]:
        try:
            for batch, made in self._reader.read(ticket, check):
                yield batch if made is None else (batch, made.to_bytes())
        except Exception as error:
            raise as_flight_error(error) from None

    def _beat(self) -> None:
        is_told = False
        while not self._is_over.is_set():
            windows = self._reader.windows
            beat = Beat(
                reader=self.url,
                held_bytes=windows.held_bytes,
                buffer_bytes=windows.most_bytes,
                num_rows=self._reader.num_rows,
                num_windows=windows.num_decoded,
                num_again=dict(windows.num_again),
                busy_s=self._reader.busy.seconds,
                is_leaving=self._is_leaving,
            )
            try:
                answer = self._dispatcher.beat(beat)
                self._reader.set_folders({name: Path(folder) for name, folder in answer.datasets.items()})
                self._refusal, is_told = None, False
                self._is_answered.set()
            except MesetaError as error:
                is_refused = not isinstance(error, Unreachable)
                if is_refused:
                    self._refusal = error
                    self._is_answered.set()
                if not is_told:
                    print(f"readers: {error}{'' if is_refused else '; trying again'}", flush=True)
                is_told = True
            self._is_over.wait(BEAT_S)
            give_back_freed_memory()

    def meet(self, timeout_s: float | None = None) -> bool:
        """Wait until the dispatcher has answered this reader; returns whether it has. Raises MesetaError where it has
        refused to."""
        is_answered = self._is_answered.wait(timeout_s)
        if self._refusal is not None:
            raise self._refusal
        return is_answered

    def leave(self) -> None:
        """Take on no more windows, and come back when those that were asked for have been given, or after LEAVE_S; what
        is not given then, another reader makes."""
        self._is_leaving = True
        until_s = time.monotonic() + LEAVE_S
        quiet_since_s = time.monotonic()
        while time.monotonic() < min(until_s, quiet_since_s + QUIET_S):
            if self._reader.windows.num_held:
                quiet_since_s = time.monotonic()
            time.sleep(0.1)

    def end(self) -> None:
        """Serve nobody any more."""
        self._is_over.set()
        super().end()
