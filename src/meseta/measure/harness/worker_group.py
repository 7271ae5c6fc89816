"""Worker processes of a benchmark target, and requests to them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from meseta.measure.harness.target import BenchmarkTarget
from meseta.measure.threads import read_cpu_time
from meseta.spec import MesetaError
from meseta.system.processes import Program, start_program
from meseta.system.ranks import Rendezvous

REPLY_TIMEOUT_S = 600.0
"""Maximum seconds to wait for an answer."""
# The interpreter of another system need not have Meseta or its dependencies. Empty packages that point to the source
# folders let it import single modules without running meseta/__init__.py.
_PEER_BOOTSTRAP = """
import types
for name, folder in (("meseta", {root!r}), ("meseta.measure", {root!r} + "/measure")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from meseta.measure.harness.worker import main
main()
"""
_IMPORT_PATH = "import sys; sys.path[:0] = {folders!r}\n"
_BOOTSTRAP = "from meseta.measure.harness.worker import main; main()"


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """One benchmark target: its class, its interpreter, and its processes."""

    name: str
    """Name of the system, such as 'ours' or 'FBGEMM'."""
    variant: tuple[str, ...] = ()
    """Properties such as optimizer and dtype that distinguish targets with the same name."""
    target_class: type[BenchmarkTarget]
    """Class that each worker process instantiates. `python` must be able to import its module."""
    arguments: Mapping[str, Any]
    """Keyword arguments of `target_class`, serializable as JSON."""
    python: str = sys.executable
    """Path of the Python interpreter."""
    import_path: tuple[str, ...] = ()
    """Folders that precede the import path of `python`, for the module of `target_class`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 1
    """Number of worker processes."""
    thread_counts: tuple[int, ...] = (1,)
    memory_bytes: float = 0.0
    """Approximate memory of all worker processes in total."""

    @property
    def title(self) -> str:
        """Name and variant, which together are unique in a benchmark."""
        return " ".join((self.name, *self.variant))


@dataclass(frozen=True)
class TimedWindow:
    """Measurement of consecutive calls of one action."""

    seconds_per_call: float
    background_load: float


class WorkerGroup:
    """Running worker processes of one benchmark target. As a context manager, stops them on exit."""

    def __init__(self, member: TargetSpec) -> None:
        """Start the processes and their targets. Raises MesetaError, with the last line of its stderr, if one fails."""
        self.spec = member
        self.facts: dict[str, Any] = {}
        self._stderr_files: list[IO[bytes]] = []
        self._processes: list[Program] = []
        self._unread: list[bytes] = []
        try:
            with Rendezvous(member.num_ranks) as meeting:
                for rank in range(member.num_ranks):
                    self._start(rank, meeting)
            self.facts = self.request({
                "make": [member.target_class.__module__, member.target_class.__qualname__],
                "arguments": dict(member.arguments),
            })  # fmt: skip
        except BaseException:
            self.close()
            raise

    def time(self, action: str, calls: int, num_threads: int) -> TimedWindow:
        """Time `calls` calls of `action` on all ranks. The duration is that of rank 0, from barrier to barrier."""
        pids = [os.getpid(), *(process.pid for process in self._processes)]
        before, start_s = read_cpu_time(pids), time.perf_counter()
        seconds = self.request({"time": action, "calls": calls, "threads": num_threads})
        elapsed_s, after = time.perf_counter() - start_s, read_cpu_time(pids)
        return TimedWindow(
            seconds_per_call=seconds / calls, background_load=after.background_load_since(before, elapsed_s)
        )

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the target on all ranks. Returns the result of rank 0."""
        return self.request({"ask": method, "arguments": arguments})

    def request(self, request: dict[str, Any]) -> Any:
        """Send a request to all ranks, wait for all, and return the answer of rank 0. Raises MesetaError if a rank
        fails, ends, or exceeds REPLY_TIMEOUT_S."""
        line = json.dumps(request).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                pass  # Reading the answer below reports why the process ended.
        replies = [self._read(rank) for rank in range(len(self._processes))]
        for reply in replies:
            if "error" in reply:
                raise MesetaError(f"{self.spec.title}: {reply['error']}")
        return replies[0]["answer"]

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for file in self._stderr_files:
            file.close()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self, rank: int, meeting: Rendezvous) -> None:
        self._stderr_files.append(tempfile.TemporaryFile())  # noqa: SIM115 (Closed by close().)
        try:
            process = start_program(
                _command(self.spec),
                {
                    "OMP_NUM_THREADS": str(max(self.spec.thread_counts)),
                    **meeting.environment(rank),
                    **self.spec.environment,
                },
                pass_fds=[meeting.descriptor],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr_files[-1],
            )
        except OSError as error:
            raise MesetaError(f"{self.spec.title}: cannot start {self.spec.python!r}: {error}") from None
        self._processes.append(process)
        self._unread.append(b"")

    def _read(self, rank: int) -> dict[str, Any]:
        """Read one answer of a rank. Returns an object with `error` if the process ends or does not answer in time."""
        pipe, deadline = self._processes[rank].stdout, time.monotonic() + REPLY_TIMEOUT_S
        assert pipe is not None
        while b"\n" not in self._unread[rank]:
            ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                return {"error": f"no answer within {REPLY_TIMEOUT_S:.0f} s"}
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                return {"error": f"its process ended: {self._exit_reason(rank)}"}
            self._unread[rank] += part
        line, _, self._unread[rank] = self._unread[rank].partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _exit_reason(self, rank: int) -> str:
        code = self._processes[rank].wait()
        file = self._stderr_files[rank]
        file.seek(0)
        lines = file.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}; {lines[-1] if lines else 'no output on standard error'}"


def _command(member: TargetSpec) -> list[str]:
    # -P and -I keep the working directory out of the import path.
    import_path = _IMPORT_PATH.format(folders=list(member.import_path))
    if member.python == sys.executable:
        return [member.python, "-P", "-c", import_path + _BOOTSTRAP]
    bootstrap = _PEER_BOOTSTRAP.format(root=str(Path(__file__).resolve().parents[2]))
    return [member.python, "-I", "-c", import_path + bootstrap]
