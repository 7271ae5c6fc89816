"""What reads and writes files of rows: io_uring where the system allows it, else threads; direct where the file system
does."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from meseta.errors import MesetaError, check_choice, error_summary
from meseta.machine.files import direct_io_block_bytes
from meseta.ops.core import core
from meseta.ops.row_file.scratch_file import remove_leftovers
from meseta.spec.tiers import EngineName

ENGINES = get_args(EngineName)
AUTO, IO_URING, THREADS = ENGINES
QUEUE_DEPTHS = {IO_URING: 256, THREADS: 32}
"""Reads in flight at most, 8 KB of memory each: with many at once the system is called less often for each."""
_STEPS, _MIN_POWER = 8, 3


@dataclass(frozen=True)
class EngineInfo:
    """How files of a folder are read, and why not better."""

    engine: str
    """'io_uring' or 'threads'."""
    is_direct: bool
    """Whether the system's page cache is passed by."""
    block_bytes: int
    """The least that is read."""
    io_uring_unavailable_reason: str | None = None
    """Why not by io_uring."""
    direct_unavailable_reason: str | None = None
    """Why not directly."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @property
    def summary(self) -> str:
        """One line for people."""
        how = self.engine + (f" ({self.io_uring_unavailable_reason})" if self.io_uring_unavailable_reason else "")
        if self.is_direct:
            return f"{how}, direct, blocks of {self.block_bytes:,} bytes"
        return f"{how}, through the page cache ({self.direct_unavailable_reason})"


def io_uring_unavailable_reason() -> str | None:
    """Why the system makes no ring; None where it does."""
    error = core().io_uring_error()
    if error == 0:
        return None
    if error < 0:
        return "the core was built on a system without io_uring"
    reasons = {
        errno.EPERM: "the system forbids io_uring, as profiles of containers and kernel.io_uring_disabled do",
        errno.EACCES: "the system forbids io_uring",
        errno.ENOSYS: "this kernel has no io_uring, or one before Linux 5.11",
        errno.ENOMEM: "no memory may be locked for io_uring; raise `ulimit -l`",
    }
    return reasons.get(error, f"io_uring cannot be set up: {os.strerror(error)}")


def probe_engine(folder: Path, engine: str = AUTO) -> EngineInfo:
    """How files of rows in a folder would be read; a file without a name is written for it.

    Raises MesetaError where the folder cannot be written, and for `io_uring` where there is none.
    """
    check_choice("storage", "engine", engine, ENGINES)
    why_threads = "as it was asked for" if engine == THREADS else io_uring_unavailable_reason()
    if engine == IO_URING and why_threads is not None:
        raise MesetaError(f"storage: engine 'io_uring' is not to be had: {why_threads}; set storage.engine to auto")
    try:
        block_bytes, why_buffered = direct_io_block_bytes(folder)
    except OSError as error:
        raise MesetaError(
            f"storage: {str(folder)!r} cannot be written ({error_summary(error)}); set storage.dir to a folder on a "
            f"disk"
        ) from None
    return EngineInfo(
        engine=IO_URING if why_threads is None else THREADS,
        is_direct=why_buffered is None,
        block_bytes=block_bytes,
        io_uring_unavailable_reason=why_threads,
        direct_unavailable_reason=why_buffered,
    )


class DiskEngine:
    """Reads and writes the files of rows of one folder, for all tables of a process; see docs/tiers.md."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        engine: str = AUTO,
        *,
        max_reads_per_s: float | None = None,
        queue_depth: int | None = None,
    ) -> None:
        """Make the folder where there is none, and remove what killed processes have left in it.

        `max_reads_per_s` limits the reads of all files together, `queue_depth` those in flight. Raises MesetaError as
        `probe_engine`.
        """
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MesetaError(
                f"storage: {str(folder)!r} cannot be made ({error_summary(error)}); set storage.dir"
            ) from None
        self.removed_files = remove_leftovers(self.folder)
        """Files that killed processes had left."""
        self.info = probe_engine(self.folder, engine)
        self._max_reads_per_s = _check_limit(max_reads_per_s)
        self.queue_depth = queue_depth or QUEUE_DEPTHS[self.info.engine]
        is_ring = self.info.engine == IO_URING
        self.handle = core().open_row_engine(is_ring, self.queue_depth, self._max_reads_per_s)

    @property
    def max_reads_per_s(self) -> float | None:
        """The limit of all files together; None: none."""
        return self._max_reads_per_s or None

    @max_reads_per_s.setter
    def max_reads_per_s(self, limit: float | None) -> None:
        self._max_reads_per_s = _check_limit(limit)
        core().limit_row_engine(self.handle, self._max_reads_per_s)

    def num_bytes(self) -> int:
        """Memory of its buffers; files have their own."""
        return int(core().row_engine_bytes(self.handle))

    def latencies(self) -> LatencyHistogram:
        """What reads took, since the engine was made."""
        return LatencyHistogram(np.array(core().row_engine_latencies(self.handle), np.int64))


def _check_limit(limit: float | None) -> float:
    if limit is not None and not 0 < limit < 1e12:
        raise MesetaError(f"storage: max_reads_per_s must be greater than 0, got {limit!r}; leave it out for no limit")
    return float(limit or 0)


@dataclass(frozen=True)
class LatencyHistogram:
    """Reads by the time from handing one to the system until its answer."""

    counts: np.ndarray[Any, np.dtype[np.int64]]
    """By length: eight steps for each power of two of nanoseconds, from 8 on."""

    def __sub__(self, earlier: LatencyHistogram) -> LatencyHistogram:
        """Those that came after."""
        return LatencyHistogram(self.counts - earlier.counts)

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Seconds that these shares of the reads did not exceed, by the upper ends of the steps: up to an eighth too
        much. NaN without reads."""
        sums = np.cumsum(self.counts)
        if not len(sums) or sums[-1] == 0:
            return [float("nan")] * len(shares)
        steps = [int(np.searchsorted(sums, share * sums[-1])) for share in shares]
        return [(_STEPS + step % _STEPS + 1) * 2.0 ** (step // _STEPS) * 1e-9 for step in steps]
