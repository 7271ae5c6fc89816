"""Commands in separate processes, which tests can kill."""

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
"""Timeout that allows for starting torch on a busy machine. No measurement uses it."""


def fact_of(pid: int, name: str) -> str:
    """Return a file of /proc about a process, or an empty string if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def stat_of(pid: int) -> list[str]:
    """Return the fields of a process's stat file from the state on. The list is empty if the process has ended or is a
    zombie."""
    fields = fact_of(pid, "stat").rpartition(")")[2].split()  # a name may hold blanks
    return fields if fields and fields[0] not in "ZX" else []


class Command:
    """A command in a new session, which includes its ranks: `meseta`, or another `program` of `forked.PROGRAMS`.

    It is forked from a process that has imported torch. With `launcher`, which are options of Python, it is executed.
    """

    def __init__(
        self, folder: Path, *arguments: object, launcher: tuple[str, ...] = (), program: str = "meseta"
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        words = [*map(str, arguments)]
        if (program, words[:1]) == ("meseta", ["train"]):
            words.append("--verbose")  # Tests wait for the lines of steps.
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
        """Send a signal to the whole session, or only to the command. Do nothing if it has ended."""
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
        """Return the live processes of the session except the launcher."""
        pids = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self.pid:
                fields = stat_of(int(name))
                if fields and int(fields[3]) == self.pid:
                    pids.append(int(name))
        return sorted(pids)

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that `--nproc` has started."""
        names = {pid: fact_of(pid, "comm").strip() for pid in self.members()}
        return {int(name.removeprefix("meseta rank ")): pid for pid, name in names.items() if "rank" in name}

    def readers(self) -> list[int]:
        """Return the processes that decode rows for the command, and their dispatcher."""
        return [pid for pid in self.members() if "readers" in fact_of(pid, "cmdline").split("\0")]

    def until(self, condition: Callable[[], Any], what: str, interval_s: float = 0.005) -> None:
        """Poll until the condition holds. Fail if the command ends first, as a kill would then come too late."""
        assert self.reached(condition, what, interval_s), f"ended with {self.process.exitcode} before {what}:\n" + (
            self.err.read_text()
        )

    def reached(self, condition: Callable[[], Any], what: str, interval_s: float = 0.0005) -> bool:
        """Whether the condition holds before the command ends."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.exitcode is not None:
                return False
            assert time.monotonic() < deadline, f"{what} did not come"
            time.sleep(interval_s)
        return True


def _run(program: str, launcher: tuple[str, ...], arguments: list[str], folder: Path, out: Path, err: Path) -> None:
    os.setsid()
    with Path(os.devnull).open() as nothing, out.open("wb") as output, err.open("wb") as error:
        files = [nothing.fileno(), output.fileno(), error.fileno()]
        become_command(arguments, folder, environment(), files, launcher, program)
