"""Two built source trees, their commands, and what their results differ in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

SHELL = {**os.environ, "COLUMNS": "200"}
FORKED = {**SHELL, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SERVER = Path(__file__).with_name("command_server.py")


class Checkout:
    """A built source tree, and the commands of its .venv."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        self.interpreter = str(root / ".venv/bin/python")

    @cached_property
    def _files(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix=f"meseta-house-{self.name}-")

    @cached_property
    def _server(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self.interpreter, str(SERVER)], cwd=self.root, env=FORKED, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def meseta(self, *arguments: object, when: Callable[[], Any] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command, forked from a process that has imported torch; its output, whatever its exit code.

        With `when` all its processes are killed at that moment: the exit code is -SIGKILL, or that of a command which
        had ended before.
        """
        words = [*map(str, arguments)]
        out, err = (Path(self._files.name) / name for name in ("out.txt", "err.txt"))
        requests, answers = self._server.stdin, self._server.stdout
        assert requests is not None and answers is not None
        requests.write(json.dumps([words, str(self.root), str(out), str(err)]).encode() + b"\n")
        process = int(answers.readline())
        if when is not None:
            while not when() and not select.select([answers], [], [], 0.001)[0]:
                pass
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        code = int(answers.readline())
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    def close(self) -> None:
        """End the process that commands are forked from."""
        if "_server" in vars(self):
            with self._server as server:
                assert server.stdin is not None
                server.stdin.close()
            self._files.cleanup()

    def succeed(self, *arguments: object) -> None:
        """Run a command that has to end well."""
        if (done := self.meseta(*arguments)).returncode:
            raise SystemExit(f"{self.name}: meseta {' '.join(map(str, arguments))}: {done.stderr[-2000:]}")

    def command(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a command in a new process, as a shell does."""
        return self._run("-m", "meseta.cli.main", *arguments, folder=self.root)

    def python(self, *arguments: object) -> str:
        """Run a script by its interpreter, in its benchmarks; what it prints."""
        done = self._run(*arguments, folder=self.root / "benchmarks")
        if done.returncode:
            raise SystemExit(f"{self.name}: {str(arguments[0])[:60]}: {done.stderr[-2000:]}")
        return done.stdout

    def _run(self, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [self.interpreter, *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=folder, env=SHELL, stdin=subprocess.DEVNULL
        )


@dataclass(frozen=True)
class Allowed:
    """A difference that is meant."""

    part: str
    """A pattern of the part's name."""
    what: str
    """A pattern of `Difference.what`."""
    why: str


@dataclass(frozen=True)
class Difference:
    """One thing that both checkouts make, and make differently."""

    what: str
    where: str
    detail: str = ""


@dataclass
class Ledger:
    """What one part has compared."""

    part: str
    num_compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    """Lines for the table."""

    def compare(self, where: str, what: str, before: Any, after: Any) -> None:
        """Note whether two results are equal."""
        self.num_compared += 1
        if before != after:
            self.differ(where, what, first_difference(before, after))

    def differ(self, where: str, what: str, detail: str = "") -> None:
        """Note a difference."""
        self.differences.append(Difference(what, where, detail))
        print(f"{self.part}: {what}: {where}: {detail}", file=sys.stderr, flush=True)

    def split(self, allowed: tuple[Allowed, ...]) -> tuple[list[Difference], dict[str, list[Difference]]]:
        """Differences that nothing allows; and, by the reason, those that something does."""
        refused, meant = [], {}
        rules = [one for one in allowed if fnmatchcase(self.part, one.part)]
        for difference in self.differences:
            whys = [one.why for one in rules if fnmatchcase(difference.what, one.what)]
            if whys:
                meant.setdefault(whys[0], []).append(difference)
            else:
                refused.append(difference)
        return refused, meant


def table(ledgers: list[Ledger], allowed: tuple[Allowed, ...]) -> list[str]:
    """One row for each part; below it its figures, and every kind of difference with the places where it is."""
    lines = ["| part | compared | differ | allowed |", "| --- | --- | --- | --- |"]
    below: list[str] = []
    for ledger in ledgers:
        refused, meant = ledger.split(allowed)
        lines.append(f"| {ledger.part} | {ledger.num_compared:,} | {len(refused)} | {sum(map(len, meant.values()))} |")
        below += [f"{ledger.part}: {figure}" for figure in ledger.figures]
        below += [f"{ledger.part}: DIFFERS: {one.what}: {one.where}: {one.detail}" for one in refused]
        for why, found in meant.items():
            names = ", ".join(sorted({one.what for one in found}))
            below.append(f"{ledger.part}: {len(found)} allowed: {why} ({names}; first in {found[0].where}: "
                         f"{found[0].detail})")  # fmt: skip
    return [*lines, "", *below]


def first_difference(before: Any, after: Any) -> str:
    """Where two results begin to differ, in a line."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}, key=str):
            if before.get(key, _NOTHING) != after.get(key, _NOTHING):
                return f"{key}: {first_difference(before.get(key, _NOTHING), after.get(key, _NOTHING))}"
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        for place, (old, new) in enumerate(zip(before, after, strict=False)):
            if old != new:
                return f"[{place}] {first_difference(old, new)}"
        return f"{len(before)} and {len(after)} entries"
    if isinstance(before, str) and isinstance(after, str):
        place = len(commonprefix([before, after]))  # noqa: RUF071 (characters are meant)
        return f"{_near(before, place)} became {_near(after, place)}"
    return f"{str(before)[:100]} became {str(after)[:100]}"


_NOTHING = "nothing"


def _near(text: str, place: int) -> str:
    return repr(text[max(place - 30, 0) : place + 60])


def files_of(folder: Path) -> dict[str, str]:
    """The digest of every file under a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
