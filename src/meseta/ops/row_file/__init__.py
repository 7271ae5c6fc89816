"""Files of table rows on a local disk, read and written outside the global interpreter lock."""
# docs/tiers.md describes the layout of the files.

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
"""Minimum number of bytes per write request."""
# An index entry has 4 bytes.
MAX_ROWS = 1 << 31
"""Maximum number of rows per file."""
MAX_RECORD_BYTES = (256 << 10) - 2 * 4096
_COUNTER_NAMES = (
    "num_reads", "read_bytes", "num_rows_read", "num_rows_from_memory", "num_rows_unwritten", "num_writes",
    "written_bytes",
    "num_rows_written", "num_rows_cleaned", "cleaned_bytes", "wait_ns",
)  # fmt: skip
_NONE, _SYSTEM, _SHORT, _CHECKSUM, _CLOSED = range(5)


@dataclass(frozen=True)
class RowFileCounters:
    """Counters of a row file since it was opened."""

    num_reads: int
    """Number of read requests. Rows that are stored next to each other share one."""
    read_bytes: int
    num_rows_read: int
    """Number of rows read from the disk."""
    num_rows_from_memory: int
    """Number of rows read from buffers whose write was pending."""
    num_rows_unwritten: int
    """Number of requested rows that were unwritten."""
    num_writes: int
    """Number of write requests, including those of cleaning."""
    written_bytes: int
    num_rows_written: int
    """Number of rows written by callers."""
    num_rows_cleaned: int
    """Number of rows that cleaning moved to other segments."""
    cleaned_bytes: int
    """Number of bytes that cleaning read."""
    wait_s: float
    """Seconds for which callers waited for reads."""


class PendingRowRead:
    """Read of rows in progress."""

    def __init__(self, file: RowFile, handle: object, present: Tensor) -> None:
        self._file, self._handle, self._is_written = file, handle, present

    @property
    def is_done(self) -> bool:
        """Whether the read is complete, so that `wait` does not block."""
        return bool(core().rows_are_read(self._handle))

    def wait(self) -> Tensor:
        """Wait until the read is complete. Returns a bool [n] that is false for unwritten rows.

        Records of unwritten rows are not changed. Raises MesetaError if the disk failed. The records must then not be
        used.
        """
        self._file.raise_for_failure(core().wait_rows(self._handle))
        return self._is_written


