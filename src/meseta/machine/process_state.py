"""What the kernel says of a process of this host, in /proc: whether it is there, runs, and hears a signal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessState:
    """A process that is there."""

    state_code: str
    """As in ps: R, S, D, T, t, Z, X."""
    start_ticks: int
    """When it began, in ticks since the host did: a later process of its number has another."""

    @property
    def has_ended(self) -> bool:
        """Whether its record alone is left."""
        return self.state_code in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, so that it continues at SIGCONT."""
        return self.state_code == "T"

    @property
    def blocked_reason(self) -> str:
        """Why it does not run, ready to stand in a sentence; '' where nothing but its own code keeps it."""
        return {
            "T": "stopped by a signal",
            "t": "stopped by a debugger",
            "D": "held up by the system, as by a disk that does not answer",
        }.get(self.state_code, "")


def read_process_state(pid: int) -> ProcessState | None:
    """Of a process; None where there is none, or where the system does not say."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return ProcessState(state_code=fields[0], start_ticks=int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def process_start_ticks(pid: int) -> int | None:
    """When it began; None where the system does not say."""
    state = read_process_state(pid)
    return None if state is None else state.start_ticks


def has_signal_handler(pid: int, number: int) -> bool:
    """Whether a process does something of its own at a signal, which would else end it."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, IndexError, ValueError, StopIteration):
        return False
    return 0 < number <= 64 and bool(caught >> (number - 1) & 1)
