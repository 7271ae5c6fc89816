"""Files of rows: a table's rows with their optimizer state on a disk, read and written by row outside the interpreter's
lock. docs/tiers.md says how they lie there."""

from __future__ import annotations

import errno
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.errors import MesetaError
from meseta.ops.core import core
from meseta.ops.row_file.engine import DiskEngine, EngineInfo, probe_engine
from meseta.ops.row_file.scratch_file import ScratchFile
from meseta.spec.tiers import ROW_FILE_PART_BYTES, rows_per_part

__all__ = [
    "DiskEngine",
    "EngineInfo",
    "PendingRowRead",
    "RowFile",
    "RowFileCounters",
    "RowFileSnapshot",
    "probe_engine",
]

MIN_SEGMENT_BYTES = 256 << 10
"""What is written at once, at least."""
MAX_ROWS = 1 << 31
"""Of a file: an index entry has 4 bytes."""
MAX_RECORD_BYTES = (256 << 10) - 2 * 4096
_COUNTER_NAMES = (
    "num_reads", "read_bytes", "num_rows_read", "num_rows_from_memory", "num_rows_unwritten", "num_writes",
    "written_bytes",
    "num_rows_written", "num_rows_cleaned", "cleaned_bytes", "wait_ns",
)  # fmt: skip
_NONE, _SYSTEM, _SHORT, _CHECKSUM, _CLOSED = range(5)


@dataclass(frozen=True)
class RowFileCounters:
    """What a file has done so far."""

    num_reads: int
    """Requests to the disk; rows that lie together share one."""
    read_bytes: int
    num_rows_read: int
    """Rows that came from the disk."""
    num_rows_from_memory: int
    """Rows that were read while they were on their way out."""
    num_rows_unwritten: int
    """Rows that were asked for and had never been written."""
    num_writes: int
    """Requests, those of cleaning among them."""
    written_bytes: int
    num_rows_written: int
    """Rows that were pushed out."""
    num_rows_cleaned: int
    """Rows that were moved to make room."""
    cleaned_bytes: int
    """Read for it."""
    wait_s: float
    """Seconds that reads were waited for."""


class PendingRowRead:
    """A read on its way."""

    def __init__(self, file: RowFile, handle: object, present: Tensor) -> None:
        self._file, self._handle, self._is_written = file, handle, present

    @property
    def is_done(self) -> bool:
        """Whether `wait` takes no time."""
        return bool(core().rows_are_read(self._handle))

    def wait(self) -> Tensor:
        """Wait until the rows are there: bool [n], which of them were ever written; records of others are not touched.

        Raises MesetaError where the disk failed; records are then not to be used.
        """
        self._file.raise_for_failure(core().wait_rows(self._handle))
        return self._is_written