class RowFile:
    """Rows 0..num_rows-1 in a scratch file, with `record_bytes` bytes each. An unwritten row takes no space."""

    # Each record is stored with its row number and a CRC-32C of both, which every read verifies. The file is
    # log-structured (Rosenblum and Ousterhout, 1992): rows are written in whole segments, each for one part of the
    # rows.

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
        """Create a file. Messages name `owner`, such as "table 'user', rows 0..99".

        Raises MesetaError if the number of rows or the record size is out of range, or the file cannot be created.
        """
        self.owner = owner or f"table {name!r}"
        if not 0 <= num_rows <= MAX_ROWS:
            raise MesetaError(
                f"{self.owner}: a row file has at most {MAX_ROWS:,} rows, not {num_rows:,}; split them into shards"
            )
        if not 1 <= record_bytes <= MAX_RECORD_BYTES:
            raise MesetaError(
                f"{self.owner}: a row with its state must have 1 to {MAX_RECORD_BYTES:,} bytes in a row file, not "
                f"{record_bytes:,}; split its columns into shards"
            )
        self.num_rows, self.record_bytes, self.engine = num_rows, record_bytes, engine
        self.part_rows = rows_per_part(record_bytes, part_bytes)
        """Number of consecutive rows whose records are stored together. Parts start at multiples of it."""
        facts = engine.info
        self._scratch = ScratchFile(engine.folder, name, self.owner, os.O_DIRECT if facts.is_direct else 0)
        sizes = [record_bytes, facts.block_bytes, segment_bytes, self.part_rows]
        self._log = core().open_row_log(engine.handle, self._scratch.descriptor, num_rows, sizes, secrets.randbits(32))
        # The log must be closed before the descriptor, whose number another file may get. A finalizer keeps this order
        # however the object ends.
        self._finalizer = weakref.finalize(self, _close_log, self._log, self._scratch, os.getpid())

    @property
    def path(self) -> str:
        """Path of the scratch file."""
        return str(self._scratch.path)

    def read(self, rows: Tensor, out: Tensor) -> PendingRowRead:
        """Start to read rows, int64 [n], into `out`, uint8 [n, record_bytes].

        Both tensors must be on the CPU and must not be changed before the read is complete. The read returns all rows
        written before this call. Raises MesetaError if a row does not exist.
        """
        present = torch.empty(len(rows), dtype=torch.bool)
        handle = self._call("read_rows", rows.numpy(), out.numpy(), present.numpy())
        return PendingRowRead(self, handle, present)

    def write(self, rows: Tensor, *values: Tensor | NDArray[np.uint8]) -> None:
        """Write rows, int64 [n]. Their records are the concatenated `values`, uint8 [n, bytes] each, which are copied.

        If a row occurs twice, its last record is used. Blocks while too many bytes are pending. Raises MesetaError if
        the disk fails or is full. Pending rows are not lost then: reads return them from memory, and the next write or
        flush writes them again.
        """
        *failure, _ = self._call("write_rows", rows.numpy(), [np.asarray(value) for value in values])
        self.raise_for_failure(failure)

    def flush(self) -> None:
        """Write all pending rows and wait for the disk. Raises MesetaError if the disk fails or is full."""
        self.raise_for_failure(self._call("flush_rows"))

    def snapshot(self) -> RowFileSnapshot:
        """Return a snapshot of the rows. Later writes do not change it."""
        return RowFileSnapshot(self, self._call("snapshot_rows"))

    @property
    def num_written_rows(self) -> int:
        """Number of rows that were written at least once."""
        return int(self._raw_counters()[2])

    @property
    def file_bytes(self) -> int:
        """Size of the file. At most 1.5 times the written records plus six segments, and more with snapshots."""
        return int(self._raw_counters()[1])

    def num_bytes(self) -> int:
        """Return the memory of the index, the segment marks and the buffers in use."""
        return int(self._raw_counters()[0])

    @property
    def counters(self) -> RowFileCounters:
        """Counters since the file was opened."""
        counts = dict(zip(_COUNTER_NAMES, self._raw_counters()[3:], strict=True))
        return RowFileCounters(wait_s=counts.pop("wait_ns") / 1e9, **counts)

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Total bytes (read from, written to) the disk."""
        counters = self.counters
        return counters.read_bytes + counters.cleaned_bytes, counters.written_bytes

    def close(self) -> None:
        """Wait for pending requests and remove the file. A second call does nothing."""
        self._finalizer()

    def raise_for_failure(self, failure: Sequence[int]) -> None:
        """Raise MesetaError if the core reports a failure."""
        if failure[0] != _NONE:
            raise self.explain(failure)

    def explain(self, failure: Sequence[int]) -> MesetaError:
        """Return the error for a `failure` (kind, errno, row, byte offset in the file, whether it was writing)."""
        kind, code, row, place, is_writing = failure
        at = f"{self.owner}: file {self.path!r}" + (f", byte {place:,}" if place >= 0 else "")
        return MesetaError(f"{at}: {_describe_failure(kind, code, row, bool(is_writing))}")

    @property
    def handle(self) -> object:
        """Native handle for `meseta.ops.row_cache`."""
        return core().file_backing_store(self._log)

    def _raw_counters(self) -> list[int]:
        return core().row_log_numbers(self._log)

    def _call(self, function: str, *arguments: object) -> Any:
        if not self._finalizer.alive:
            raise MesetaError(f"{self.owner}: row file {self.path!r} is closed")
        try:
            return getattr(core(), function)(self._log, *arguments)
        except ValueError as error:
            raise MesetaError(f"{self.owner}: {error}") from None


def _close_log(log: object, scratch: ScratchFile, process: int) -> None:
    if os.getpid() == process:  # A forked child must not remove the file of its parent.
        core().close_row_log(log)
        scratch.close()


def _describe_failure(kind: int, code: int, row: int, is_writing: bool) -> str:
    again = "resume from the last checkpoint, with storage.dir on a working disk"
    if kind == _CHECKSUM:
        return f"the checksum of row {row} is wrong, because the disk or another program changed the file; {again}"
    if kind == _SHORT:
        return f"the file ends early, because another program truncated it or the disk failed; {again}"
    if kind == _CLOSED:
        return "the file is closed and its rows are gone; read and write rows before closing it"
    done = "written" if is_writing else "read"
    if code in (errno.ENOSPC, errno.EDQUOT):
        return f"the file cannot be written: {os.strerror(code)}; free space, or set storage.dir to another disk"
    return f"the file cannot be {done}: {os.strerror(code)}; {again}"


class RowFileSnapshot:
    """Rows of a file at one moment, for a checkpoint that is written while training continues.

    Segments that it needs are kept until it is closed, so that the file may grow by later writes.
    """

    def __init__(self, file: RowFile, handle: object) -> None:
        self._file, self._handle = file, handle
        self.num_rows, self.record_bytes, self.part_rows = file.num_rows, file.record_bytes, file.part_rows

    def read(self, rows: int | Tensor, *values: Tensor) -> PendingRowRead:
        """Start to read rows into `values`, uint8 [n, bytes] each, whose columns together are the records.

        `rows` is either the first of n consecutive rows or a sorted int64 [n]. Reads of `RowFile` have priority. Raises
        MesetaError if a row does not exist.
        """
        # Rows that are stored close to each other are read together with the bytes between them, at the sequential rate
        # of the disk. Other rows are read one by one.
        present = torch.empty(len(values[0]), dtype=torch.bool)
        first, listed = (rows, None) if isinstance(rows, int) else (0, rows.numpy())
        try:
            outs = [value.numpy() for value in values]
            handle = core().read_snapshot_rows(self._handle, first, listed, outs, present.numpy())
        except ValueError as error:
            raise MesetaError(f"{self._file.owner}: {error}") from None
        return PendingRowRead(self._file, handle, present)

    def close(self) -> None:
        """Release the segments that only the snapshot needs. Pending reads are completed first. Idempotent."""
        self._handle = None
