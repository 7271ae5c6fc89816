"""Checks of a folder: room, sequential speed of writing to it durably and of reading back, and how rows are read."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from meseta.machine.files import direct_io_block_bytes
from meseta.machine.kernel import KernelFiles
from meseta.measure.doctor.finding import Finding, note, ok, problem
from meseta.telemetry.formatting import format_bytes

BLOCK_BYTES = 4 << 20
WARMUP_BYTES = 2 * BLOCK_BYTES
"""Written first, to see how much fits into the time."""
MAX_BYTES = 256 << 20
MEASUREMENT_WINDOW_S = 2.0
"""Seconds of writing, and of reading, roughly."""
MIN_FREE_BYTES = 200_000_000
RECOMMENDED_FREE_BYTES = 10_000_000_000
MIN_BYTES_PER_S = 50e6


@dataclass(frozen=True)
class DiskSpeed:
    """What was measured."""

    num_bytes: int
    """Written in all."""
    write_bytes_per_s: float
    """From the first byte until fsync has returned."""
    read_bytes_per_s: float
    """After the page cache was asked to forget the file."""


def measure_disk_speed(folder: Path, max_bytes: int = MAX_BYTES, window_s: float = MEASUREMENT_WINDOW_S) -> DiskSpeed:
    """Write a file twice and read it; it has no name where the system can do that, so that nothing is ever left.

    The faster pass counts: in the first one a virtual machine may still have to ask its host for the memory of the page
    cache, which takes longer than the disk does. Raises OSError where the folder refuses.
    """
    block = os.urandom(BLOCK_BYTES)  # a file system that compresses finds nothing to save
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        first_s = _time_write(file, block, WARMUP_BYTES)
        more = min(max_bytes - WARMUP_BYTES, int(WARMUP_BYTES / first_s * window_s)) // 2
        num_bytes = max(more // BLOCK_BYTES, 1) * BLOCK_BYTES
        write_s = min(_time_write(file, block, num_bytes) for _ in range(2))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return DiskSpeed(WARMUP_BYTES + 2 * num_bytes, num_bytes / write_s, _read_bytes_per_s(file, window_s))


def _time_write(file: IO[bytes], block: bytes, num_bytes: int) -> float:
    """Seconds to write blocks from the start of a file on, and to see them on the disk."""
    file.seek(0)
    start_s = time.perf_counter()
    for _ in range(num_bytes // len(block)):
        rest = memoryview(block)
        while rest:
            rest = rest[file.write(rest) :]
    os.fsync(file.fileno())
    return max(time.perf_counter() - start_s, 1e-9)


def _read_bytes_per_s(file: IO[bytes], limit_s: float) -> float:
    """Bytes per second from the start of a file on."""
    buffer, done = bytearray(BLOCK_BYTES), 0
    file.seek(0)
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < limit_s and (count := file.readinto(buffer)):  # type: ignore[attr-defined]
        done += count
    return done / max(time.perf_counter() - start_s, 1e-9)


def check_disk(folder: Path, system: KernelFiles) -> Finding:
    """Whether runs and data can be written to a folder, and how fast."""
    path, elsewhere = str(folder), "name a folder on another disk with --dir"
    figures: dict[str, Any] = {"dir": str(folder.absolute())}
    if not folder.is_dir():
        if folder.exists():
            return problem("disk", f"{path!r} is no folder", "name one with --dir", **figures)
        return problem("disk", f"{path!r} does not exist", "make it, or name another folder with --dir", **figures)
    try:
        tempfile.TemporaryFile(dir=folder).close()  # a folder that refuses all writing may look full as well
        free = shutil.disk_usage(folder).free
        kind = _file_system(folder, system)
        figures |= {"free_bytes": free, "file_system": kind}
        text = f"{path}{f' ({kind})' if kind else ''}: {format_bytes(free)} free"
        if free < MIN_FREE_BYTES:
            return problem("disk", text, f"delete what is not needed, or {elsewhere}", **figures)
        speed = measure_disk_speed(folder, min(MAX_BYTES, free // 4))
    except OSError as error:
        reason = error.strerror or str(error)
        way = f"make it writable (chmod, chown, or mount it so), or {elsewhere}"
        return problem("disk", f"{path!r} cannot be written: {reason}", way, **figures)
    rates = speed.write_bytes_per_s, speed.read_bytes_per_s
    figures |= {"write_bytes_per_s": rates[0], "read_bytes_per_s": rates[1], "measured_bytes": speed.num_bytes}
    text += f"; {rates[0] / 1e6:,.0f} MB/s written and synced, {rates[1] / 1e6:,.0f} MB/s read back"
    if kind in ("tmpfs", "ramfs"):
        return note("disk", f"{text}; it lies in memory and ends with the machine", elsewhere, **figures)
    if min(rates) < MIN_BYTES_PER_S:
        return note("disk", f"{text}: checkpoints will take long", elsewhere, **figures)
    if free < RECOMMENDED_FREE_BYTES:
        return note("disk", f"{text}: little room for data and checkpoints", elsewhere, **figures)
    return ok("disk", text, **figures)


def check_row_files(folder: Path, fact: Mapping[str, Any]) -> Finding:
    """How tables on a disk would be read in a folder, and why not better; `fact` is the probe's."""
    figures: dict[str, Any] = {"io_uring": "error" not in fact and fact.get("why_not") is None}
    how = "io_uring" if figures["io_uring"] else f"threads ({fact.get('error') or fact.get('why_not')})"
    try:
        block_bytes, why_buffered = direct_io_block_bytes(folder)
    except OSError as error:
        return note("row files", f"{how}; {str(folder)!r} cannot be written: {error.strerror or error}", **figures)
    figures |= {"direct": why_buffered is None, "block_bytes": block_bytes}
    if why_buffered is not None:
        text = f"tables on this disk are read by {how}, through the page cache: {why_buffered}"
        return note("row files", text, "name a folder on another disk with --dir", **figures)
    text = f"tables on this disk are read by {how}, directly, in blocks of {block_bytes:,} bytes"
    return ok("row files", text, **figures)


def _file_system(folder: Path, system: KernelFiles) -> str | None:
    """'ext4', 'tmpfs', ...: the kind of the mount that holds a folder, the last one mounted there."""
    place, best = folder.resolve(), ("", "")
    for line in (system.read("proc/self/mounts") or "").splitlines():
        _, mount, kind = [*line.split(" "), "", "", ""][:3]
        mount = mount.replace("\\040", " ")
        if place.is_relative_to(mount or "?") and len(mount) >= len(best[0]):
            best = mount, kind
    return best[1] or None
