"""State and signal handlers of processes of this host, read from /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessState:
    """State of an existing process."""

    state_code: str
    """State as in `ps`: R, S, D, T, t, Z or X."""
    start_ticks: int
    """Start time of the process in clock ticks since boot. It distinguishes processes that had the same pid."""

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended and has not been reaped yet."""
        return self.state_code in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process. SIGCONT continues it."""
        return self.state_code == "T"

    @property
    def blocked_reason(self) -> str:
        """Description of why the process cannot run, such as 'stopped by a signal'. It is empty if it can run."""
        return {
            "T": "stopped by a signal",
            "t": "stopped by a debugger",
            "D": "blocked in the kernel, for example by a disk that does not respond",
        }.get(self.state_code, "")


def read_process_state(pid: int) -> ProcessState | None:
    """Return the state of a process, or `None` if it does not exist or cannot be read."""
    try:
        # The name of the program may contain spaces and parentheses, so parse the fields after the last one.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return ProcessState(state_code=fields[0], start_ticks=int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def process_start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or `None` if it is unknown."""
    state = read_process_state(pid)
    return None if state is None else state.start_ticks


def has_signal_handler(pid: int, number: int) -> bool:
    """Whether a process has installed a handler for signal `number`."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        # Bit n - 1 of the mask belongs to signal n.
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, IndexError, ValueError, StopIteration):
        return False
    return 0 < number <= 64 and bool(caught >> (number - 1) & 1)
