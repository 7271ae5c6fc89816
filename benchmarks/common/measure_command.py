"""Processor time and peak memory of a command on one core.

    python benchmarks/common/measure_command.py RESULT COMMAND ...

The command is the child of a small process, since Linux counts the memory of the parent in the peak of a child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Measured(NamedTuple):
    processor_s: float
    """User and system time of the command and its children."""
    seconds: float
    peak_bytes: int
    output: str

    def numbers(self) -> dict[str, float]:
        return {"processor_s": self.processor_s, "seconds": self.seconds, "peak_bytes": self.peak_bytes}


def measure_command(command: Sequence[object], **variables: str) -> Measured:
    """Run a command on one core with one thread. Exits with its last output if it fails."""
    words = [*map(str, command)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        done = subprocess.run(
            [sys.executable, "-S", __file__, str(result), *words],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stdout[-300:]} {done.stderr[-1000:]}")
        return Measured(**json.loads(result.read_text()), output=done.stdout)


def main() -> None:
    result, *command = sys.argv[1:]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    start_s = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    numbers = {
        "processor_s": usage.ru_utime + usage.ru_stime,
        "seconds": time.perf_counter() - start_s,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    Path(result).write_text(json.dumps(numbers))
    sys.exit(os.waitstatus_to_exitcode(status) != 0)


if __name__ == "__main__":
    main()
