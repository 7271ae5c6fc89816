"""CPU time of this machine and of some processes, to detect load by other programs during a measurement.

Only Linux is supported. On other systems all readings are zero.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CpuTime:
    """Reading of the CPU time counters."""

    total_s: float
    """CPU seconds of all programs on all processors, including time stolen by the hypervisor."""
    process_s: float
    """CPU seconds of the selected processes."""

    def background_load_since(self, before: CpuTime, elapsed_s: float) -> float:
        """Return the mean number of processors that other programs kept busy since the reading `before`."""
        busy = (self.total_s - before.total_s) - (self.process_s - before.process_s)
        return max(busy, 0.0) / max(elapsed_s, 1e-9)


def read_cpu_time(pids: Sequence[int], processors: Sequence[int] | None = None) -> CpuTime:
    """Read the CPU time of `processors` and of the processes `pids`. `None` means all processors.

    Returns zeros if the system does not provide the counters.
    """
    names = {"cpu"} if processors is None else {f"cpu{number}" for number in processors}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        # Fields in clock ticks: user nice system idle iowait irq softirq steal.
        ticks = [[int(word) for word in words[1:9]] for words in lines if words and words[0] in names]
        busy = sum(sum(counts) - counts[3] - counts[4] for counts in ticks)
        used = sum(_process_ticks(pid) for pid in pids)
    except (OSError, IndexError, ValueError):
        return CpuTime(0.0, 0.0)
    per_s = os.sysconf("SC_CLK_TCK")
    return CpuTime(busy / per_s, used / per_s)


def _process_ticks(pid: int) -> int:
    # The second field is the name in brackets. It may contain spaces and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
