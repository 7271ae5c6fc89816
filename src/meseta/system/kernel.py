"""Memory, limits and clocks of this machine, read from /proc, /sys and control groups."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# The scheduler gives niceness 10 about a tenth of the processor time of niceness 0.
_NICENESS = 10
# In thousandths of the memory. A child that was just forked uses less memory than its parent, which imported torch.
_OOM_SCORE_STEP, _MAX_OOM_SCORE = 500, 1000
# Constants of glibc's malloc.h.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


@dataclass(frozen=True)
class KernelFiles:
    """Reader of kernel files below /proc and /sys."""

    root: Path = Path("/")
    """Folder that contains `proc` and `sys`."""

    def read(self, path: str) -> str | None:
        """Return the text of a file such as 'proc/meminfo', or `None` if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def read_int(self, path: str) -> int | None:
        """Return the integer in a file, or `None` if the file holds anything else, such as 'max'."""
        text = self.read(path) or ""
        return int(text) if text.lstrip("-").isdigit() else None

    def read_field(self, path: str, name: str) -> str | None:
        """Return the value of the first line 'name: value' or 'name value' of a file, or `None`."""
        for line in (self.read(path) or "").splitlines():
            key, _, value = line.partition(":" if ":" in line else " ")
            if key.strip() == name:
                return value.strip()
        return None

    def read_bytes_field(self, path: str, name: str) -> int | None:
        """Return a field in kB, such as those of /proc/meminfo, in bytes."""
        words = (self.read_field(path, name) or "").split()
        return int(words[0]) * 1024 if words and words[0].isdigit() else None


def lower_priority() -> None:
    """Lower the scheduling priority of this thread and the threads that it starts. Does nothing outside Linux."""
    # On Linux each thread has its own niceness. Elsewhere this would change the whole process.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def boot_id(system: KernelFiles | None = None) -> str:
    """Return an id of the running kernel since its boot, which containers share. It is empty if unknown."""
    return (system or KernelFiles()).read("proc/sys/kernel/random/boot_id") or ""


def clock_id(system: KernelFiles | None = None) -> str:
    """Return an id of CLOCK_MONOTONIC, which `time.perf_counter` reads. It is empty if unknown.

    Processes of one kernel and time namespace (time_namespaces(7)) have the same clock.
    """
    system = system or KernelFiles()
    try:
        namespace = os.readlink(system.root / "proc/self/ns/time")
    except OSError:  # The kernel has no time namespaces.
        namespace = ""
    boot = boot_id(system)
    return boot and f"{boot} {namespace}"


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of this process by control groups. `None` means no limit."""

    num_cores: float | None
    """CPU quota in processor seconds per second."""
    memory_bytes: int | None
    # The kernel reclaims inactive page cache first.
    memory_free_bytes: int | None
    """Free part of `memory_bytes`. Inactive page cache counts as free."""


def read_cgroup_limits(system: KernelFiles) -> CgroupLimits:
    """Return the lowest limits among this process's control group and its parents, for cgroups v1 and v2."""
    cores = [
        cores for folder in _cgroup_folders(system, "cpu") if (cores := _read_cpu_quota(system, folder)) is not None
    ]
    memories = _limited_cgroups(system)
    return CgroupLimits(
        num_cores=min(cores, default=None),
        memory_bytes=min((memory.limit_bytes for memory in memories), default=None),
        memory_free_bytes=min((memory.free_bytes for memory in memories), default=None),
    )


@dataclass(frozen=True)
class CgroupMemory:
    """Memory of a control group with a limit."""

    folder: str
    """Folder of the group's files below `KernelFiles.root`."""
    limit_bytes: int
    free_bytes: int
    """Free memory below the limit. Inactive page cache counts as free."""
    unclaimed_bytes: int
    """Free memory below the limit if all page cache counts as free. At 0 the kernel kills a process."""


def tightest_cgroup(system: KernelFiles) -> CgroupMemory | None:
    """Return the group with the least unclaimed memory among this process's group and its parents.

    The result is `None` if no group has a limit.
    """
    return min(_limited_cgroups(system), key=lambda memory: memory.unclaimed_bytes, default=None)


