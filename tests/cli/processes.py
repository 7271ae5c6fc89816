"""Real commands in processes of their own, to be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import become_command, forking
from small_run import environment

PATIENCE_S = 180
"""For starting torch on a busy machine, not for anything that is measured."""


def fact_of(pid: int, name: str) -> str:
    """What the system says of a process; nothing where it has ended, be it between two looks at it."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def stat_of(pid: int) -> list[str]:
    """State, parent, group, session and so on of a process; nothing where it has ended, though its record may stand."""
    fields = fact_of(pid, "stat").rpartition(")")[2].split()  # a name may hold blanks
    return fields if fields and fields[0] not in "ZX" else []


class Command:
    """`meseta ...` in a session of its own, or another `program` of `forked.PROGRAMS`; its ranks are in it too.

    With `launcher`, options of Python, that starts it; else it is forked from a process that has imported torch.
    """

    def __init__(
        self, folder: Path, *arguments: object, launcher: tuple[str, ...] = (), program: str = "meseta"
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        words = [*map(str, arguments)]
        self.process = forking().Process(target=_run, args=(program, launcher, words, folder, self.out, self.err))
        self.out.touch()
        self.err.touch()
        self.process.start()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        self.process.join(timeout_s)
        code = self.process.exitcode
        if code is None:
            self.send(signal.SIGKILL)
            raise TimeoutError(f"a command did not end within {timeout_s} s: {self.err.read_text()}")
        return code

    def send(self, number: int, to_all: bool = True) -> None:
        """A signal to the whole session, or to the command alone; nobody hears it where all has ended."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if to_all else os.kill)(self.pid, number)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def succeed(self) -> Command:
        assert self.wait() == 0, self.err.read_text()
        return self

    def members(self) -> list[int]:
        """Processes of the session that are alive, without the launcher."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self.pid:
                fields = stat_of(int(name))
                if fields and int(fields[3]) == self.pid:
                    found.append(int(name))
        return sorted(found)

    def ranks(self) -> dict[int, int]:
        """Process of each rank that `--nproc` has started."""
        names = {pid: fact_of(pid, "comm").strip() for pid in self.members()}
        return {int(name.removeprefix("meseta rank ")): pid for pid, name in names.items() if "rank" in name}

    def readers(self) -> list[int]:
        """Processes that decode rows for the command, and their dispatcher."""
        return [pid for pid in self.members() if "readers" in fact_of(pid, "cmdline").split("\0")]

    def until(self, condition: Callable[[], Any], what: str, interval_s: float = 0.005) -> None:
        """Poll; fails when the command ends first, so that a kill really lands where it was meant to."""
        assert self.reached(condition, what, interval_s), f"ended with {self.process.exitcode} before {what}:\n" + (
            self.err.read_text()
        )

    def reached(self, condition: Callable[[], Any], what: str, interval_s: float = 0.0005) -> bool:
        """Poll; whether the condition came before the command ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.exitcode is not None:
                return False
            assert time.monotonic() < deadline, f"{what} did not come"
            time.sleep(interval_s)
        return True


def _run(program: str, launcher: tuple[str, ...], arguments: list[str], folder: Path, out: Path, err: Path) -> None:
    """In the new process."""
    os.setsid()
    with Path(os.devnull).open() as nothing, out.open("wb") as output, err.open("wb") as error:
        files = [nothing.fileno(), output.fileno(), error.fileno()]
        become_command(arguments, folder, environment(), files, launcher, program)