class RowFile:
    """Rows 0..num_rows-1, a record of `record_bytes` bytes each, in a scratch file. A row that was never written takes
    no room.

    Each record lies beside its row's number and a CRC-32C of both, which are checked at every read. Rows are written
    as in a log-structured file system (Rosenblum and Ousterhout, 1992), whole segments at a time, each of one part of
    the rows.
    """

    def __init__(
        self,
        engine: DiskEngine,
        name: str,
        *,
        num_rows: int,
        record_bytes: int,
        owner: str | None = None,
        segment_bytes: int = MIN_SEGMENT_BYTES,
        part_bytes: int = ROW_FILE_PART_BYTES,
    ) -> None:
        """A new file. Messages name `owner`, such as "table 'user', rows 0..99". Raises MesetaError."""
        self.owner = owner or f"table {name!r}"
        if not 0 <= num_rows <= MAX_ROWS:
            raise MesetaError(f"{self.owner}: a file has up to {MAX_ROWS:,} rows, not {num_rows:,}; cut it into shards")
        if not 1 <= record_bytes <= MAX_RECORD_BYTES:
            raise MesetaError(
                f"{self.owner}: a row and its state have 1 to {MAX_RECORD_BYTES:,} bytes in a file, not "
                f"{record_bytes:,}; cut its columns into shards"
            )
        self.num_rows, self.record_bytes, self.engine = num_rows, record_bytes, engine
        self.part_rows = rows_per_part(record_bytes, part_bytes)
        """Rows that lie together, from each multiple of it on, wherever they lie among each other."""
        facts = engine.info
        self._scratch = ScratchFile(engine.folder, name, self.owner, os.O_DIRECT if facts.is_direct else 0)
        sizes = [record_bytes, facts.block_bytes, segment_bytes, self.part_rows]
        self._log = core().open_row_log(engine.handle, self._scratch.descriptor, num_rows, sizes, secrets.randbits(32))
        # Before the descriptor is closed, which another file may get, however the object ends.
        self._finalizer = weakref.finalize(self, _close_log, self._log, self._scratch, os.getpid())

    @property
    def path(self) -> str:
        """Of the scratch file."""
        return str(self._scratch.path)

    def read(self, rows: Tensor, out: Tensor) -> PendingRowRead:
        """Begin to read rows, int64 [n], into `out`, uint8 [n, record_bytes]; both on the CPU, and left alone until the
        read is waited for.

        It sees what was written before it began. Raises MesetaError for rows that the file has not.
        """
        present = torch.empty(len(rows), dtype=torch.bool)
        handle = self._call("read_rows", rows.numpy(), out.numpy(), present.numpy())
        return PendingRowRead(self, handle, present)

    def write(self, rows: Tensor, *values: Tensor | NDArray[np.uint8]) -> None:
        """Put rows, int64 [n], with their values, uint8 [n, bytes] each, which are copied and side by side are their
        records; of a row that comes twice the last counts. Waits while too much is on its way to the disk.

        Raises MesetaError where the disk fails or is full. Rows that were taken before are not lost then: they are read
        from memory, and the next write or flush sends them again.
        """
        *failure, _ = self._call("write_rows", rows.numpy(), [np.asarray(value) for value in values])
        self.raise_for_failure(failure)

    def flush(self) -> None:
        """Send everything to the disk, and wait for it. Raises MesetaError as `write`."""
        self.raise_for_failure(self._call("flush_rows"))

    def snapshot(self) -> RowFileSnapshot:
        """The rows as they are now, whatever is written later."""
        return RowFileSnapshot(self, self._call("snapshot_rows"))

    @property
    def num_written_rows(self) -> int:
        """Rows that were ever written."""
        return int(self._raw_counters()[2])

    @property
    def file_bytes(self) -> int:
        """What the file takes on the disk: 1.5 times the records of its rows at most, apart from six segments; more
        while rows are frozen."""
        return int(self._raw_counters()[1])

    def num_bytes(self) -> int:
        """Memory of the index, the marks of segments, and the buffers that are in use now."""
        return int(self._raw_counters()[0])

    @property
    def counters(self) -> RowFileCounters:
        """What it has done so far."""
        counts = dict(zip(_COUNTER_NAMES, self._raw_counters()[3:], strict=True))
        return RowFileCounters(wait_s=counts.pop("wait_ns") / 1e9, **counts)

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Read from the disk, and written to it, so far."""
        counters = self.counters
        return counters.read_bytes + counters.cleaned_bytes, counters.written_bytes

    def close(self) -> None:
        """Wait for what is in flight, and remove the file; a second call does nothing."""
        self._finalizer()

    def raise_for_failure(self, failure: Sequence[int]) -> None:
        """Raise MesetaError for a failure of the core."""
        if failure[0] != _NONE:
            raise self.explain(failure)

    def explain(self, failure: Sequence[int]) -> MesetaError:
        """What to say of a failure of the core: kind, error of the system, row, byte of the file, whether it was
        written."""
        kind, code, row, place, is_writing = failure
        at = f"{self.owner}: file {self.path!r}" + (f", byte {place:,}" if place >= 0 else "")
        return MesetaError(f"{at}: {_describe_failure(kind, code, row, bool(is_writing))}")

    @property
    def handle(self) -> object:
        """What meseta.ops.row_cache takes."""
        return core().file_backing_store(self._log)

    def _raw_counters(self) -> list[int]:
        return core().row_log_numbers(self._log)

    def _call(self, function: str, *arguments: object) -> Any:
        if not self._finalizer.alive:
            raise MesetaError(f"{self.owner}: its file {self.path!r} is closed")
        try:
            return getattr(core(), function)(self._log, *arguments)
        except ValueError as error:
            raise MesetaError(f"{self.owner}: {error}") from None


def _close_log(log: object, scratch: ScratchFile, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        core().close_row_log(log)
        scratch.close()


def _describe_failure(kind: int, code: int, row: int, is_writing: bool) -> str:
    again = "go on from the last checkpoint, with storage.dir on a disk that works"
    if kind == _CHECKSUM:
        return f"the checksum of row {row} is wrong: the disk, or another program, has changed it; {again}"
    if kind == _SHORT:
        return f"it ends early: another program has cut it, or the disk has failed; {again}"
    if kind == _CLOSED:
        return "it is closed, and its rows are gone; read and write them before"
    done = "written" if is_writing else "read"
    if code in (errno.ENOSPC, errno.EDQUOT):
        return f"it cannot be written: {os.strerror(code)}; make room on the disk, or set storage.dir to another one"
    return f"it cannot be {done}: {os.strerror(code)}; {again}"


class RowFileSnapshot:
    """The rows of a file as they were, for a save beside training. What it needs of the file stays until it is closed,
    so the file may grow meanwhile by what is written."""

    def __init__(self, file: RowFile, handle: object) -> None:
        self._file, self._handle = file, handle
        self.num_rows, self.record_bytes, self.part_rows = file.num_rows, file.record_bytes, file.part_rows

    def read(self, rows: int | Tensor, *values: Tensor) -> PendingRowRead:
        """Begin to read rows as `RowFile.read` does, into `values`, uint8 [n, bytes] each, which side by side are their
        records; reads of rows as they are go before.

        `rows` is the first of n consecutive rows, or lists them, int64 [n] ascending. Rows that are stored near each
        other are read with what is between them, at the disk's sequential rate; others one by one. Raises MesetaError
        for rows that the file has not.
        """
        present = torch.empty(len(values[0]), dtype=torch.bool)
        first, listed = (rows, None) if isinstance(rows, int) else (0, rows.numpy())
        try:
            outs = [value.numpy() for value in values]
            handle = core().read_snapshot_rows(self._handle, first, listed, outs, present.numpy())
        except ValueError as error:
            raise MesetaError(f"{self._file.owner}: {error}") from None
        return PendingRowRead(self._file, handle, present)

    def close(self) -> None:
        """Let the file use its room again; a second call does nothing. Reads that are on their way end first."""
        self._handle = None
