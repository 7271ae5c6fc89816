"""Short programs in processes of their own, whose crash or silence is told and never shared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Any

from meseta.machine.files import anonymous_file
from meseta.machine.processes import Program, start_program

PEER_EXIT_GRACE_S = 3.0
"""Seconds that the others have after one has failed."""


@dataclass(frozen=True)
class ProcessResult:
    """How a process ended."""

    exit_code: int | None
    """Exit code; negative: the signal that killed it; None: it was stopped at the time limit."""
    stdout: str
    """Standard output."""
    stderr: str
    """Standard error."""

    @property
    def reason(self) -> str:
        """Why it failed: its last words, or what became of it."""
        if self.exit_code is None:
            return "no answer within the time limit"
        if self.exit_code < 0:
            return f"the process was killed by {signal.Signals(-self.exit_code).name}"
        lines = self.stderr.strip().splitlines()
        return lines[-1].strip() if lines else f"the process ended with exit code {self.exit_code} and said nothing"

    def messages(self, *keys: str) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects in standard output, one a line, that have one of `keys`. Lines that libraries print,
        and one that was cut off, are skipped."""
        for line in self.stdout.splitlines():
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict) and message.keys() & set(keys):
                yield message


def run_children(
    module: str,
    environments: Sequence[Mapping[str, str]],
    limit_s: float,
    arguments: Sequence[str] = (),
    inherited: Sequence[int] = (),
) -> list[ProcessResult]:
    """Run `python -P -m module` once for each set of variables (beside the present ones), at the same time.

    `inherited` are open files that they keep. Those that still run after `limit_s` seconds are killed. Raises OSError
    where the system starts no process.
    """
    with ExitStack() as stack:
        files = [
            tuple(stack.enter_context(anonymous_file("meseta-doctor")) for _ in ("out", "err")) for _ in environments
        ]
        processes: list[Program] = []
        try:
            for variables, (out, err) in zip(environments, files, strict=True):
                command = [sys.executable, "-P", "-m", module, *arguments]
                processes.append(start_program(command, variables, pass_fds=inherited, stdout=out, stderr=err))
            _wait(processes, limit_s)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # one that waits for a broken driver cannot be killed
                    process.wait(PEER_EXIT_GRACE_S)
        texts = [[_read_text(file) for file in pair] for pair in files]
    return [ProcessResult(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


def _wait(processes: Sequence[Program], limit_s: float) -> None:
    """Until all have ended, the limit is over, or one has failed and the others had a moment."""
    deadline = time.monotonic() + limit_s
    has_failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if not has_failed and any(process.poll() for process in processes):
            has_failed, deadline = True, min(deadline, time.monotonic() + PEER_EXIT_GRACE_S)
        time.sleep(0.02)


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
