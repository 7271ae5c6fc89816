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
from meseta.machine.environment_variables import environ
from meseta.machine.kernel import KernelFiles, num_oom_kills
from meseta.machine.processes import STOP_SIGNALS
from meseta.machine.ranks import is_distributed
from meseta.machine.rendezvous import RENDEZVOUS_VARIABLE, Rendezvous
from meseta.machine.time_limits import HANG_EXIT_CODE, TimeLimits
from meseta.telemetry.diagnosis import Diagnosis
from meseta.telemetry.watching.memory_watch import cgroup_limit_text, check_start_memory

SHUTDOWN_GRACE_S = 10
"""Seconds that ranks have to leave by themselves before they are killed."""
PEER_EXIT_GRACE_S = 3
"""Seconds in which the other ranks may fail too, before the one to blame is named."""
SAME_SIGNAL_WINDOW_S = 1.0
"""Signals this soon after the first are the same call, told to this process and to its group."""
LOST_CONNECTION_EXIT_CODE = 75
"""Exit code of a rank that failed because another one went away."""
KILL_TIMEOUT_S = 10.0
"""Seconds that the system has to end a process that was killed; one that waits for a dead disk may take for ever."""
_PEER_LOSS_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "recvValue failed",
    "sendBytes failed",
    "recvBytes failed",
)


def is_peer_loss(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank has gone; torch has no class of its own for that."""
    return is_distributed() and any(text in str(error) for text in _PEER_LOSS_MESSAGES)


def is_nproc_rank() -> bool:
    """Whether `run_attempt` has started this process, be it as the only rank."""
    return RENDEZVOUS_VARIABLE in environ


def resume_hint() -> str:
    """What a person does after a command was cut off."""
    ways = {"train": "from the last checkpoint", "prepare": "from what was saved last"}
    way = ways.get("".join(sys.argv[1:2]))
    return f"; the same command goes on {way}" if way else ""


class StopSignals:
    """SIGTERM and Ctrl-C to the launcher: the first is passed on to the ranks, a later one kills them."""

    def __init__(self) -> None:
        self.first_signal: int | None = None
        """The first signal."""
        self.is_repeated = False
        """Whether it was repeated."""
        self._first_s = 0.0

    def install(self) -> None:
        """From now on."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first_signal is None:
            self.first_signal, self._first_s = number, time.monotonic()
        elif time.monotonic() - self._first_s > SAME_SIGNAL_WINDOW_S:
            self.is_repeated = True


@dataclass(frozen=True)
class LaunchResult:
    """How a command on several ranks ended."""

    exit_code: int
    """For the shell."""
    loss_reason: str = ""
    """In words, where a rank was lost: by a signal that nobody sent to the command, its connection, or silence."""
    killed_ranks: tuple[int, ...] = ()
    """Ranks that such signals have ended, or that do not run any more."""

    def report_failure(self, when: str = "") -> int:
        """Say of a loss what nobody has said yet; returns the code."""
        if self.loss_reason:
            print(
                f"{ERROR_PREFIX}{self.loss_reason}{when}; all ranks are stopped{resume_hint()}",
                file=sys.stderr,
                flush=True,
            )
        return self.exit_code


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
    return run_attempt(arguments, num_ranks, signals, limits, run_dir).report_failure()


def run_attempt(
    arguments: Sequence[str],
    num_ranks: int,
    signals: StopSignals,
    limits: TimeLimits | None = None,
    run_dir: Path | None = None,
) -> LaunchResult:
    """The same, told `signals` that come meanwhile; what is left to be said of a loss is not said yet."""
    if num_ranks < 1:
        raise MesetaError(f"--nproc must be at least 1, got {num_ranks}")
    check_start_memory(num_ranks)
    with ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(num_ranks)]
        return _run_attempt(arguments, errors, signals, limits or TimeLimits(), run_dir)


def _run_attempt(
    arguments: Sequence[str],
    errors: Sequence[IO[bytes]],
    signals: StopSignals,
    limits: TimeLimits,
    run_dir: Path | None,
) -> LaunchResult:
    """The same on a rank for each of `errors`, where all but rank 0 write what they say."""
    ranks: list[BaseProcess] = []
    former_oom_kills = num_oom_kills(KernelFiles())
    with RankWatch(len(errors), limits, run_dir) as watch:
        try:
            _start_ranks(ranks, arguments, errors, watch)
            blamed = _wait_for_ranks(ranks, signals, watch)
            killed = tuple(rank for rank, process in enumerate(ranks) if (process.exitcode or 0) < 0)
        finally:
            _stop_ranks(ranks)
    if isinstance(blamed, LaunchResult):
        return blamed
    if blamed is None:
        return LaunchResult(0)
    code = ranks[blamed].exitcode or 0
    # Outside of training a rank leaves by the signal itself, whoever has sent it.
    number = signal.SIGTERM if signals.first_signal is None and code == -signal.SIGTERM else signals.first_signal
    if number is not None and (code in (LOST_CONNECTION_EXIT_CODE, 128 + signal.SIGTERM) or code < 0):
        if code != 128 + signal.SIGTERM:  # such a rank has told where it saved
            print(f"interrupted{resume_hint()}", file=sys.stderr)
        return LaunchResult(128 + number)
    if code < 0:
        # Others that abort were waiting for one that died.
        killed = tuple(r for r in killed if r == blamed or ranks[r].exitcode != -signal.SIGABRT)
        loss = f"rank {blamed} was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and num_oom_kills(KernelFiles()) > former_oom_kills:
            loss += f" of the kernel: the {cgroup_limit_text()} is used up; raise the limit, or use smaller tables"
        return LaunchResult(1, loss, killed)
    if code == LOST_CONNECTION_EXIT_CODE:
        return LaunchResult(code, f"rank {blamed} lost its connection to the other ranks")
    if blamed != 0:
        errors[blamed].seek(0)
        sys.stderr.buffer.write(errors[blamed].read()[-20_000:])
        sys.stderr.flush()
    return LaunchResult(code)


