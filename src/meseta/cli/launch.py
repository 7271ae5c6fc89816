"""Processes forked from a process that has imported torch, so that its import time is paid once."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import IO

from meseta.cli.watch import RankWatch
from meseta.errors import ERROR_PREFIX, MesetaError
from meseta.system.environment_variables import environ
from meseta.system.kernel import KernelFiles, num_oom_kills
from meseta.system.processes import STOP_SIGNALS, fork
from meseta.system.ranks import RENDEZVOUS_VARIABLE, Rendezvous, is_distributed
from meseta.system.time_limits import HANG_EXIT_CODE, TimeLimits
from meseta.telemetry.diagnosis import Diagnosis
from meseta.telemetry.watching import StallReporter, cgroup_limit_text, check_start_memory

command_line: Callable[[], None] | None = None
"""Runs the command in `sys.argv`. `meseta.cli.main` sets it, because this module cannot import its importer."""


def start_command(
    arguments: Sequence[str], name: str, *, variables: Mapping[str, str] | None = None, out: int = 1, err: int = 2
) -> BaseProcess:
    """Start `meseta ARGUMENTS` in a forked process.

    Args:
        arguments: Arguments of the command.
        name: Title of the process.
        variables: Environment variables to set in addition to those of this process.
        out: Descriptor used as stdout.
        err: Descriptor used as stderr.
    """
    if StallReporter.current is not None:
        StallReporter.current.stop()  # A fork of a process with threads may deadlock.
    _preload_imports()
    return fork(partial(_run_command, arguments), name, extra_environ=variables, stdout_fd=out, stderr_fd=err)


@cache
def _preload_imports() -> None:
    import meseta.cli.preload  # noqa: F401

    gc.collect()
    # Keep the garbage collector of forked processes from writing to memory pages that they share with this process.
    gc.freeze()


def _run_command(arguments: Sequence[str]) -> None:
    if command_line is None:
        raise RuntimeError("import meseta.cli.main before starting a command")
    sys.argv = ["meseta", *arguments]
    command_line()


SHUTDOWN_GRACE_S = 10
"""Seconds that ranks have to exit by themselves before they are killed."""
PEER_EXIT_GRACE_S = 3
"""Seconds in which the other ranks may fail as well, before the rank that failed first is determined."""
SAME_SIGNAL_WINDOW_S = 1.0
"""Seconds after the first signal within which another is the same request, which may also signal the group."""
LOST_CONNECTION_EXIT_CODE = 75
"""Exit code of a rank that failed because it lost the connection to another rank."""
KILL_TIMEOUT_S = 10.0
"""Seconds to wait for the end of a killed process. A process that waits for a failed disk may never end."""
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
    """Whether a collective failed because another rank has ended. torch raises a plain RuntimeError in this case."""
    return is_distributed() and any(text in str(error) for text in _PEER_LOSS_MESSAGES)


def is_nproc_rank() -> bool:
    """Whether `run_attempt` started this process. It may be the only rank."""
    return RENDEZVOUS_VARIABLE in environ


def resume_hint() -> str:
    """Return the end of a message that says how to resume a command that was interrupted, or an empty string."""
    ways = {"train": "from the last checkpoint", "prepare": "from the last saved progress"}
    way = ways.get("".join(sys.argv[1:2]))
    return f"; the same command resumes {way}" if way else ""


class StopSignals:
    """Signals SIGTERM and Ctrl-C of a launcher. It forwards the first one to its ranks and kills them at a second."""

    def __init__(self) -> None:
        self.first_signal: int | None = None
        """Number of the first signal, or `None` if there was none."""
        self.is_repeated = False
        """Whether another signal arrived after `SAME_SIGNAL_WINDOW_S`."""
        self._first_s = 0.0

    def install(self) -> None:
        """Start to record signals. Replaces the signal handlers of this process."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first_signal is None:
            self.first_signal, self._first_s = number, time.monotonic()
        elif time.monotonic() - self._first_s > SAME_SIGNAL_WINDOW_S:
            self.is_repeated = True


@dataclass(frozen=True)
class LaunchResult:
    """Outcome of a command on several ranks."""

    exit_code: int
    """Exit code for the shell."""
    loss_reason: str = ""
    """Message about a lost rank, empty if no rank was lost.

    A rank is lost if a signal that the command did not receive kills it, if its connection fails, or if it does not
    respond.
    """
    killed_ranks: tuple[int, ...] = ()
    """Ranks that were killed by such a signal or are unresponsive."""

    def report_failure(self, when: str = "") -> int:
        """Print an error about a lost rank, if there is one. Returns the exit code."""
        if self.loss_reason:
            print(
                f"{ERROR_PREFIX}{self.loss_reason}{when}; all ranks were stopped{resume_hint()}",
                file=sys.stderr,
                flush=True,
            )
        return self.exit_code


