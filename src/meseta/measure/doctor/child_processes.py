"""Child processes of the doctor. A crash or hang of a child is reported and does not affect the parent."""

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

from meseta.system.files import anonymous_file
from meseta.system.processes import Program, start_program

PEER_EXIT_GRACE_S = 3.0


@dataclass(frozen=True)
class ProcessResult:
    """Exit code and output of a child process."""

    exit_code: int | None
    """Exit code. A negative value is the number of the signal that killed the process. `None` means that it was still
    running at the time limit."""
    stdout: str
    stderr: str

    @property
    def reason(self) -> str:
        """Reason for a failure: last line of standard error, or a description of how the process ended."""
        if self.exit_code is None:
            return "no answer within the time limit"
        if self.exit_code < 0:
            return f"the process was killed by {signal.Signals(-self.exit_code).name}"
        lines = self.stderr.strip().splitlines()
        return lines[-1].strip() if lines else f"the process ended with exit code {self.exit_code} and no error output"

    def messages(self, *keys: str) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects, one per line, in standard output that have one of `keys`."""
        # Other output, such as that of libraries, and incomplete lines are skipped.
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
    """Run `python -P -m module` concurrently, once per environment, and return the results in the same order.

    Args:
        module: Module to run.
        environments: Environment variables of each process, in addition to those of this process.
        limit_s: Seconds after which running processes are killed.
        arguments: Command-line arguments of the module.
        inherited: File descriptors that the processes inherit.

    Raises OSError if a process cannot be started.
    """
    with ExitStack() as stack:
        # Files, unlike pipes, need no reader while the processes run.
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
                with suppress(subprocess.TimeoutExpired):  # A process blocked in a broken driver cannot be killed.
                    process.wait(PEER_EXIT_GRACE_S)
        texts = [[_read_text(file) for file in pair] for pair in files]
    return [ProcessResult(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


def _wait(processes: Sequence[Program], limit_s: float) -> None:
    """Wait until all processes have ended, `limit_s` is over, or PEER_EXIT_GRACE_S has passed since one failed."""
    deadline = time.monotonic() + limit_s
    has_failed = False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if not has_failed and any(process.poll() for process in processes):
            has_failed, deadline = True, min(deadline, time.monotonic() + PEER_EXIT_GRACE_S)
        time.sleep(0.02)


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
