"""One pool of gloo ranks per world size, kept for the whole test session because starting torch is slow."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked import collect_garbage_rarely, forking
from meseta.system.ranks import RENDEZVOUS_VARIABLE, Rendezvous


class RankPool:
    """Processes 0 .. size-1 of one process group."""

    def __init__(self, size: int) -> None:
        context = forking()
        self._folder = tempfile.TemporaryDirectory(prefix="meseta-pool-")
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            with Rendezvous(size) as meeting:
                variables = {**meeting.environment(rank), RENDEZVOUS_VARIABLE: store, "OMP_NUM_THREADS": "1"}
            process = context.Process(target=_serve, args=(there, variables), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
        """Call the function on all ranks and return the results by rank. Raises with the traceback of the first rank
        that failed."""
        # A call of seconds has taken 67 s on a busy machine. pytest ends a test after 300 s.
        for pipe in self._pipes:
            pipe.send((function, args))
        replies = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"rank {rank} did not answer {function.__name__} within {timeout_s} s")
            replies.append(pipe.recv())
        for rank, (ok, value) in enumerate(replies):
            assert ok, f"rank {rank}:\n{value}"
        return [value for _, value in replies]

    def close(self) -> None:
        """Kill the ranks. A rank that leaves its group in order would wait for the others."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    import torch

    from meseta.comm import World
    from meseta.comm.world import UnknownCollectives

    UnknownCollectives.is_fatal = True
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    World.current()
    collect_garbage_rarely()
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
