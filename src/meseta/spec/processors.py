"""The processors of this process."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Cores that this process may use, where the system tells; else those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
