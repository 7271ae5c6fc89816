"""Memory that control groups leave: whether a start fits, and a warning before the kernel kills a process."""

from __future__ import annotations

from meseta.errors import MesetaError
from meseta.machine.system import System, read_limits, tightest_memory
from meseta.telemetry.shown import byte_size, plural

START_BYTES = 245_000_000
"""Charge of a control group by one process that imports torch and opens its dataset. With torch 2.13 for CPUs and
Python 3.11, the kernel killed it in a group of 241 MB; with more it used 255 MB."""
RANK_BYTES = 52_000_000
"""What each rank of `--nproc` adds to that, until its model is planned: 350 MB on 2 ranks and 464 MB on 4, measured in
the same way by tests/cli/test_memory_limits.py."""
MIN_LEFT_RATIO = 0.04
"""Share of a limit that has to be left; with less a warning comes."""
_RAISE = "raise the limit (memory.max of the group, docker run --memory)"


def check_start_memory(num_ranks: int, system: System | None = None) -> None:
    """Raise MesetaError if the control group of this process allows less memory than a start on `num_ranks` needs: the
    kernel would kill it without a message."""
    limit = read_limits(system or System()).memory_bytes
    need = START_BYTES + (RANK_BYTES * num_ranks if num_ranks > 1 else 0)
    if limit is None or limit >= need:
        return
    fewer = ", or use fewer ranks (--nproc)" if num_ranks > 1 else ""
    raise MesetaError(
        f"the control group allows {byte_size(limit)} of memory, and a start on {plural(num_ranks, 'rank')} needs "
        f"{byte_size(need)} before any table: {_RAISE}{fewer}"
    )


def group_limit_text(system: System | None = None) -> str:
    """Return 'memory of its control group (300 MB)', or 'memory of this machine' if no group has a limit."""
    memory = tightest_memory(system or System())
    return (
        "memory of this machine"
        if memory is None
        else (f"memory of its control group ({byte_size(memory.limit_bytes)})")
    )


class MemoryWatch:
    """Warns once when a control group is nearly full, and again after it was not, or when its limit has changed."""

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()
        self._warned: tuple[str, int] | None = None

    def look(self) -> list[str]:
        """Return the lines to print."""
        memory = tightest_memory(self._system)
        if memory is None or memory.unclaimed_bytes >= MIN_LEFT_RATIO * memory.limit_bytes:
            self._warned = None
            return []
        key = memory.folder, memory.limit_bytes
        if key == self._warned:
            return []
        self._warned = key
        return [
            f"warning: {byte_size(memory.unclaimed_bytes)} are left of the {byte_size(memory.limit_bytes)} of memory "
            f"that control group '/{memory.folder}' allows; the kernel kills a process of this run when none is left; "
            f"{_RAISE}, or use smaller tables or batches"
        ]
