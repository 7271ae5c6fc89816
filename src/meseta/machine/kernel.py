"""What the kernel says of this machine in /proc and /sys, and the limits of its control groups."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NICENESS = 10
"""A tenth of the processor time that a thread has which does not give way."""
_OOM_SCORE_STEP, _MAX_OOM_SCORE = 500, 1000
"""Thousandths of the memory: a process that has just been forked holds less than the one that has imported torch."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""As malloc.h has them."""


@dataclass(frozen=True)
class KernelFiles:
    """Files of the kernel."""

    root: Path = Path("/")
    """Where /proc and /sys are."""

    def read(self, path: str) -> str | None:
        """The text of a file such as 'proc/meminfo'; None where it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def read_int(self, path: str) -> int | None:
        """The whole number that a file holds; None where it holds another thing, such as 'max'."""
        text = self.read(path) or ""
        return int(text) if text.lstrip("-").isdigit() else None

    def read_field(self, path: str, name: str) -> str | None:
        """The value in the first line 'name: value', or 'name value', of a file."""
        for line in (self.read(path) or "").splitlines():
            key, _, value = line.partition(":" if ":" in line else " ")
            if key.strip() == name:
                return value.strip()
        return None

    def read_bytes_field(self, path: str, name: str) -> int | None:
        """A field in kB, as in /proc/meminfo, in bytes."""
        words = (self.read_field(path, name) or "").split()
        return int(words[0]) * 1024 if words and words[0].isdigit() else None


def lower_priority() -> None:
    """Let the scheduler prefer other threads to this one and to those that it starts, as on Linux; each has its own
    niceness there."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def boot_id(system: KernelFiles | None = None) -> str:
    """Of this kernel since it was started: containers share it; empty where the kernel does not tell."""
    return (system or KernelFiles()).read("proc/sys/kernel/random/boot_id") or ""


def clock_id(system: KernelFiles | None = None) -> str:
    """Processes that read one CLOCK_MONOTONIC, which time.perf_counter() is, have one: those of a kernel, in a
    namespace of time (time_namespaces(7)). Empty where the kernel does not tell."""
    system = system or KernelFiles()
    try:
        namespace = os.readlink(system.root / "proc/self/ns/time")
    except OSError:  # a kernel without them
        namespace = ""
    boot = boot_id(system)
    return boot and f"{boot} {namespace}"


@dataclass(frozen=True)
class CgroupLimits:
    """What control groups leave to this process; None: no limit."""

    num_cores: float | None
    """Processor seconds per second."""
    memory_bytes: int | None
    memory_free_bytes: int | None
    """Of `memory_bytes`; the page cache, which the kernel takes back, counts as free."""


def read_cgroup_limits(system: KernelFiles) -> CgroupLimits:
    """The tightest limits of the group of this process and of all groups around it, versions 1 and 2."""
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
    """Memory of a control group that has a limit, in bytes."""

    folder: str
    """Path of the group's files."""
    limit_bytes: int
    free_bytes: int
    """Of the limit; inactive page cache, which the kernel reclaims first, counts as free."""
    unclaimed_bytes: int
    """Of the limit; the whole page cache counts as free. The kernel kills a process when none is left."""


def tightest_cgroup(system: KernelFiles) -> CgroupMemory | None:
    """Return the group with the fewest unclaimed bytes, of this process's and all around it; None if none has a
    limit."""
    return min(_limited_cgroups(system), key=lambda memory: memory.unclaimed_bytes, default=None)


def num_oom_kills(system: KernelFiles) -> int:
    """Return how many processes the kernel has killed for lack of memory in the control group of this process, or on
    this machine if the groups do not count them."""
    for folder in _cgroup_folders(system, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (count := system.read_field(f"{folder}/{name}", "oom_kill")) is not None:
                return int(count)
    return int(system.read_field("proc/vmstat", "oom_kill") or 0)


def raise_oom_score(path: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Let the kernel kill this process before the one that started it if memory runs out, as on Linux."""
    with suppress(OSError, ValueError):
        score = int(path.read_text())
        path.write_text(str(min(score + _OOM_SCORE_STEP, _MAX_OOM_SCORE)))


def total_memory_bytes(system: KernelFiles, limits: CgroupLimits) -> int | None:
    """Memory of this machine, or what a control group grants of it. None where the system does not tell."""
    found = [system.read_bytes_field("proc/meminfo", "MemTotal"), limits.memory_bytes]
    return min((value for value in found if value is not None), default=None)


def free_memory_bytes(system: KernelFiles, limits: CgroupLimits) -> int | None:
    """Memory that this process may still take: what the machine has available, and no control group forbids. None
    where the system does not tell."""
    found = [system.read_bytes_field("proc/meminfo", "MemAvailable"), limits.memory_free_bytes]
    return min((value for value in found if value is not None), default=None)


def _cgroup_folders(system: KernelFiles, controller: str) -> Iterator[str]:
    """Folders that may hold a controller's files, the innermost first.

    A container may see its own group as the root while /proc names it as the host does; walking up finds it.
    """
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
        return None  # 'max' and -1 are no limits
    return int(quota) / int(period)


def _limited_cgroups(system: KernelFiles) -> list[CgroupMemory]:
    """Return the groups with a limit, the innermost first."""
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
        return None  # version 1 writes "no limit" as a number beyond all memory
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
    """Hand what this process has freed back to the system, where the C library keeps it (glibc): after large work that
    does not come again soon."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def disable_heap_caching() -> None:
    """From now on hand blocks of 2 MB and more back to the system as soon as they are freed, and let all threads share
    two heaps, where the C library asks (glibc): for a process of many threads that hold much for moments."""
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(_M_MMAP_THRESHOLD, 2 << 20)
        set_option(_M_ARENA_MAX, 2)
