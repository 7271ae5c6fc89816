"""Activities of this process that wait for storage, for detection of stalls.

An activity without a target is a phase such as 'saving step 40'. One with a target is a single request, such as the
upload of a file to a URL. The thread of a request waits for nothing else, so a thread that never wakes up has stalled.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from meseta.system.waits.checked_memory import append_checksum, decode_text, encode_text, unpack_checked

_LAYOUT = struct.Struct("<qqq48s172s")
_SLOT_BYTES = 256
_NUM_SLOTS = 10
ACTIVITY_TABLE_BYTES = _NUM_SLOTS * _SLOT_BYTES


class Activity(NamedTuple):
    """Entry of an `ActivityTable`."""

    thread_id: int
    """Native id of the thread that started the activity."""
    worker_thread_id: int
    """Native id of the thread that does the work of the activity."""
    since_ns: int
    """Start time in ns on CLOCK_MONOTONIC."""
    name: str
    target: str
    """URL or file of a request. Empty for a phase."""


class ActivityTable:
    """Thread-safe table of the current activities of one process. Activities beyond its 10 slots are not recorded."""

    def __init__(self) -> None:
        self._memory: bytearray | memoryview = bytearray(ACTIVITY_TABLE_BYTES)
        self._free_slots = list(range(_NUM_SLOTS))
        self._lock = threading.Lock()

    def move_to(self, memory: memoryview) -> None:
        """Move the table to `memory`, which has `ACTIVITY_TABLE_BYTES` bytes."""
        with self._lock:
            memory[:] = self._memory
            self._memory = memory

    def content(self) -> bytes:
        return bytes(self._memory)

    @contextmanager
    def record(self, name: str, target: str, worker: int | None) -> Iterator[None]:
        """Context manager that records an activity of the calling thread. `worker` is as in `track_request`."""
        thread = threading.get_native_id()
        record = _LAYOUT.pack(
            thread, thread if worker is None else worker, time.monotonic_ns(), encode_text(name, 48),
            encode_text(target, 172),
        )  # fmt: skip
        with self._lock:
            slot = self._free_slots.pop() if self._free_slots else None
            self._write(slot, append_checksum(record))
        try:
            yield
        finally:
            with self._lock:
                self._write(slot, bytes(_SLOT_BYTES))
                if slot is not None:
                    self._free_slots.append(slot)

    def _write(self, slot: int | None, record: bytes) -> None:
        if slot is not None:
            at = slot * _SLOT_BYTES
            self._memory[at : at + len(record)] = record


current_activities = ActivityTable()


@contextmanager
def track_activity(name: str) -> Iterator[None]:
    """Context manager that records a phase, such as 'saving step 40', for reports of stalls."""
    with current_activities.record(name, "", None):
        yield


@contextmanager
def track_request(target: str, name: str, worker: int | None = None) -> Iterator[None]:
    """Context manager that records one request to `target`, for example the 'upload' to a URL.

    `worker` is the native id of the thread that transfers the bytes, by default the calling thread.
    """
    with current_activities.record(name, target, worker):
        yield


def read_activities(content: bytes) -> list[Activity]:
    """Return the activities in a copy of a table, oldest first."""
    # A slot that is being written has a wrong checksum and is skipped.
    entries = (unpack_checked(content, slot * _SLOT_BYTES, _LAYOUT) for slot in range(_NUM_SLOTS))
    activities = [Activity(*entry[:3], *map(decode_text, entry[3:])) for entry in entries if entry is not None]
    return sorted(activities, key=lambda one: one.since_ns)
