"""Heartbeat of a process: a native thread that writes the time to a file, independently of the Python interpreter."""

from __future__ import annotations

from meseta.ops.core import core

HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between two heartbeats."""


def start_heartbeat(descriptor: int, offset: int) -> None:
    """Start to write a heartbeat into an open file, immediately and then once per second.

    A heartbeat is two int64 at byte `offset`, a multiple of 8: the time of CLOCK_MONOTONIC and the CPU time of the
    process, both in nanoseconds. A second call replaces the first one. A forked child has no heartbeat. Raises
    ValueError if the file has no such offset.
    """
    # The file is mapped, so that the last heartbeat survives a kill. The thread takes no lock. A missing heartbeat
    # therefore means that the whole process is stopped, swapping or blocked on a disk.
    core().start_heartbeat(descriptor, offset, HEARTBEAT_INTERVAL_S)


def stop_heartbeat() -> None:
    """Stop the heartbeat, if there is one."""
    core().stop_heartbeat()
