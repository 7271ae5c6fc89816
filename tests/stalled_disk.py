"""Disks that stop answering, and control groups with little memory, as far as this machine allows them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MEMORY = Path("/sys/fs/cgroup/memory")
_BLKIO = Path("/sys/fs/cgroup/blkio")


class Disk:
    """An ext4 file system in a file, mounted by way of a loop device."""

    def __init__(self, place: Path, device: str) -> None:
        self.place, self.device = place, device
        self._is_frozen = False

    def freeze(self) -> None:
        """Let every write wait from now on."""
        subprocess.run(["fsfreeze", "-f", self.place], check=True)
        self._is_frozen = True

    def thaw(self) -> None:
        """Let writes continue."""
        if self._is_frozen:
            subprocess.run(["fsfreeze", "-u", self.place], check=True)
            self._is_frozen = False

    def limit_writes(self, bytes_per_s: int) -> None:
        """Limit the writes of the device, 0 for no limit. Skips the test if that is not allowed."""
        numbers = os.stat(self.device).st_rdev
        try:
            (_BLKIO / "blkio.throttle.write_bps_device").write_text(
                f"{os.major(numbers)}:{os.minor(numbers)} {bytes_per_s}"
            )
        except OSError:
            pytest.skip("no device can be throttled here")


@contextmanager
def loop_disk(folder: Path, size: str = "64M") -> Iterator[Disk]:
    """Mount a disk at `folder`, or skip the test if that is impossible."""
    folder.mkdir(parents=True)
    image = folder.with_name(f"{folder.name}.img")
    with image.open("wb") as file:
        file.truncate(int(size.removesuffix("M")) << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder]):
        try:
            done = subprocess.run([*map(str, command)], capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is not installed")
        if done.returncode != 0:
            pytest.skip(f"no disk can be made here: {done.stderr.decode()}")
    device = next(line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {folder} " in line)
    disk = Disk(folder, device)
    try:
        yield disk
    finally:
        disk.thaw()
        subprocess.run(["umount", "-l", str(folder)], check=True)
        image.unlink()


class MemoryGroup:
    """A control group, version 1 or 2, with a limit of its memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_v1 = (folder / "memory.limit_in_bytes").exists()

    def limit(self, num_bytes: int) -> bool:
        """Set the limit. Return whether the kernel accepts one below the current usage."""
        try:
            (self.folder / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")).write_text(str(num_bytes))
        except OSError:
            return False
        return True

    def peak_bytes(self) -> int:
        """Peak of the memory usage in bytes."""
        return int((self.folder / ("memory.max_usage_in_bytes" if self._is_v1 else "memory.peak")).read_text())

    def shrink(self, left_ratio: float = 0.0) -> None:
        """Lower the limit, megabyte by megabyte, until the kernel cannot reclaim any more, or to the share above it."""
        name = "memory.usage_in_bytes" if self._is_v1 else "memory.current"
        limit = int((self.folder / name).read_text())
        while self.limit(limit - (1 << 20)):
            limit -= 1 << 20
        if left_ratio:
            self.limit(int(limit * (1 + left_ratio)))

    def add(self, process: int) -> None:
        """Move a process into the group; those that it forks afterwards are in it too."""
        (self.folder / "cgroup.procs").write_text(str(process))

    def members(self) -> list[int]:
        return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]


@contextmanager
def memory_group(num_bytes: int) -> Iterator[MemoryGroup]:
    """Context manager with a control group, whose processes are killed at the end. Skips the test if not allowed."""
    parent = _MEMORY if _MEMORY.is_dir() else Path("/sys/fs/cgroup")
    folder = parent / f"meseta-test-{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    group = MemoryGroup(folder)
    try:
        if not group.limit(num_bytes):
            pytest.skip("control groups have no memory controller here")
        yield group
    finally:
        for process in group.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while group.members() and time.monotonic() < deadline:
            time.sleep(0.02)
        folder.rmdir()
