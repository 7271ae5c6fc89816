"""Engine for reading and writing row files: io_uring or threads, with direct I/O if the file system supports it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from meseta.errors import MesetaError, check_choice, error_summary
from meseta.ops.core import core
from meseta.ops.row_file.scratch_file import remove_leftovers
from meseta.spec.tiers import EngineName
from meseta.system.files import direct_io_block_bytes

ENGINES = get_args(EngineName)
AUTO, IO_URING, THREADS = ENGINES
QUEUE_DEPTHS = {IO_URING: 256, THREADS: 32}
"""Maximum number of reads in flight. Each takes 8 KB of memory."""
# A deep queue needs fewer system calls per read.
_STEPS, _MIN_POWER = 8, 3


@dataclass(frozen=True)
class EngineInfo:
    """Engine for a folder, and the reasons why a faster one is unavailable."""

    engine: str
    """'io_uring' or 'threads'."""
    is_direct: bool
    """Whether direct I/O bypasses the page cache of the system."""
    block_bytes: int
    """Smallest number of bytes that a request reads."""
    io_uring_unavailable_reason: str | None = None
    """Reason why io_uring is not used. `None` if it is used."""
    direct_unavailable_reason: str | None = None
    """Reason why direct I/O is not used. `None` if it is used."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data."""
        return asdict(self)

    @property
    def summary(self) -> str:
        """One-line description."""
        how = self.engine + (f" ({self.io_uring_unavailable_reason})" if self.io_uring_unavailable_reason else "")
        if self.is_direct:
            return f"{how}, direct, blocks of {self.block_bytes:,} bytes"
        return f"{how}, through the page cache ({self.direct_unavailable_reason})"


def io_uring_unavailable_reason() -> str | None:
    """Return why io_uring is unavailable, or `None` if it is available."""
    error = core().io_uring_error()
    if error == 0:
        return None
    if error < 0:
        return "the core was built on a system without io_uring"
    reasons = {
        errno.EPERM: "the system forbids io_uring, for example by a container profile or kernel.io_uring_disabled",
        errno.EACCES: "the system forbids io_uring",
        errno.ENOSYS: "the kernel has no io_uring, or is older than Linux 5.11",
        errno.ENOMEM: "the limit of locked memory is too low for io_uring; raise `ulimit -l`",
    }
    return reasons.get(error, f"io_uring cannot be set up: {os.strerror(error)}")


def probe_engine(folder: Path, engine: str = AUTO) -> EngineInfo:
    """Return the engine that reads row files in `folder`. Writes an unnamed temporary file.

    Raises MesetaError if the folder is not writable, or if `engine` is "io_uring" and it is unavailable.
    """
    check_choice("storage", "engine", engine, ENGINES)
    why_threads = "requested" if engine == THREADS else io_uring_unavailable_reason()
    if engine == IO_URING and why_threads is not None:
        raise MesetaError(f"storage: engine 'io_uring' is unavailable: {why_threads}; set storage.engine to auto")
    try:
        block_bytes, why_buffered = direct_io_block_bytes(folder)
    except OSError as error:
        raise MesetaError(
            f"storage: {str(folder)!r} cannot be written ({error_summary(error)}); set storage.dir to a folder "
            "on a disk"
        ) from None
    return EngineInfo(
        engine=IO_URING if why_threads is None else THREADS,
        is_direct=why_buffered is None,
        block_bytes=block_bytes,
        io_uring_unavailable_reason=why_threads,
        direct_unavailable_reason=why_buffered,
    )


class DiskEngine:
    """Reader and writer of the row files of one folder, shared by all tables of a process."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        engine: str = AUTO,
        *,
        max_reads_per_s: float | None = None,
        queue_depth: int | None = None,
    ) -> None:
        """Create the folder if needed, and remove files that killed processes left in it.

        Args:
            folder: Folder of the row files.
            engine: "auto", "io_uring" or "threads".
            max_reads_per_s: Limit for the reads of all files together. `None` means no limit.
            queue_depth: Maximum number of reads in flight, see `QUEUE_DEPTHS`.

        Raises:
            MesetaError: The folder cannot be created or written, or io_uring is requested but unavailable.
        """
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MesetaError(
                f"storage: {str(folder)!r} cannot be created ({error_summary(error)}); set storage.dir"
            ) from None
        self.removed_files = remove_leftovers(self.folder)
        """Paths of the removed files of killed processes."""
        self.info = probe_engine(self.folder, engine)
        self._max_reads_per_s = _check_limit(max_reads_per_s)
        self.queue_depth = queue_depth or QUEUE_DEPTHS[self.info.engine]
        is_ring = self.info.engine == IO_URING
        self.handle = core().open_row_engine(is_ring, self.queue_depth, self._max_reads_per_s)

    @property
    def max_reads_per_s(self) -> float | None:
        """Limit for the reads of all files together. `None` means no limit."""
        return self._max_reads_per_s or None

    @max_reads_per_s.setter
    def max_reads_per_s(self, limit: float | None) -> None:
        self._max_reads_per_s = _check_limit(limit)
        core().limit_row_engine(self.handle, self._max_reads_per_s)

    def num_bytes(self) -> int:
        """Return the memory of the engine's buffers. Buffers of files are not included."""
        return int(core().row_engine_bytes(self.handle))

    def latencies(self) -> LatencyHistogram:
        """Return the latencies of all reads since the engine was created."""
        return LatencyHistogram(np.array(core().row_engine_latencies(self.handle), np.int64))


def _check_limit(limit: float | None) -> float:
    if limit is not None and not 0 < limit < 1e12:
        raise MesetaError(f"storage: max_reads_per_s must be greater than 0, got {limit!r}; omit it for no limit")
    return float(limit or 0)


@dataclass(frozen=True)
class LatencyHistogram:
    """Histogram of read latencies, from the submission of a request to its completion."""

    counts: np.ndarray[Any, np.dtype[np.int64]]
    """Number of reads per bin. Eight bins for each power of two of nanoseconds, starting at 8 ns."""

    def __sub__(self, earlier: LatencyHistogram) -> LatencyHistogram:
        """Return the reads since `earlier`."""
        return LatencyHistogram(self.counts - earlier.counts)

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Return latency quantiles in seconds, upper bounds of bins up to 1/8 too large. NaN without reads."""
        sums = np.cumsum(self.counts)
        if not len(sums) or sums[-1] == 0:
            return [float("nan")] * len(shares)
        steps = [int(np.searchsorted(sums, share * sums[-1])) for share in shares]
        return [(_STEPS + step % _STEPS + 1) * 2.0 ** (step // _STEPS) * 1e-9 for step in steps]
