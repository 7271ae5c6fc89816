"""Peak anonymous memory of a process by phase, sampled by another process."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common.processes import script_environment

PHASE_BYTES = 64
INTERVAL_S = 0.003


class PhaseFile:
    """Name of the current phase of a process, in shared memory."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(b"start".ljust(PHASE_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), PHASE_BYTES)

    @property
    def phase(self) -> str:
        return bytes(self._memory).decode().strip()

    @phase.setter
    def phase(self, name: str) -> None:
        self._memory[:] = name.encode().ljust(PHASE_BYTES)


def anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), 0)


def peaks_of(arguments: Sequence[object], folder: Path) -> tuple[int, dict[str, int], str]:
    """Run Python with `arguments`. Returns (exit code, peak bytes by phase, end of the output)."""
    (folder / "phase").unlink(missing_ok=True)
    phases, log = PhaseFile(folder / "phase"), folder / "log"
    # A benchmark that is killed takes its process with it.
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, *map(str, arguments)]
    peaks: dict[str, int] = {}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=script_environment(OMP_NUM_THREADS="2"), stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            phase, held = phases.phase, anonymous_bytes(process.pid)
            peaks[phase] = max(peaks.get(phase, 0), held)
            time.sleep(INTERVAL_S)
    return process.returncode, peaks, log.read_text()[-2000:]