def _start_ranks(
    ranks: list[BaseProcess], arguments: Sequence[str], errors: Sequence[IO[bytes]], watch: RankWatch
) -> None:
    """Start one process per entry of `errors` and append it to `ranks`."""
    with Rendezvous(len(errors)) as meeting, Path(os.devnull).open("wb") as nowhere:
        for rank, file in enumerate(errors):
            streams = {} if rank == 0 else {"out": nowhere.fileno(), "err": file.fileno()}
            variables = {**meeting.environment(rank), **watch.environ(rank)}
            ranks.append(start_command(arguments, f"meseta rank {rank}", variables=variables, **streams))


def _wait_for_ranks(ranks: Sequence[BaseProcess], signals: StopSignals, watch: RankWatch) -> int | LaunchResult | None:
    """None when every rank succeeded, else the rank to blame, or how they ended that did not go on. Passes signals on
    to the ranks."""
    passed_on = None
    while True:
        codes = [rank.exitcode for rank in ranks]
        if any(code not in (None, 0) for code in codes):
            culprit = _find_failed_rank(ranks)
            # gloo aborts a rank that gets more than it expects, whoever has sent it.
            is_victim = ranks[culprit].exitcode in (-signal.SIGABRT, LOST_CONNECTION_EXIT_CODE)
            trouble = watch.find_diverged() if is_victim else None
            return culprit if trouble is None else _kill_ranks(ranks, trouble)
        if all(code == 0 for code in codes):
            trouble = watch.find_diverged()
            if trouble is None:
                return None
            print(f"{ERROR_PREFIX}{trouble.text}; mend that, and begin anew with --force", file=sys.stderr)
            return LaunchResult(HANG_EXIT_CODE)
        if signals.is_repeated or signals.first_signal != passed_on:
            passed_on = signals.first_signal
            for rank in ranks:
                rank.kill() if signals.is_repeated else rank.terminate()
        trouble, lines = watch.poll([code is None for code in codes])
        if trouble is not None:
            return _kill_ranks(ranks, trouble)
        for line in lines:
            print(line, file=sys.stderr, flush=True)
        time.sleep(0.05)


def _kill_ranks(ranks: Sequence[BaseProcess], trouble: Diagnosis) -> LaunchResult:
    """Kill all: they may be stopped, or wait for each other where they hear nothing. A rank that is silent is lost;
    ranks that are astray would be so again."""
    for rank in ranks:
        rank.kill()
    ended = LaunchResult(HANG_EXIT_CODE, trouble.text, trouble.ranks if trouble.kind == "silent" else ())
    return LaunchResult(ended.report_failure()) if trouble.kind == "astray" else ended


def _find_failed_rank(ranks: Sequence[BaseProcess]) -> int:
    """The rank that failed for a reason of its own; rank 0, which has told it already, where several did.

    The others notice its end in their next collective and fail as well, so they get a moment to do so.
    """
    deadline = time.monotonic() + PEER_EXIT_GRACE_S
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)

    def severity(rank: int) -> int:
        code = ranks[rank].exitcode or 0
        if code == LOST_CONNECTION_EXIT_CODE:
            return 3
        if code == -signal.SIGABRT:  # nccl aborts the ranks that wait for one that has died
            return 2
        return 0 if code < 0 else 1

    return min((r for r, rank in enumerate(ranks) if rank.exitcode not in (None, 0)), key=lambda r: (severity(r), r))


def _stop_ranks(ranks: Sequence[BaseProcess]) -> None:
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + SHUTDOWN_GRACE_S
    for rank in ranks:
        rank.join(max(deadline - time.monotonic(), 0.1))
        if rank.exitcode is None:
            rank.kill()
            rank.join(KILL_TIMEOUT_S)
            if rank.exitcode is None:
                print(f"warning: process {rank.pid} does not end: the system holds it", file=sys.stderr, flush=True)
