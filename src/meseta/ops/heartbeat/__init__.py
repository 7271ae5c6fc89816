"""The heartbeat of a process: the time, written into a file each second by a thread that needs no interpreter."""

from __future__ import annotations

from meseta.ops.core import core

HEARTBEAT_INTERVAL_S = 1.0
"""Between two beats."""


def start_heartbeat(descriptor: int, offset: int) -> None:
    """Start a thread that writes two int64 to byte `offset`, a multiple of 8, of an open file each second: the time of
    CLOCK_MONOTONIC and the processor time of this process, both in nanoseconds.

    The file is mapped, so nothing of a process that is killed is lost; and no lock is needed, so that a beat which does
    not come says that the process does not run: stopped, swapping, or held up by a disk. A second call ends the first
    one's. A fork of this process has no beat. Raises ValueError where the file has no such offset.
    """
    core().start_heartbeat(descriptor, offset, HEARTBEAT_INTERVAL_S)


def stop_heartbeat() -> None:
    """Write no more, if anything is written."""
    core().stop_heartbeat()
