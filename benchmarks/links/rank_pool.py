"""Persistent rank processes that call functions on request, on hosts with slow links or on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hosts import Hosts
from links.serve import BIND

BENCHMARKS = Path(__file__).resolve().parent.parent
START_S = 300.0
ANSWER_S = 1800.0
WATCH_S = 0.2
FOREVER_S = 1e6
MESSAGE_CHARACTERS = 1500
Run = Callable[[Sequence[str], Mapping[str, str]], object]
"""Function that runs a command as every rank, with additional environment variables."""


class RankPoolError(Exception):
    """A rank failed or timed out."""


class RankPool:
    """Connections to all ranks."""

    def __init__(self, pipes: Mapping[int, Connection], problem: Callable[[], str | None]) -> None:
        self._pipes, self._problem = pipes, problem

    @property
    def size(self) -> int:
        return len(self._pipes)

    def ask(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a function on every rank and return all results. Raises RankPoolError with the traceback of a rank that
        failed."""
        for pipe in self._pipes.values():
            pipe.send((function.__module__, function.__qualname__, arguments))
        stop = time.monotonic() + ANSWER_S
        replies = []
        for rank in range(self.size):
            while not self._pipes[rank].poll(WATCH_S):
                if (problem := self._problem()) is not None:
                    raise RankPoolError(problem)
                if time.monotonic() > stop:
                    raise RankPoolError(f"rank {rank} did not answer {function.__qualname__} within {ANSWER_S:g} s")
            replies.append(self._pipes[rank].recv())
        for rank, (is_well, value) in enumerate(replies):
            if not is_well:
                raise RankPoolError(f"rank {rank}: {value[-MESSAGE_CHARACTERS:]}")
        return [value for _, value in replies]


@contextmanager
def start_ranks(num_ranks: int, run: Run, *, python: str = sys.executable, sources: str = "") -> Iterator[RankPool]:
    """Context manager that starts ranks with an interpreter."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="meseta-ranks-") as folder, socket.socket(socket.AF_UNIX) as door:
        address = str(Path(folder) / "door")
        door.bind(address)
        door.listen(num_ranks)
        door.settimeout(WATCH_S)
        command = [python, "-m", "links.serve", address, *([sources] if sources else [])]

        def start() -> None:
            try:
                run(command, {"PYTHONPATH": str(BENCHMARKS), "PYTHONDONTWRITEBYTECODE": "1"})
            except Exception as error:
                problems.append(str(error))

        thread = threading.Thread(target=start, name="ranks", daemon=True)
        thread.start()

        def problem() -> str | None:
            return problems[0] if problems else None if thread.is_alive() else "all ranks have ended"

        pipes: dict[int, Connection] = {}
        try:
            _meet(door, num_ranks, pipes, problem)
            yield RankPool(pipes, problem)
        finally:
            for pipe in pipes.values():
                pipe.close()
            thread.join(START_S)


def _meet(door: socket.socket, num_ranks: int, pipes: dict[int, Connection], problem: Callable[[], str | None]) -> None:
    stop = time.monotonic() + START_S
    while len(pipes) < num_ranks:
        try:
            connection, _ = door.accept()
        except TimeoutError:
            if (message := problem()) is not None or time.monotonic() > stop:
                raise RankPoolError(message or f"{len(pipes)} of {num_ranks} ranks came within {START_S:g} s") from None
            continue
        connection.setblocking(True)
        pipe = Connection(connection.detach())
        pipes[pipe.recv()] = pipe


def on_hosts(hosts: Hosts, port: int | None = None) -> Run:
    """Return a Run on hosts with links, with one processor per rank."""
    more = {BIND: "1"} | ({} if port is None else {"MASTER_PORT": str(port)})
    return lambda command, added: hosts.run(command, variables={**more, **added}, limit_s=FOREVER_S)


def on_this_machine(num_ranks: int) -> Run:
    """Return a Run on this machine, like torchrun."""

    def run(command: Sequence[str], added: Mapping[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = []
        try:
            for rank in range(num_ranks):
                variables = {
                    "RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks,
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1,
                    "OMP_WAIT_POLICY": "passive", **added,
                }  # fmt: skip
                environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
                ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
            running = True
            while running:
                time.sleep(WATCH_S)
                running = bool([process for process in ranks if process.poll() is None])
                for rank, process in enumerate(ranks):
                    if process.returncode:
                        raise RankPoolError(f"rank {rank} ended with {process.returncode}")
        finally:
            for process in ranks:
                process.kill()
                process.wait()

    return run
