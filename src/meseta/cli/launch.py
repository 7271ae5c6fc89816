"""`--nproc N`: the same command on N ranks of this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import IO

from meseta.cli.forked import start_command
from meseta.cli.watch import RankWatch
from meseta.errors import ERROR_PREFIX, MesetaError
from meseta.machine.processes import STOPPING
from meseta.machine.ranks import is_launched
from meseta.machine.rendezvous import VARIABLE, Rendezvous
from meseta.machine.system import System, num_oom_kills
from meseta.machine.time_limits import HUNG, TimeLimits
from meseta.machine.variables import variables
from meseta.telemetry.diagnosis import Trouble
from meseta.telemetry.watching.memory_watch import check_start_memory, group_limit_text

STOP_S = 10
"""Seconds that ranks have to leave by themselves before they are killed."""
SETTLE_S = 3
"""Seconds in which the other ranks may fail too, before the one to blame is named."""
SAME_CALL_S = 1.0
"""Signals this soon after the first are the same call, told to this process and to its group."""
LOST_CONNECTION = 75
"""Exit code of a rank that failed because another one went away."""
KILL_S = 10.0
"""Seconds that the system has to end a process that was killed; one that waits for a dead disk may take for ever."""
_LOSSES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "recvValue failed",
    "sendBytes failed",
    "recvBytes failed",
)


def is_loss_of_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank has gone; torch has no class of its own for that."""
    return is_launched() and any(text in str(error) for text in _LOSSES)


def is_rank() -> bool:
    """Whether `run_attempt` has started this process, be it as the only rank."""
    return VARIABLE in variables


def way_on() -> str:
    """What a person does after a command was cut off."""
    ways = {"train": "from the last checkpoint", "prepare": "from what was saved last"}
    way = ways.get("".join(sys.argv[1:2]))
    return f"; the same command goes on {way}" if way else ""


class StopSignals:
    """SIGTERM and Ctrl-C to the launcher: the first is passed on to the ranks, a later one kills them."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The first signal."""
        self.again = False
        """Whether it was repeated."""
        self._first_s = 0.0

    def install(self) -> None:
        """From now on."""
        for number in STOPPING:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._first_s = number, time.monotonic()
        elif time.monotonic() - self._first_s > SAME_CALL_S:
            self.again = True


@dataclass(frozen=True)
class Ended:
    """How a command on several ranks ended."""

    code: int
    """For the shell."""
    loss: str = ""
    """In words, where a rank was lost: by a signal that nobody sent to the command, its connection, or silence."""
    killed: tuple[int, ...] = ()
    """Ranks that such signals have ended, or that do not run any more."""

    def tell(self, when: str = "") -> int:
        """Say of a loss what nobody has said yet; returns the code."""
        if self.loss:
            print(f"{ERROR_PREFIX}{self.loss}{when}; all ranks are stopped{way_on()}", file=sys.stderr, flush=True)
        return self.code


def run_ranks(
    arguments: Sequence[str], num_ranks: int, limits: TimeLimits | None = None, run_dir: Path | None = None
) -> int:
    """Run `meseta ARGUMENTS` on `num_ranks` ranks and return the exit code.

    Rank 0 writes to this terminal. When a rank dies, the others are stopped within seconds, and the one to blame is
    named with its last words. A rank that does not run any more, that is at another transfer than the others, or for
    which they wait for longer than `limits` allow, is named, and all are killed. SIGTERM and Ctrl-C reach the ranks as
    SIGTERM and are waited for: training saves a checkpoint first; a second one ends all at once. Under torchrun, which
    starts ranks itself, this is not used. What ranks record of themselves may get a name below `run_dir`.
    """
    signals = StopSignals()
    signals.install()
    return run_attempt(arguments, num_ranks, signals, limits, run_dir).tell()


def run_attempt(
    arguments: Sequence[str],
    num_ranks: int,
    signals: StopSignals,
    limits: TimeLimits | None = None,
    run_dir: Path | None = None,
) -> Ended:
    """The same, told `signals` that come meanwhile; what is left to be said of a loss is not said yet."""
    if num_ranks < 1:
        raise MesetaError(f"--nproc must be at least 1, got {num_ranks}")
    check_start_memory(num_ranks)
    with ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(num_ranks)]
        return _attempt(arguments, errors, signals, limits or TimeLimits(), run_dir)


