"""Whether others used the processor while something was timed (Linux; elsewhere nobody is ever seen)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CpuTime:
    """Processor seconds since some start."""

    total_s: float
    """Of everybody, all processors together; time that the hypervisor took away counts too."""
    process_s: float
    """Of the processes asked for."""

    def background_load_since(self, before: CpuTime, elapsed_s: float) -> float:
        """Processors that others kept busy, on average, between two readings."""
        busy = (self.total_s - before.total_s) - (self.process_s - before.process_s)
        return max(busy, 0.0) / max(elapsed_s, 1e-9)


def read_cpu_time(pids: Sequence[int], processors: Sequence[int] | None = None) -> CpuTime:
    """The present reading, for processes `pids`, of `processors`, None: all; zeros where the system does not tell."""
    names = {"cpu"} if processors is None else {f"cpu{number}" for number in processors}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        # user nice system idle iowait irq softirq steal, in clock ticks
        ticks = [[int(word) for word in words[1:9]] for words in lines if words and words[0] in names]
        busy = sum(sum(own) - own[3] - own[4] for own in ticks)
        own = sum(_process_ticks(pid) for pid in pids)
    except (OSError, IndexError, ValueError):
        return CpuTime(0.0, 0.0)
    per_s = os.sysconf("SC_CLK_TCK")
    return CpuTime(busy / per_s, own / per_s)


def _process_ticks(pid: int) -> int:
    """User and system time of a process; its name, which may hold blanks, ends with the last bracket."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
