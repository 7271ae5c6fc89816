"""Real commands in processes of their own, to be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_run import environment

PATIENCE_S = 90
"""For starting torch on a busy machine, not for anything that is measured."""


class Command:
    """`python -m meseta.cli.main ...` in a session of its own; its ranks are in it too."""

    def __init__(self, folder: Path, *arguments: object, launcher: tuple[str, ...] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        command = [sys.executable, *launcher, "-m", "meseta.cli.main", *map(str, arguments)]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, env=environment(), start_new_session=True, cwd=folder
            )

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise

    def succeed(self) -> Command:
        assert self.wait() == 0, self.err.read_text()
        return self

    def members(self) -> list[int]:
        """Processes of the session that are alive, without the launcher."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[3]) == self.process.pid and fields[0] not in "ZX":
                    found.append(int(entry.name))
        return sorted(found)

    def ranks(self) -> dict[int, int]:
        """Process of each rank that `--nproc` has started."""
        names = {}
        for pid in self.members():
            with contextlib.suppress(OSError):
                names[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        return {int(name.removeprefix("meseta rank ")): pid for pid, name in names.items() if "rank" in name}

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Poll; fails when the command ends first, so that a kill really lands where it was meant to."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n" + (
                self.err.read_text()
            )
            assert time.monotonic() < deadline, f"{what} did not come"
            time.sleep(0.0005)
