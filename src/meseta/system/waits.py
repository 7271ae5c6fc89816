"""Records in memory that several processes map.

Each record ends in a CRC-32, with which a reader detects a partly written record.
"""

from __future__ import annotations

import os
import platform
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from meseta.system.files import has_control_characters
from meseta.system.processes import ProcessState, read_process_state

CHECKSUM_BYTES = 4


def append_checksum(content: bytes) -> bytes:
    """Return `content` followed by its CRC-32."""
    return content + crc32(content).to_bytes(CHECKSUM_BYTES, "little")


def unpack_checked(memory: bytes, at: int, layout: struct.Struct) -> tuple[Any, ...] | None:
    """Return the fields of the record at byte `at`, or `None` if it is partly written or was never written."""
    content = memory[at : at + layout.size]
    if int.from_bytes(memory[at + layout.size : at + layout.size + CHECKSUM_BYTES], "little") != crc32(content):
        return None
    return layout.unpack(content) if any(content) else None


def encode_text(text: str, num_bytes: int) -> bytes:
    """Encode a text as UTF-8. A text of more than `num_bytes` bytes is truncated and ends in '...'."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= num_bytes:
        return encoded
    return encoded[: num_bytes - 3].decode(errors="ignore").encode() + b"..."


def decode_text(field: bytes) -> str:
    """Decode a text field. Control characters become question marks, because they may come from untrusted input."""
    text = field.rstrip(b"\0").decode(errors="replace")
    return (
        text if not has_control_characters(text) else "".join(c if not has_control_characters(c) else "?" for c in text)
    )


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


_PROC = Path("/proc")
_MAX_PATH_BYTES = 4096
_STANDARD_STREAMS = (0, 1, 2)
_FD_CALL_NUMBERS = {
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "pread": 17, "pwrite": 18, "readv": 19, "writev": 20,
        "fsync": 74, "fdatasync": 75, "ftruncate": 77, "fstatfs": 138, "getdents": 217, "sync_file_range": 277,
        "fallocate": 285, "preadv": 295, "pwritev": 296, "syncfs": 306, "copy_file_range": 326, "preadv2": 327,
        "pwritev2": 328,
    },
    "aarch64": {
        "ftruncate": 46, "fallocate": 47, "close": 57, "getdents": 61, "lseek": 62, "read": 63, "write": 64,
        "readv": 65, "writev": 66, "pread": 67, "pwrite": 68, "preadv": 69, "pwritev": 70, "fstat": 80, "fsync": 82,
        "fdatasync": 83, "sync_file_range": 84, "fstatfs": 44, "syncfs": 267, "copy_file_range": 285, "preadv2": 286,
        "pwritev2": 287,
    },
}  # fmt: skip
"""Numbers of the system calls whose first argument is a file descriptor, by architecture."""
_PATH_CALL_NUMBERS = {
    "x86_64": {
        "open": 2, "stat": 4, "lstat": 6, "access": 21, "truncate": 76, "rename": 82, "mkdir": 83, "rmdir": 84,
        "unlink": 87, "readlink": 89, "statfs": 137,
    },
    "aarch64": {"statfs": 43, "truncate": 45},
}  # fmt: skip
"""Numbers of the system calls whose first argument is a path, by architecture."""
_PATH_AT_CALL_NUMBERS = {
    "x86_64": {
        "open": 257, "mkdir": 258, "stat": 262, "unlink": 263, "rename": 264, "link": 265, "readlink": 267,
        "access": 269, "utimens": 280, "renameat2": 316, "statx": 332, "faccessat2": 439,
    },
    "aarch64": {
        "mkdir": 34, "unlink": 35, "link": 37, "rename": 38, "access": 48, "open": 56, "readlink": 78, "stat": 79,
        "utimens": 88, "renameat2": 276, "statx": 291, "faccessat2": 439,
    },
}  # fmt: skip
"""Numbers of the system calls whose second argument is a path, by architecture."""


def _by_number(tables: dict[str, dict[str, int]]) -> dict[int, str]:
    return {number: name for name, number in tables.get(platform.machine(), {}).items()}


_FD_CALLS, _PATH_CALLS, _PATH_AT_CALLS = map(_by_number, (_FD_CALL_NUMBERS, _PATH_CALL_NUMBERS, _PATH_AT_CALL_NUMBERS))


@dataclass(frozen=True)
class BlockedCall:
    """System call on a file in which a thread sleeps, or uninterruptible sleep outside of a system call."""

    thread_id: int
    call: str
    """Name of the system call. Empty for a page fault."""
    path: str
    """Absolute path of the file. Empty if it is unknown."""
    arguments: str
    """Raw arguments and registers, which differ between successive calls of a thread."""


def blocked_calls(process: int) -> list[BlockedCall]:
    """Return the blocked calls of a process, ordered by thread id.

    The list is empty if the process has ended or the kernel hides its calls.
    """
    folder = _PROC / str(process)
    try:
        threads = sorted(map(int, os.listdir(folder / "task")))
    except OSError:
        return []
    return [call for thread in threads if (call := _read_blocked_call(folder, thread)) is not None]


def is_blocked(process: int) -> bool:
    """Whether a running process has a thread that sleeps in a call on a file or in uninterruptible sleep."""
    state = read_process_state(process)
    return state is not None and state.state_code not in "TtZX" and bool(blocked_calls(process))


def blocked_text(process: int, state: ProcessState) -> str:
    """Return `ProcessState.blocked_reason`, followed by the system call and the file that block the process."""
    calls = [call for call in blocked_calls(process) if call.path] if state.state_code == "D" else []
    return state.blocked_reason + (f", in {calls[0].call} of {calls[0].path!r}" if calls else "")


def num_wakeups(process: int, thread: int) -> int:
    """Return how often a thread was scheduled, or 0 if unknown. The count of a blocked thread does not change."""
    text = _read(_PROC / str(process) / "task" / str(thread) / "schedstat").split()
    return int(text[2]) if len(text) > 2 else 0


def find_mount(path: str) -> tuple[str, str]:
    """Return (mount point, description) of a path's file system, such as ("/data", "ext4 on /dev/sda1")."""
    best, about = "/", ""
    for line in _read(_PROC / "self/mountinfo").splitlines():
        before, _, behind = line.partition(" - ")
        fields, of_system = before.split(), behind.split()
        if len(fields) < 5 or len(of_system) < 2:
            continue
        place = fields[4].replace("\\040", " ")
        if (path == place or path.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
            best, about = place, f"{of_system[0]} on {of_system[1]}"
    return best, about


def _read_blocked_call(folder: Path, thread: int) -> BlockedCall | None:
    text = _read(folder / "task" / str(thread) / "syscall").strip()
    number, _, arguments = text.partition(" ")
    if not number.lstrip("-").isdigit():  # The thread is running, or the kernel hides its call.
        return None
    values = [int(word, 16) for word in arguments.split()[:6]]
    if number == "-1":  # Blocked outside of a system call.
        state = read_process_state(thread)
        held = state is not None and state.state_code == "D"
        return BlockedCall(thread, "", "", text) if held else None
    if (name := _FD_CALLS.get(int(number))) is not None:
        path = "" if values[0] in _STANDARD_STREAMS else _read_link(folder / "fd" / str(values[0]))
    elif (name := _PATH_CALLS.get(int(number))) is not None:
        path = _read_path(folder, values[0], None)
    elif (name := _PATH_AT_CALLS.get(int(number))) is not None:
        path = _read_path(folder, values[1], values[0])
    else:
        return None
    # Waiting for a pipe, socket or terminal is normal.
    is_file = path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/memfd:"))
    return BlockedCall(thread, name, path.removesuffix(" (deleted)"), text) if is_file else None


def _read_path(folder: Path, address: int, base: int | None) -> str:
    try:
        with (folder / "mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            room = _MAX_PATH_BYTES - address % _MAX_PATH_BYTES  # The next page may not be mapped.
            content = memory.read(room)
            if b"\0" not in content:
                content += memory.read(_MAX_PATH_BYTES)
    except (OSError, OverflowError, ValueError):
        return ""
    path = os.fsdecode(content.partition(b"\0")[0])
    if path.startswith("/"):
        return path
    is_open = base is not None and base < 1 << 31  # AT_FDCWD is negative.
    return os.path.normpath(f"{_read_link(folder / (f'fd/{base}' if is_open else 'cwd'))}/{path}")


def _read_link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
