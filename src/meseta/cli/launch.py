"""`--nproc N`: the same command on N ranks of this machine. No torch here: the ranks import it themselves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from meseta.spec import MesetaError

STOP_S = 10
"""Seconds that ranks have to leave by themselves before they are killed."""


def is_launched() -> bool:
    """Whether torchrun, or `run_ranks`, has started this process as one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `meseta ARGUMENTS` on `num_ranks` ranks and return the exit code.

    Rank 0 writes to this terminal. When a rank dies, the others are stopped within seconds and the dead one's last
    words are printed. Under torchrun, which starts ranks itself, this is not used.
    """
    if num_ranks < 1:
        raise MesetaError(f"--nproc must be at least 1, got {num_ranks}")
    errors: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(num_ranks)]  # noqa: SIM115 (they outlive this line)
    environment = _environment(num_ranks)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "meseta.cli.main", *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=None if rank == 0 else errors[rank],
        )
        for rank in range(num_ranks)
    ]
    # A plain `kill` of this process must not leave the ranks behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        first = _wait(ranks)
    except KeyboardInterrupt:
        _stop(ranks)  # the terminal has sent the signal to the ranks too
        return 130
    finally:
        _stop(ranks)
    if first is None:
        return 0
    code = ranks[first].returncode
    if code < 0:
        print(f"error: rank {first} was killed by {signal.Signals(-code).name}; all ranks are stopped, and the same "
              "command goes on from the last checkpoint", file=sys.stderr)  # fmt: skip
    elif first != 0:
        errors[first].seek(0)
        sys.stderr.buffer.write(errors[first].read()[-20_000:])
        sys.stderr.flush()
    return code if code > 0 else 1


def _environment(num_ranks: int) -> dict[str, str]:
    """What torch.distributed reads to find the other ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = str(num_ranks)
    return {
        **os.environ,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """None when every rank succeeded, else the rank that failed first; rank 0 when several did at once."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [r for r, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            # An error that all ranks meet together should be told by rank 0, which needs a moment.
            time.sleep(0.5)
            return 0 if ranks[0].poll() not in (None, 0) else failed[0]
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + STOP_S
    for rank in ranks:
        try:
            rank.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
