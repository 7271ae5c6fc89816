"""Checks of the disk of a folder: free space, sequential write and read speed, and access to row files."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from meseta.measure.doctor.finding import Finding, note, ok, problem
from meseta.system.files import direct_io_block_bytes
from meseta.system.kernel import KernelFiles
from meseta.telemetry.formatting import format_bytes

BLOCK_BYTES = 4 << 20
WARMUP_BYTES = 2 * BLOCK_BYTES
"""Bytes written first, to estimate how much can be written in the measurement window."""
MAX_BYTES = 256 << 20
MEASUREMENT_WINDOW_S = 2.0
"""Approximate seconds spent on writing, and again on reading."""
MIN_FREE_BYTES = 200_000_000
RECOMMENDED_FREE_BYTES = 10_000_000_000
MIN_BYTES_PER_S = 50e6


@dataclass(frozen=True)
class DiskSpeed:
    """Sequential speed of a disk."""

    num_bytes: int
    """Total number of bytes written for the measurement."""
    write_bytes_per_s: float
    """Write speed, including the final fsync."""
    read_bytes_per_s: float
    """Read speed after the kernel was advised to drop the file from the page cache."""


def measure_disk_speed(folder: Path, max_bytes: int = MAX_BYTES, window_s: float = MEASUREMENT_WINDOW_S) -> DiskSpeed:
    """Measure the sequential speed of the disk of `folder`.

    Writes a temporary file twice and reads it once. The faster write counts. If the system supports it, the file has no
    name, so that nothing remains even if this process is killed.

    Raises OSError if the folder is not writable.
    """
    block = os.urandom(BLOCK_BYTES)  # Random data, so that a compressing file system saves nothing.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        first_s = _time_write(file, block, WARMUP_BYTES)
        more = min(max_bytes - WARMUP_BYTES, int(WARMUP_BYTES / first_s * window_s)) // 2
        num_bytes = max(more // BLOCK_BYTES, 1) * BLOCK_BYTES
        # In the first pass, a virtual machine may have to request memory for the page cache from its host. That takes
        # longer than the write itself.
        write_s = min(_time_write(file, block, num_bytes) for _ in range(2))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return DiskSpeed(WARMUP_BYTES + 2 * num_bytes, num_bytes / write_s, _read_bytes_per_s(file, window_s))


def _time_write(file: IO[bytes], block: bytes, num_bytes: int) -> float:
    """Return the seconds to write and sync `num_bytes` from the start of a file."""
    file.seek(0)
    start_s = time.perf_counter()
    for _ in range(num_bytes // len(block)):
        rest = memoryview(block)
        while rest:
            rest = rest[file.write(rest) :]
    os.fsync(file.fileno())
    return max(time.perf_counter() - start_s, 1e-9)


def _read_bytes_per_s(file: IO[bytes], limit_s: float) -> float:
    """Return the speed of reading a file from its start, for at most about `limit_s`."""
    buffer, done = bytearray(BLOCK_BYTES), 0
    file.seek(0)
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < limit_s and (count := file.readinto(buffer)):  # type: ignore[attr-defined]
        done += count
    return done / max(time.perf_counter() - start_s, 1e-9)


def check_disk(folder: Path, system: KernelFiles) -> Finding:
    """Check that data and runs can be written to `folder`, and measure the speed of its disk."""
    path, elsewhere = str(folder), "name a folder on another disk with --dir"
    values: dict[str, Any] = {"dir": str(folder.absolute())}
    if not folder.is_dir():
        if folder.exists():
            return problem("disk", f"{path!r} is not a folder", "name a folder with --dir", **values)
        return problem("disk", f"{path!r} does not exist", "create it, or name another folder with --dir", **values)
    try:
        tempfile.TemporaryFile(dir=folder).close()  # A folder that is not writable may also report no free space.
        free = shutil.disk_usage(folder).free
        kind = _file_system(folder, system)
        values |= {"free_bytes": free, "file_system": kind}
        text = f"{path}{f' ({kind})' if kind else ''}: {format_bytes(free)} free"
        if free < MIN_FREE_BYTES:
            return problem("disk", text, f"delete unneeded files, or {elsewhere}", **values)
        speed = measure_disk_speed(folder, min(MAX_BYTES, free // 4))
    except OSError as error:
        reason = error.strerror or str(error)
        way = f"make it writable (chmod, chown or remount), or {elsewhere}"
        return problem("disk", f"{path!r} cannot be written: {reason}", way, **values)
    rates = speed.write_bytes_per_s, speed.read_bytes_per_s
    values |= {"write_bytes_per_s": rates[0], "read_bytes_per_s": rates[1], "measured_bytes": speed.num_bytes}
    text += f"; {rates[0] / 1e6:,.0f} MB/s written and synced, {rates[1] / 1e6:,.0f} MB/s read back"
    if kind in ("tmpfs", "ramfs"):
        return note("disk", f"{text}; its files are in memory and are lost when the machine stops", elsewhere, **values)
    if min(rates) < MIN_BYTES_PER_S:
        return note("disk", f"{text}: checkpoints will be slow", elsewhere, **values)
    if free < RECOMMENDED_FREE_BYTES:
        return note("disk", f"{text}: little space for data and checkpoints", elsewhere, **values)
    return ok("disk", text, **values)


def check_row_files(folder: Path, fact: Mapping[str, Any]) -> Finding:
    """Check whether row files in `folder` are read by io_uring and with direct I/O.

    `fact` is the result of the probe 'io_uring'.
    """
    values: dict[str, Any] = {"io_uring": "error" not in fact and fact.get("why_not") is None}
    how = "io_uring" if values["io_uring"] else f"threads ({fact.get('error') or fact.get('why_not')})"
    try:
        block_bytes, why_buffered = direct_io_block_bytes(folder)
    except OSError as error:
        return note("row files", f"{how}; {str(folder)!r} cannot be written: {error.strerror or error}", **values)
    values |= {"direct": why_buffered is None, "block_bytes": block_bytes}
    if why_buffered is not None:
        text = f"tables on this disk are read by {how}, through the page cache: {why_buffered}"
        return note("row files", text, "name a folder on another disk with --dir", **values)
    text = f"tables on this disk are read by {how}, directly, in blocks of {block_bytes:,} bytes"
    return ok("row files", text, **values)


def _file_system(folder: Path, system: KernelFiles) -> str | None:
    """Return the type of the file system of `folder`, such as 'ext4', or `None` if it is unknown."""
    # If several file systems are mounted at one path, the last one is visible.
    place, best = folder.resolve(), ("", "")
    for line in (system.read("proc/self/mounts") or "").splitlines():
        _, mount, kind = [*line.split(" "), "", "", ""][:3]
        mount = mount.replace("\\040", " ")
        if place.is_relative_to(mount or "?") and len(mount) >= len(best[0]):
            best = mount, kind
    return best[1] or None
