"""A reader: decodes the windows that ranks ask it for, and sends each rank its rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import flight

from meseta.data.dataset.dataset import Dataset
from meseta.data.read.cut import BatchCut
from meseta.data.read.order import EpochOrder, Window, epoch_order
from meseta.data.read.rows import Rows
from meseta.data.read.served.messages import Beat, CountRequest, RowsAsked, WindowTicket
from meseta.data.read.served.record_batches import MOST_ROWS, schema_of, to_record_batch
from meseta.data.read.served.service import Dispatcher, Unreachable, as_flight_error
from meseta.data.read.split import SplitRows
from meseta.readers.catalog import describe, open_split
from meseta.readers.listening import OwnServer
from meseta.readers.window_store import WindowStore, forget_oldest
from meseta.spec import MesetaError

BEAT_S = 1.0
"""Between signs of life."""
BUFFER_BYTES = 512 << 20
"""Of decoded windows, where nobody says more."""
MOST_SPLITS = 16
"""Splits, and choices of their rows, that are held open."""


@dataclass(frozen=True)
class OpenSplit:
    """A split whose windows can be decoded."""

    dataset: Dataset
    files: SplitRows
    schema: pa.Schema


class WindowReader:
    """Decodes windows and cuts them for ranks. Threads share it."""

    def __init__(self, dispatcher: Dispatcher, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.windows: WindowStore[tuple[Window, Rows]] = WindowStore(buffer_bytes, lambda window: num_bytes(window[1]))
        self.num_rows = 0
        """Decoded since it began."""
        self._dispatcher = dispatcher
        self._folders: dict[str, Path] = {}
        self._splits: dict[RowsAsked, OpenSplit] = {}
        self._lock = threading.Lock()
        self._count_lock = threading.Lock()

    def set_folders(self, folders: dict[str, Path]) -> None:
        """Where the datasets lie, by name."""
        self._folders = folders

    def schema(self, rows: RowsAsked) -> pa.Schema:
        """Of the record batches of `read`. Raises what `read` raises."""
        return self._open(rows).schema

    def read(self, ticket: WindowTicket) -> Iterator[pa.RecordBatch]:
        """A rank's rows of a window, those that it has had left out. Raises MesetaError for rows that there are not,
        and for a damaged file."""
        session = ticket.session
        split = self._open(session.rows)
        order = epoch_order(split.files.group_rows, session.rows.options, ticket.epoch)
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
        wanted, owners = cut.owners(ticket.begin, start, stop)
        takers = set(np.unique(owners).tolist())
        if rank not in takers:
            return
        with self.windows.window(
            (session.run, session.attempt, session.num_ranks, session.rows),
            (ticket.epoch, ticket.window),
            takers,
            rank,
            (stop - start) * _row_bytes(split.dataset),
            lambda: self._decode(split, order, ticket.window, by_row=session.rows.shuffle),
        ) as (window, rows):
            places = wanted[owners == rank][ticket.num_had :] - start
            for at in range(0, places.size, MOST_ROWS):
                taken = rows.take(_index(places[at : at + MOST_ROWS], window.rows))
                yield to_record_batch(taken, split.dataset, split.schema)

    def _decode(self, split: OpenSplit, order: EpochOrder, index: int, *, by_row: bool) -> tuple[Window, Rows]:
        window = order.window(index)
        rows = split.files.read(window.groups, by_row=by_row)
        with self._count_lock:
            self.num_rows += window.num_rows
        return window, rows

    def _open(self, rows: RowsAsked) -> OpenSplit:
        with self._lock:
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
        files = open_split(dataset, rows, dict(zip(counts.groups, counts.group_rows, strict=True)))
        if files.group_rows != list(counts.group_rows):
            raise MesetaError(f"dataset {rows.dataset!r} in {str(dataset.dir)!r} has other row groups; copy it anew")
        described = dataset.with_labels(rows.labels)
        return OpenSplit(described, files, schema_of(described, counts.wide_features))


def _index(places: NDArray[np.int64], order: NDArray[np.int64] | None) -> NDArray[np.int64] | slice:
    """Rows of a window by their places in its order."""
    if order is not None:
        return order[places]
    is_together = places[-1] - places[0] + 1 == places.size
    return slice(int(places[0]), int(places[-1]) + 1) if is_together else places


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

    def __init__(self, location: str, reader: WindowReader, dispatcher: Dispatcher) -> None:
        super().__init__(location)
        self._reader, self._dispatcher = reader, dispatcher
        self._is_over = threading.Event()
        self._is_met = threading.Event()
        threading.Thread(target=self._beat, name="meseta-beat", daemon=True).start()

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        """A WindowTicket's rows."""
        try:
            asked = WindowTicket.from_bytes(ticket.ticket, f"trainer {context.peer()}")
            return flight.GeneratorStream(self._reader.schema(asked.session.rows), self._read(asked))
        except Exception as error:
            raise as_flight_error(error) from None

    def _read(self, ticket: WindowTicket) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._reader.read(ticket)
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
                num_again=windows.num_again,
            )
            try:
                answer = self._dispatcher.beat(beat)
                self._reader.set_folders({name: Path(folder) for name, folder in answer.datasets.items()})
                self._is_met.set()
                is_told = False
            except MesetaError as error:
                if not is_told:
                    print(f"readers: {error}; trying again", flush=True)
                is_told = True
            self._is_over.wait(BEAT_S)

    def meet(self, timeout_s: float | None = None) -> bool:
        """Wait until the dispatcher knows of this reader; returns whether it does."""
        return self._is_met.wait(timeout_s)

    def end(self) -> None:
        """Serve nobody any more."""
        self._is_over.set()
        super().end()
