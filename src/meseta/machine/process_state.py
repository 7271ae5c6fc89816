"""What the kernel says of a process of this host, in /proc: whether it is there, runs, and hears a signal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessState:
    """A process that is there."""

    letter: str
    """As in ps: R, S, D, T, t, Z, X."""
    start: int
    """When it began, in ticks since the host did: a later process of its number has another."""

    @property
    def has_ended(self) -> bool:
        """Whether its record alone is left."""
        return self.letter in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, so that it continues at SIGCONT."""
        return self.letter == "T"

    @property
    def held(self) -> str:
        """Why it does not run, ready to stand in a sentence; '' where nothing but its own code keeps it."""
        return {
            "T": "stopped by a signal",
            "t": "stopped by a debugger",
            "D": "held up by the system, as by a disk that does not answer",
        }.get(self.letter, "")


def state_of(pid: int) -> ProcessState | None:
    """Of a process; None where there is none, or where the system does not say."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return ProcessState(letter=fields[0], start=int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def start_of(pid: int) -> int | None:
    """When it began; None where the system does not say."""
    state = state_of(pid)
    return None if state is None else state.start


def catches(pid: int, number: int) -> bool:
    """Whether a process does something of its own at a signal, which would else end it."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, IndexError, ValueError, StopIteration):
        return False
    return 0 < number <= 64 and bool(caught >> (number - 1) & 1)