def _attempt(
    arguments: Sequence[str],
    errors: Sequence[IO[bytes]],
    signals: StopSignals,
    limits: TimeLimits,
    run_dir: Path | None,
) -> Ended:
    """The same on a rank for each of `errors`, where all but rank 0 write what they say."""
    ranks: list[BaseProcess] = []
    former_oom_kills = num_oom_kills(System())
    with RankWatch(len(errors), limits, run_dir) as watch:
        try:
            _start(ranks, arguments, errors, watch)
            blamed = _wait(ranks, signals, watch)
            killed = tuple(rank for rank, process in enumerate(ranks) if (process.exitcode or 0) < 0)
        finally:
            _stop(ranks)
    if isinstance(blamed, Ended):
        return blamed
    if blamed is None:
        return Ended(0)
    code = ranks[blamed].exitcode or 0
    # Outside of training a rank leaves by the signal itself, whoever has sent it.
    number = signal.SIGTERM if signals.number is None and code == -signal.SIGTERM else signals.number
    if number is not None and (code in (LOST_CONNECTION, 128 + signal.SIGTERM) or code < 0):
        if code != 128 + signal.SIGTERM:  # such a rank has told where it saved
            print(f"interrupted{way_on()}", file=sys.stderr)
        return Ended(128 + number)
    if code < 0:
        # Others that abort were waiting for one that died.
        killed = tuple(r for r in killed if r == blamed or ranks[r].exitcode != -signal.SIGABRT)
        loss = f"rank {blamed} was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and num_oom_kills(System()) > former_oom_kills:
            loss += f" of the kernel: the {group_limit_text()} is used up; raise the limit, or use smaller tables"
        return Ended(1, loss, killed)
    if code == LOST_CONNECTION:
        return Ended(code, f"rank {blamed} lost its connection to the other ranks")
    if blamed != 0:
        errors[blamed].seek(0)
        sys.stderr.buffer.write(errors[blamed].read()[-20_000:])
        sys.stderr.flush()
    return Ended(code)


def _start(ranks: list[BaseProcess], arguments: Sequence[str], errors: Sequence[IO[bytes]], watch: RankWatch) -> None:
    """Start one process per entry of `errors` and append it to `ranks`."""
    with Rendezvous(len(errors)) as meeting, Path(os.devnull).open("wb") as nowhere:
        for rank, file in enumerate(errors):
            streams = {} if rank == 0 else {"out": nowhere.fileno(), "err": file.fileno()}
            variables = {**meeting.variables(rank), **watch.variables(rank)}
            ranks.append(start_command(arguments, f"meseta rank {rank}", variables=variables, **streams))


def _wait(ranks: Sequence[BaseProcess], signals: StopSignals, watch: RankWatch) -> int | Ended | None:
    """None when every rank succeeded, else the rank to blame, or how they ended that did not go on. Passes signals on
    to the ranks."""
    passed_on = None
    while True:
        codes = [rank.exitcode for rank in ranks]
        if any(code not in (None, 0) for code in codes):
            culprit = _find_culprit(ranks)
            # gloo aborts a rank that gets more than it expects, whoever has sent it.
            is_victim = ranks[culprit].exitcode in (-signal.SIGABRT, LOST_CONNECTION)
            trouble = watch.astray() if is_victim else None
            return culprit if trouble is None else _end(ranks, trouble)
        if all(code == 0 for code in codes):
            trouble = watch.astray()
            if trouble is None:
                return None
            print(f"{ERROR_PREFIX}{trouble.text}; mend that, and begin anew with --force", file=sys.stderr)
            return Ended(HUNG)
        if signals.again or signals.number != passed_on:
            passed_on = signals.number
            for rank in ranks:
                rank.kill() if signals.again else rank.terminate()
        trouble, lines = watch.look([code is None for code in codes])
        if trouble is not None:
            return _end(ranks, trouble)
        for line in lines:
            print(line, file=sys.stderr, flush=True)
        time.sleep(0.05)


def _end(ranks: Sequence[BaseProcess], trouble: Trouble) -> Ended:
    """Kill all: they may be stopped, or wait for each other where they hear nothing. A rank that is silent is lost;
    ranks that are astray would be so again."""
    for rank in ranks:
        rank.kill()
    ended = Ended(HUNG, trouble.text, trouble.ranks if trouble.kind == "silent" else ())
    return Ended(ended.tell()) if trouble.kind == "astray" else ended


def _find_culprit(ranks: Sequence[BaseProcess]) -> int:
    """The rank that failed for a reason of its own; rank 0, which has told it already, where several did.

    The others notice its end in their next collective and fail as well, so they get a moment to do so.
    """
    deadline = time.monotonic() + SETTLE_S
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)

    def severity(rank: int) -> int:
        code = ranks[rank].exitcode or 0
        if code == LOST_CONNECTION:
            return 3
        if code == -signal.SIGABRT:  # nccl aborts the ranks that wait for one that has died
            return 2
        return 0 if code < 0 else 1

    return min((r for r, rank in enumerate(ranks) if rank.exitcode not in (None, 0)), key=lambda r: (severity(r), r))


def _stop(ranks: Sequence[BaseProcess]) -> None:
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + STOP_S
    for rank in ranks:
        rank.join(max(deadline - time.monotonic(), 0.1))
        if rank.exitcode is None:
            rank.kill()
            rank.join(KILL_S)
            if rank.exitcode is None:
                print(f"warning: process {rank.pid} does not end: the system holds it", file=sys.stderr, flush=True)