def num_oom_kills(system: KernelFiles) -> int:
    """Return the number of out-of-memory kills in this process's control group.

    If control groups do not count them, return the number of kills on this machine.
    """
    for folder in _cgroup_folders(system, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (count := system.read_field(f"{folder}/{name}", "oom_kill")) is not None:
                return int(count)
    return int(system.read_field("proc/vmstat", "oom_kill") or 0)


def raise_oom_score(path: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Make the kernel kill this process before its parent if memory runs out. Does nothing outside Linux."""
    with suppress(OSError, ValueError):
        score = int(path.read_text())
        path.write_text(str(min(score + _OOM_SCORE_STEP, _MAX_OOM_SCORE)))


def total_memory_bytes(system: KernelFiles, limits: CgroupLimits) -> int | None:
    """Return the memory of this machine or of its control group, whichever is smaller, or `None` if unknown."""
    candidates = [system.read_bytes_field("proc/meminfo", "MemTotal"), limits.memory_bytes]
    return min((value for value in candidates if value is not None), default=None)


def free_memory_bytes(system: KernelFiles, limits: CgroupLimits) -> int | None:
    """Return the memory that this process can still allocate, or `None` if unknown.

    It is the smaller of the machine's available memory and the free memory of the control group.
    """
    candidates = [system.read_bytes_field("proc/meminfo", "MemAvailable"), limits.memory_free_bytes]
    return min((value for value in candidates if value is not None), default=None)


def _cgroup_folders(system: KernelFiles, controller: str) -> Iterator[str]:
    # In a container, /proc may name the group by its path on the host, while the mount shows the group as the root.
    # One of the parents of the path is then right.
    for line in (system.read("proc/self/cgroup") or "").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if names and controller not in names.split(","):
            continue
        mounts = (names, controller) if names else (".", "unified")
        place = PurePosixPath("/" + path.lstrip("/"))
        for mount in dict.fromkeys(mounts):
            for folder in (place, *place.parents):
                yield f"sys/fs/cgroup/{mount}{folder}"


def _read_cpu_quota(system: KernelFiles, folder: str) -> float | None:
    quota, period = [*(system.read(f"{folder}/cpu.max") or "").split(), "", ""][:2]
    if not quota:
        quota = system.read(f"{folder}/cpu.cfs_quota_us") or ""
        period = system.read(f"{folder}/cpu.cfs_period_us") or ""
    if not (quota.isdigit() and period.isdigit() and int(period) > 0):
        return None  # The kernel writes 'max' (v2) or -1 (v1) if there is no limit.
    return int(quota) / int(period)


def _limited_cgroups(system: KernelFiles) -> list[CgroupMemory]:
    return [
        memory
        for folder in _cgroup_folders(system, "memory")
        if (memory := _read_cgroup_memory(system, folder)) is not None
    ]


def _read_cgroup_memory(system: KernelFiles, folder: str) -> CgroupMemory | None:
    limit, counter, prefix = system.read_int(f"{folder}/memory.max"), "memory.current", ""
    if limit is None:
        limit, counter, prefix = system.read_int(f"{folder}/memory.limit_in_bytes"), "memory.usage_in_bytes", "total_"
    total = system.read_bytes_field("proc/meminfo", "MemTotal")
    if limit is None or (total is not None and limit >= total):
        return None  # Version 1 writes a number larger than any memory if there is no limit.
    used = system.read_int(f"{folder}/{counter}") or 0
    inactive, active = (
        int(system.read_field(f"{folder}/memory.stat", f"{prefix}{kind}_file") or 0) for kind in ("inactive", "active")
    )
    return CgroupMemory(
        str(PurePosixPath(folder)),
        limit,
        free_bytes=max(limit - max(used - inactive, 0), 0),
        unclaimed_bytes=max(limit - max(used - inactive - active, 0), 0),
    )


def trim_heap() -> None:
    """Return freed heap memory to the system if the C library is glibc. Call it after large, infrequent work."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def disable_heap_caching() -> None:
    """Make glibc return freed blocks of 2 MB or more immediately, and use at most two heaps for all threads.

    This suits processes whose many threads briefly hold large blocks. It does nothing with another C library.
    """
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(_M_MMAP_THRESHOLD, 2 << 20)
        set_option(_M_ARENA_MAX, 2)
