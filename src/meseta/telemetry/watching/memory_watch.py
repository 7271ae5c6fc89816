"""Check of the memory limit of control groups before a start, and warnings when it is nearly reached."""

from __future__ import annotations

from meseta.errors import MesetaError
from meseta.system.kernel import KernelFiles, read_cgroup_limits, tightest_cgroup
from meseta.telemetry.formatting import format_bytes, format_quantity

# With torch 2.13 for CPUs and Python 3.11, the kernel killed the process in a group of 241 MB. With a higher limit it
# used 255 MB.
MIN_START_BYTES = 245_000_000
"""Minimum memory of a process that imports torch and opens its dataset."""
# Measured by tests/cli/test_memory_limits.py: 350 MB on 2 ranks and 464 MB on 4.
MIN_RANK_BYTES = 52_000_000
"""Additional memory of each rank of `--nproc`, until its model is planned."""
MIN_FREE_RATIO = 0.04
"""Share of a memory limit below which a warning is printed."""
_RAISE_LIMIT_HINT = "raise the limit (memory.max of the group, docker run --memory)"


def check_start_memory(num_ranks: int, system: KernelFiles | None = None) -> None:
    """Raise MesetaError if the control group of this process allows less memory than a start on `num_ranks` needs."""
    # The kernel would kill the process without a message.
    limit = read_cgroup_limits(system or KernelFiles()).memory_bytes
    need = MIN_START_BYTES + (MIN_RANK_BYTES * num_ranks if num_ranks > 1 else 0)
    if limit is None or limit >= need:
        return
    fewer = ", or use fewer ranks (--nproc)" if num_ranks > 1 else ""
    raise MesetaError(
        f"the control group allows {format_bytes(limit)} of memory, but a start on "
        f"{format_quantity(num_ranks, 'rank')} needs "
        f"{format_bytes(need)} before any table: {_RAISE_LIMIT_HINT}{fewer}"
    )


def cgroup_limit_text(system: KernelFiles | None = None) -> str:
    """Return a phrase such as 'memory of its control group (300 MB)', or 'memory of this machine' without a limit."""
    memory = tightest_cgroup(system or KernelFiles())
    return (
        "memory of this machine"
        if memory is None
        else (f"memory of its control group ({format_bytes(memory.limit_bytes)})")
    )


class MemoryWatch:
    """Watcher that warns when the memory of a control group is nearly exhausted.

    It warns once. It warns again if the memory recovers in between, or if the limit changes.
    """

    def __init__(self, system: KernelFiles | None = None) -> None:
        self._system = system or KernelFiles()
        self._warned: tuple[str, int] | None = None

    def poll(self) -> list[str]:
        """Return the warnings to print."""
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
