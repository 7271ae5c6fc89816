"""Runs `meseta ...` on every rank of a testbed of hosts. Ranks are forked and enter the network of their host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from cli.processes import PATIENCE_S, Command
from forked import become_command, forking
from hosts import Hosts
from small_run import environment


class HostsCommand(Command):
    """Command on several hosts. Each rank has a session, and all ranks except 0 write to separate files."""

    def __init__(self, hosts: Hosts, folder: Path, *arguments: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err, self.folder = folder / "0.out", folder / "0.err", folder
        self.processes: list[BaseProcess] = []
        for rank in range(hosts.num_ranks):
            files = [folder / f"{rank}.{stream}" for stream in ("out", "err")]
            for file in files:
                file.touch()
            variables = {**environment(), **hosts.variables(rank)}
            arguments_of_run = (hosts.namespace_files(rank), [*map(str, arguments)], folder, variables, files)
            process = forking().Process(target=_run, args=arguments_of_run, daemon=True)
            process.start()
            self.processes.append(process)
        self.process = self.processes[0]

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for all ranks and return the first nonzero exit code, or 0."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        codes = [process.exitcode for process in self.processes]
        if None in codes:
            self.send(signal.SIGKILL)
            raise TimeoutError(f"ranks did not end within {timeout_s} s, {codes}: {self.words()}")
        return next((code for code in codes if code), 0) or 0

    def send(self, number: int, to_all: bool = True) -> None:
        """Send a signal to all ranks, or only to the last one."""
        for process in self.processes if to_all else self.processes[-1:]:
            with contextlib.suppress(ProcessLookupError):
                assert process.pid is not None
                os.kill(process.pid, number)

    def words(self) -> str:
        """Return the standard error of all ranks."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.err")))

    def succeed(self) -> HostsCommand:
        assert self.wait() == 0, self.words()
        return self


def _run(
    namespaces: Sequence[str], arguments: list[str], folder: Path, variables: Mapping[str, str], files: Sequence[Path]
) -> None:
    os.setsid()
    for namespace in namespaces:
        _enter(namespace)
    with Path(os.devnull).open() as nothing, files[0].open("wb") as output, files[1].open("wb") as error:
        become_command(arguments, folder, variables, [nothing.fileno(), output.fileno(), error.fileno()])


def _enter(namespace: str) -> None:
    """Call setns, which the `os` module has since Python 3.12."""
    descriptor = os.open(namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), f"{namespace}: {os.strerror(ctypes.get_errno())}")
    os.close(descriptor)