def run_ranks(
    arguments: Sequence[str], num_ranks: int, limits: TimeLimits | None = None, run_dir: Path | None = None
) -> int:
    """Run `meseta ARGUMENTS` on `num_ranks` ranks and return the exit code. Not used under torchrun.

    Rank 0 writes to this terminal. If a rank fails, the others are stopped within seconds, and its last output is
    printed. All ranks are killed if one is unresponsive, has diverged, or keeps the others waiting for longer than
    `limits` allow. The error names this rank.

    SIGTERM and Ctrl-C are forwarded to the ranks as SIGTERM. The launcher then waits for them, because training saves a
    checkpoint first. A second signal kills the ranks. With `run_dir`, the records of the ranks may get names below it.
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
    """Run `meseta ARGUMENTS` as `run_ranks` does, but do not report a lost rank.

    `signals` must be installed. Its first signal may have arrived before the call. Raises MesetaError if `num_ranks` is
    less than 1 or the memory does not suffice to start.
    """
    if num_ranks < 1:
        raise MesetaError(f"--nproc must be at least 1, got {num_ranks}")
    check_start_memory(num_ranks)
    with ExitStack() as files:
        # Unnamed files, so that nothing remains if the launcher is killed.
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(num_ranks)]
        return _run_attempt(arguments, errors, signals, limits or TimeLimits(), run_dir)


def _run_attempt(
    arguments: Sequence[str],
    errors: Sequence[IO[bytes]],
    signals: StopSignals,
    limits: TimeLimits,
    run_dir: Path | None,
) -> LaunchResult:
    """Run the command on one rank per file in `errors`. All ranks except rank 0 write their stderr to their file."""
    ranks: list[BaseProcess] = []
    # The count of kills by the kernel shows afterwards whether a rank was killed for lack of memory.
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
    # Outside of training, SIGTERM ends a rank directly, whoever sent it.
    number = signal.SIGTERM if signals.first_signal is None and code == -signal.SIGTERM else signals.first_signal
    if number is not None and (code in (LOST_CONNECTION_EXIT_CODE, 128 + signal.SIGTERM) or code < 0):
        if code != 128 + signal.SIGTERM:  # A rank with this code has already reported its checkpoint.
            print(f"interrupted{resume_hint()}", file=sys.stderr)
        return LaunchResult(128 + number)
    if code < 0:
        # A rank that aborted was waiting for a rank that died.
        killed = tuple(r for r in killed if r == blamed or ranks[r].exitcode != -signal.SIGABRT)
        loss = f"rank {blamed} was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and num_oom_kills(KernelFiles()) > former_oom_kills:
            loss += f" of the kernel: the {cgroup_limit_text()} is used up; raise the limit, or use smaller tables"
        return LaunchResult(1, loss, killed)
    if code == LOST_CONNECTION_EXIT_CODE:
        return LaunchResult(code, f"rank {blamed} lost its connection to the other ranks")
    if blamed != 0:
        errors[blamed].seek(0)
        # The error is at the end of a long output.
        sys.stderr.buffer.write(errors[blamed].read()[-20_000:])
        sys.stderr.flush()
    return LaunchResult(code)


def _start_ranks(
    ranks: list[BaseProcess], arguments: Sequence[str], errors: Sequence[IO[bytes]], watch: RankWatch
) -> None:
    """Start one process per entry of `errors` and append it to `ranks`."""
    # The ranks inherit the descriptors, so they may be closed once all ranks have started.
    with Rendezvous(len(errors)) as meeting, Path(os.devnull).open("wb") as nowhere:
        for rank, file in enumerate(errors):
            streams = {} if rank == 0 else {"out": nowhere.fileno(), "err": file.fileno()}
            variables = {**meeting.environment(rank), **watch.environ(rank)}
            ranks.append(start_command(arguments, f"meseta rank {rank}", variables=variables, **streams))


def _wait_for_ranks(ranks: Sequence[BaseProcess], signals: StopSignals, watch: RankWatch) -> int | LaunchResult | None:
    """Wait for the end of all ranks, and forward signals. Returns the failed rank, the outcome if ranks were killed or
    diverged, or `None` on success."""
    passed_on = None
    while True:
        codes = [rank.exitcode for rank in ranks]
        if any(code not in (None, 0) for code in codes):
            culprit = _find_failed_rank(ranks)
            # gloo aborts a rank that receives more than it expects. The rank that sent it has diverged.
            is_victim = ranks[culprit].exitcode in (-signal.SIGABRT, LOST_CONNECTION_EXIT_CODE)
            trouble = watch.find_diverged() if is_victim else None
            return culprit if trouble is None else _kill_ranks(ranks, trouble)
        if all(code == 0 for code in codes):
            trouble = watch.find_diverged()
            if trouble is None:
                return None
            print(f"{ERROR_PREFIX}{trouble.text}; fix this and start again with --force", file=sys.stderr)
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
    """Kill all ranks and return the outcome.

    Unresponsive ranks count as lost, so that the run can be restarted. Diverged ranks would diverge again, so they are
    reported as an error instead.
    """
    # SIGTERM would not end ranks that are stopped or wait in a collective.
    for rank in ranks:
        rank.kill()
    ended = LaunchResult(HANG_EXIT_CODE, trouble.text, trouble.ranks if trouble.kind == "silent" else ())
    return LaunchResult(ended.report_failure()) if trouble.kind == "astray" else ended


def _find_failed_rank(ranks: Sequence[BaseProcess]) -> int:
    """Return the rank that failed first, or the lowest one if several failed independently."""
    # The other ranks fail in their next collective. Wait for their exit codes. If rank 0 failed, it has already printed
    # its error, so the lowest rank is the best choice.
    deadline = time.monotonic() + PEER_EXIT_GRACE_S
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)

    def severity(rank: int) -> int:
        # A rank with a high value failed because another rank had failed.
        code = ranks[rank].exitcode or 0
        if code == LOST_CONNECTION_EXIT_CODE:
            return 3
        if code == -signal.SIGABRT:  # nccl aborts ranks that wait for one that has died.
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
                print(
                    f"warning: process {rank.pid} is blocked in the kernel and does not end",
                    file=sys.stderr,
                    flush=True,
                )
