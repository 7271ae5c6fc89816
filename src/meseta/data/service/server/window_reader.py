"""Reader, an Arrow Flight server that decodes windows and sends each rank its rows."""

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
from meseta.data.read.options import CancellationCheck, never_cancelled
from meseta.data.read.order import EpochOrder, Window, epoch_order
from meseta.data.read.rows import Rows, WindowTimer, concatenate_rows
from meseta.data.read.slicing import BatchSlicer
from meseta.data.read.split import SplitRows
from meseta.data.service.connection import UnreachableError, to_flight_error
from meseta.data.service.dispatcher_client import DispatcherClient
from meseta.data.service.messages import CountRequest, Heartbeat, RowOrder, WindowTicket, WindowTimings
from meseta.data.service.record_batches import MAX_RECORD_BATCH_ROWS, record_batch_schema, to_record_batch
from meseta.data.service.server.catalog import describe_dataset, open_split
from meseta.data.service.server.endpoint_server import Endpoint, EndpointServer
from meseta.data.service.server.rates import BusyTime
from meseta.data.service.server.window_store import WindowStore, acquire, cancellation_check, evict_oldest
from meseta.spec import MesetaError
from meseta.system.kernel import disable_heap_caching, trim_heap

HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between two heartbeats."""
DRAIN_GRACE_S = 3.0
"""Seconds without buffered windows after which a draining reader exits. By then, all ranks know that it is draining."""
DRAIN_TIMEOUT_S = 120.0
"""Maximum seconds for draining."""
DEFAULT_BUFFER_BYTES = 512 << 20
"""Default capacity of the buffer of decoded windows."""
MIN_SLICE_ROWS = 256
"""Minimum mean number of consecutive rows for copying slices. Otherwise rows are gathered one by one."""
MAX_OPEN_SPLITS = 16
"""Maximum number of open splits. Each row selection counts."""


@dataclass(frozen=True)
class DecodedWindow:
    """Decoded rows of a window, with their order and timings."""

    window: Window
    rows: Rows
    times: WindowTimer
    decoded_s: float
    """Time at which decoding finished, by `time.monotonic`."""

    def timings(self) -> WindowTimings:
        """Return the timings of decoding, and for how long the window has been buffered."""
        times, buffered_s = self.times, time.monotonic() - self.decoded_s
        return WindowTimings(
            storage_s=times.storage_s, decode_s=times.decode_s, transform_s=times.transform_s, buffered_s=buffered_s
        )


@dataclass(frozen=True)
class OpenSplit:
    """Split whose windows can be decoded."""

    dataset: Dataset
    split_rows: SplitRows
    schema: pa.Schema


def disable_allocator_caching() -> None:
    """Return freed memory to the OS, to hold little more than the windows. Call before threads are started."""
    # Arrow's default allocator and that of the C library keep freed memory.
    disable_heap_caching()
    pa.set_memory_pool(pa.system_memory_pool())


class WindowReader:
    """Thread-safe decoder of windows that selects the rows of each rank."""

    def __init__(self, dispatcher: DispatcherClient, buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> None:
        self.windows: WindowStore[DecodedWindow] = WindowStore(buffer_bytes, lambda held: rows_num_bytes(held.rows))
        self.num_rows = 0
        """Number of decoded rows."""
        self.busy_time = BusyTime()
        """Time spent decoding."""
        self._dispatcher = dispatcher
        self._folders: dict[str, Path] = {}
        self._splits: dict[RowOrder, OpenSplit] = {}
        self._lock = threading.Lock()
        self._count_lock = threading.Lock()

    def set_folders(self, folders: dict[str, Path]) -> None:
        """Set the folder of each dataset by name."""
        self._folders = folders

    def schema(self, rows: RowOrder, check: CancellationCheck = never_cancelled) -> pa.Schema:
        """Return the schema of the record batches of `read`. Raises the errors of `read`."""
        return self._get_split(rows, check).schema

    def read(
        self, ticket: WindowTicket, check: CancellationCheck = never_cancelled
    ) -> Iterator[tuple[pa.RecordBatch, WindowTimings | None]]:
        """Yield record batches with the rows of one rank in a window, without the first `ticket.num_received` rows.

        Only the first record batch comes with timings. Raises MesetaError if the ticket is out of range or a file is
        damaged. Raises the error of `check`, unless another rank waits for the window.
        """
        session = ticket.session
        split = self._get_split(session.rows, check)
        order = epoch_order(split.split_rows.group_rows, session.rows.options, ticket.epoch, is_served=True)
        rank = session.rank
        if not (ticket.window < len(order) and rank < session.num_ranks and ticket.first_row < order.num_rows):
            raise MesetaError(
                f"invalid ticket: rank {rank} of {session.num_ranks}, window {ticket.window} of {len(order)}"
            )
        start, stop = order.bounds(ticket.window)
        cut = BatchSlicer(
            num_rows=order.num_rows,
            batch_size=ticket.batch_size,
            last_batch=ticket.last_batch,
            rank=rank,
            num_ranks=session.num_ranks,
        )
        if not cut.num_rows_between(ticket.first_row, start, stop):
            return
        with self.windows.window(
            (session.run, session.attempt, session.num_ranks, session.rows),
            (ticket.epoch, ticket.window),
            cut.ranks_between(ticket.first_row, start, stop),
            rank,
            (stop - start) * _estimate_row_bytes(split.dataset),
            lambda check: self._decode(split, order, ticket.window, check, by_row=session.rows.shuffle),
            check,
        ) as content:
            positions = cut.rows_between(ticket.first_row, start, stop)[ticket.num_received :] - start
            for first in range(0, positions.size, MAX_RECORD_BATCH_ROWS):
                # No local variable refers to the window during the yield. A slow trainer would otherwise keep it in
                # memory after its eviction.
                rows, timings = (
                    _copy_rows(content(), positions[first : first + MAX_RECORD_BATCH_ROWS]),
                    None if first else content().timings(),
                )
                yield to_record_batch(rows, split.dataset, split.schema), timings

    def _decode(
        self, split: OpenSplit, order: EpochOrder, index: int, check: CancellationCheck, *, by_row: bool
    ) -> DecodedWindow:
        window, times = order.window(index), WindowTimer()
        with self.busy_time.track():
            rows = split.split_rows.read(window.groups, by_row=by_row, times=times, check_cancelled=check)
        with self._count_lock:
            self.num_rows += window.num_rows
        return DecodedWindow(window, rows, times, time.monotonic())

    def _get_split(self, rows: RowOrder, check: CancellationCheck) -> OpenSplit:
        with acquire(self._lock, check):
            if rows not in self._splits:
                evict_oldest(self._splits, MAX_OPEN_SPLITS - 1)
                self._splits[rows] = self._open_split(rows)
            return self._splits[rows]

    def _open_split(self, rows: RowOrder) -> OpenSplit:
        if rows.dataset not in self._folders:
            # The reply to the first heartbeat has the folders. Trainers retry after an UnreachableError.
            raise UnreachableError(f"this reader has not received the folder of dataset {rows.dataset!r} yet")
        dataset = Dataset.load(self._folders[rows.dataset])
        if describe_dataset(rows.dataset, dataset).digest != rows.digest:
            raise MesetaError(
                f"dataset {rows.dataset!r} in {str(dataset.dir)!r} differs from that of the dispatcher; copy it again"
            )
        counts = self._dispatcher.count(CountRequest(rows=rows))
        files = open_split(dataset, rows, group_row_counts=dict(zip(counts.groups, counts.group_rows, strict=True)))
        if files.group_rows != list(counts.group_rows):
            raise MesetaError(
                f"dataset {rows.dataset!r} in {str(dataset.dir)!r} has other row groups than that of the dispatcher; "
                "copy it again"
            )
        labeled_dataset = dataset.select(rows.labels, rows.without, allow_missing=True)
        return OpenSplit(labeled_dataset, files, record_batch_schema(labeled_dataset, counts.int64_features))


def _copy_rows(decoded: DecodedWindow, positions: NDArray[np.int64]) -> Rows:
    """Copy the rows at `positions` in the order of the window. Consecutive rows are copied as slices."""
    rows, order = decoded.rows, decoded.window.rows
    if order is not None:
        return rows.take(order[positions])
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    if breaks.size * MIN_SLICE_ROWS > positions.size:
        return rows.take(positions)
    runs = [rows.take(slice(int(run[0]), int(run[-1]) + 1)) for run in np.split(positions, breaks)]
    return concatenate_rows(runs) if breaks.size else runs[0].copy()


def _estimate_row_bytes(dataset: Dataset) -> int:
    """Return the expected size of a decoded row in bytes."""
    plain = 4 * (len(dataset.labels) + len(dataset.dense)) + 16
    return plain + sum(
        8 + round((12 if f.weighted else 8) * f.statistics.mean_pooling_factor) if f.multi_valued else 8
        for f in dataset.sparse
    )


def rows_num_bytes(rows: Rows) -> int:
    """Return the size of decoded rows in bytes."""
    plain = [rows.label, rows.dense, rows.single_ids, rows.weight, rows.group]
    lists = [array for bags in rows.bags for array in (bags.lengths, bags.values, bags.weights)]
    return sum(array.nbytes for array in [*plain, *lists] if array is not None)


class ReadServer(EndpointServer):
    """Flight server for a `WindowReader`, which sends heartbeats to the dispatcher."""

    def __init__(self, endpoint: Endpoint, reader: WindowReader, dispatcher: DispatcherClient) -> None:
        super().__init__(endpoint)
        self._reader, self._dispatcher = reader, dispatcher
        self._should_stop = threading.Event()
        self._has_reply = threading.Event()
        self._refusal: MesetaError | None = None
        self._is_draining = False
        threading.Thread(target=self._send_heartbeats, name="meseta-heartbeat", daemon=True).start()

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        """Stream the rows of a serialized `WindowTicket`."""
        try:
            window_ticket = WindowTicket.from_bytes(ticket.ticket, f"trainer {context.peer()}")
            check = cancellation_check(context)
            return flight.GeneratorStream(
                self._reader.schema(window_ticket.session.rows, check), self._stream(window_ticket, check)
            )
        except Exception as error:
            raise to_flight_error(error) from None

    def _stream(
        self, ticket: WindowTicket, check: CancellationCheck
    ) -> Iterator[pa.RecordBatch | tuple[pa.RecordBatch, bytes]]:
        try:
            for batch, timings in self._reader.read(ticket, check):
                yield batch if timings is None else (batch, timings.to_bytes())
        except Exception as error:
            raise to_flight_error(error) from None

    def _send_heartbeats(self) -> None:
        is_reported = False
        while not self._should_stop.is_set():
            windows = self._reader.windows
            heartbeat = Heartbeat(
                reader=self.url,
                buffered_bytes=windows.buffered_bytes,
                max_buffer_bytes=windows.max_bytes,
                num_rows=self._reader.num_rows,
                num_windows=windows.num_decoded,
                num_redecoded=dict(windows.num_redecoded),
                busy_s=self._reader.busy_time.seconds,
                is_draining=self._is_draining,
            )
            try:
                reply = self._dispatcher.send_heartbeat(heartbeat)
                self._reader.set_folders({name: Path(folder) for name, folder in reply.datasets.items()})
                self._refusal, is_reported = None, False
                self._has_reply.set()
            except MesetaError as error:
                is_refused = not isinstance(error, UnreachableError)
                if is_refused:
                    self._refusal = error
                    self._has_reply.set()
                # A failure is reported once, not with each heartbeat.
                if not is_reported:
                    print(f"readers: {error}{'' if is_refused else '; trying again'}", flush=True)
                is_reported = True
            self._should_stop.wait(HEARTBEAT_INTERVAL_S)
            trim_heap()

    def wait_for_dispatcher(self, timeout_s: float | None = None) -> bool:
        """Return whether the dispatcher replies before the timeout. Raises MesetaError if it refuses this reader."""
        has_reply = self._has_reply.wait(timeout_s)
        if self._refusal is not None:
            raise self._refusal
        return has_reply

    def drain(self) -> None:
        """Accept no more windows, and wait at most `DRAIN_TIMEOUT_S` seconds until the requested ones were sent. Other
        readers decode the rest."""
        self._is_draining = True
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        idle_since_s = time.monotonic()
        while time.monotonic() < min(deadline_s, idle_since_s + DRAIN_GRACE_S):
            if self._reader.windows.num_buffered:
                idle_since_s = time.monotonic()
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop heartbeats and serving."""
        self._should_stop.set()
        super().stop()
