"""Memory of this process on Linux."""

from __future__ import annotations

from pathlib import Path


def memory_bytes(kind: str) -> int:
    """Return a field of /proc/self/status, such as VmRSS, or VmHWM, the peak since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {kind}")


def reset_peak() -> None:
    """Reset VmHWM."""
    Path("/proc/self/clear_refs").write_text("5")
