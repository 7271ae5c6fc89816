"""Memory that control groups leave: whether a start fits, and a warning before the kernel kills a process."""

from __future__ import annotations

from meseta.errors import MesetaError
from meseta.machine.kernel import KernelFiles, read_cgroup_limits, tightest_cgroup
from meseta.telemetry.formatting import format_bytes, format_quantity

MIN_START_BYTES = 245_000_000
"""Charge of a control group by one process that imports torch and opens its dataset. With torch 2.13 for CPUs and
Python 3.11, the kernel killed it in a group of 241 MB; with more it used 255 MB."""
MIN_RANK_BYTES = 52_000_000
"""What each rank of `--nproc` adds to that, until its model is planned: 350 MB on 2 ranks and 464 MB on 4, measured in
the same way by tests/cli/test_memory_limits.py."""
MIN_FREE_RATIO = 0.04
"""Share of a limit that has to be left; with less a warning comes."""
_RAISE_LIMIT_HINT = "raise the limit (memory.max of the group, docker run --memory)"


def check_start_memory(num_ranks: int, system: KernelFiles | None = None) -> None:
    """Raise MesetaError if the control group of this process allows less memory than a start on `num_ranks` needs: the
    kernel would kill it without a message."""
    limit = read_cgroup_limits(system or KernelFiles()).memory_bytes
    need = MIN_START_BYTES + (MIN_RANK_BYTES * num_ranks if num_ranks > 1 else 0)
    if limit is None or limit >= need:
        return
    fewer = ", or use fewer ranks (--nproc)" if num_ranks > 1 else ""
    raise MesetaError(
        f"the control group allows {format_bytes(limit)} of memory, and a start on "
        f"{format_quantity(num_ranks, 'rank')} needs "
        f"{format_bytes(need)} before any table: {_RAISE_LIMIT_HINT}{fewer}"
    )


def cgroup_limit_text(system: KernelFiles | None = None) -> str:
    """Return 'memory of its control group (300 MB)', or 'memory of this machine' if no group has a limit."""
    memory = tightest_cgroup(system or KernelFiles())
    return (
        "memory of this machine"
        if memory is None
        else (f"memory of its control group ({format_bytes(memory.limit_bytes)})")
    )


class MemoryWatch:
    """Warns once when a control group is nearly full, and again after it was not, or when its limit has changed."""

    def __init__(self, system: KernelFiles | None = None) -> None:
        self._system = system or KernelFiles()
        self._warned: tuple[str, int] | None = None

    def poll(self) -> list[str]:
        """Return the lines to print."""
        memory = tightest_cgroup(self._system)
        if memory is None or memory.unclaimed_bytes >= MIN_FREE_RATIO * memory.limit_bytes:
            self._warned = None
            return []
        key = memory.folder, memory.limit_bytes
        if key == self._warned:
            return []
        self._warned = key
        return [
            f"warning: {format_bytes(memory.unclaimed_bytes)} are left of the {format_bytes(memory.limit_bytes)} of "
            f"memory "
            f"that control group '/{memory.folder}' allows; the kernel kills a process of this run when none is left; "
            f"{_RAISE_LIMIT_HINT}, or use smaller tables or batches"
        ]
