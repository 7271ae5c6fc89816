"""What memory a process takes, as Linux tells it."""

from __future__ import annotations

from pathlib import Path


def memory_bytes(kind: str) -> int:
    """A field of /proc/self/status: VmRSS, or VmHWM, the most since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {kind}")


def reset_peak() -> None:
    """From now on VmHWM counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
