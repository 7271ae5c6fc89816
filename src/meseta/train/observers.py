"""Observers of a run, which receive its lines and events but never change its result: loggers and callbacks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

from meseta.comm import World
from meseta.config import RunConfig
from meseta.errors import error_summary
from meseta.system.background import BackgroundJobs
from meseta.system.environment import check_extras
from meseta.system.remote import Location
from meseta.system.time_limits import ProcessTimeouts
from meseta.telemetry.metrics_file import Line
from meseta.telemetry.run_events import CheckpointEvent, EndEvent, StartEvent, StepEvent
from meseta.train.callback_client import CallbackClient
from meseta.train.interop.loggers import Logger, Outcome, make_logger
from meseta.train.run_dir import RunDir

MAX_PENDING_LINES = 10_000
"""Number of lines that a logger may be behind, for example while its server does not respond."""
CLOSE_TIMEOUT_S = 60.0
"""Maximum seconds that the end of a run waits for loggers to send their lines."""


class BackgroundLogger:
    """Logger that runs in a background thread. After an error it receives no more lines."""

    def __init__(self, name: str, config: RunConfig, run_dir: RunDir, warnings: deque[str]) -> None:
        """Create a logger that adds a warning to `warnings` if it fails."""
        self._name, self._make = name, partial(make_logger, name, config, run_dir)
        self._warnings = warnings
        self._jobs = BackgroundJobs(f"meseta-{name}", MAX_PENDING_LINES)
        self._logger: Logger | None = None
        self._has_failed = False

    def begin(self, lines: Sequence[Line]) -> None:
        """Start or continue a run of the logger with the lines so far."""
        self._submit(partial(self._begin, lines))

    def add(self, line: Line) -> None:
        """Log a line."""
        self._submit(partial(self._add, line))

    def start_close(self, outcome: Outcome) -> None:
        """Start to end the run of the logger."""
        self._submit(partial(self._close, outcome))

    def wait(self, timeout_s: float) -> None:
        """Wait until all lines are sent. After the timeout, add a warning."""
        if not self._jobs.wait(timeout_s):
            self._fail("it does not respond")

    def _begin(self, lines: Sequence[Line]) -> None:
        self._logger = self._make()
        self._logger.begin(lines)

    def _add(self, line: Line) -> None:
        if self._logger is not None:
            self._logger.add(line)

    def _close(self, outcome: Outcome) -> None:
        if self._logger is not None:
            self._logger.close(outcome)

    def _submit(self, job: Callable[[], None]) -> None:
        if not self._has_failed and not self._jobs.try_submit(partial(self._run, job)):
            self._fail(f"it is {MAX_PENDING_LINES:,} lines behind")

    def _run(self, job: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            job()
        except Exception as error:  # Of any class, because it is a package of others.
            self._fail(error_summary(error))
            with suppress(Exception):
                self._close("failed")

    def _fail(self, reason: str) -> None:
        self._has_failed = True
        self._warnings.append(
            f"logger {self._name!r} has failed: {reason}; training continues, and metrics.jsonl has all lines"
        )


class RunObservers:
    """Loggers and callbacks of a run. Every rank has an object, and rank 0 sends lines and events."""

    def __init__(self, config: RunConfig, run_dir: RunDir, world: World) -> None:
        """Create the observers. Raises MesetaError if a package of a logger is not installed."""
        check_extras(config.train.loggers, "train.loggers")
        self._run_dir, self._world = run_dir, world
        self._callbacks = CallbackClient(world)
        self._warnings = deque[str]()
        names = config.train.loggers if world.rank == 0 else ()
        self._loggers = [BackgroundLogger(name, config, run_dir, self._warnings) for name in names]

    @property
    def should_stop(self) -> bool:
        """Whether a callback has stopped the run. Equal on all ranks."""
        return self._callbacks.should_stop

    @property
    def is_interrupted(self) -> bool:
        """Whether a callback has raised an error. Equal on all ranks."""
        return self._callbacks.is_interrupted

    def begin(self, step: int, num_steps: int, num_samples: int) -> None:
        """Send the lines so far to loggers, and the start of training to callbacks."""
        lines = self._run_dir.lines() if self._loggers else []
        for logger in self._loggers:
            logger.begin(lines)
        self._callbacks.open()  # Not before, because trials of a search have no callbacks.
        self._callbacks.send(
            StartEvent(
                kind="start",
                run_dir=str(self._run_dir.path),
                step=step,
                num_steps=num_steps,
                num_samples=num_samples,
                num_ranks=self._world.size,
            )
        )

    def add(self, line: Line) -> None:
        """Send a line of metrics.jsonl. Only for rank 0."""
        for logger in self._loggers:
            logger.add(line)
        self._callbacks.send(line)

    def add_step(self, step: int, num_samples: int) -> None:
        """Send the end of a step."""
        if self.waits_for("step"):
            self._callbacks.send(StepEvent(kind="step", step=step, num_samples=num_samples))

    def add_checkpoint(self, step: int, path: Location) -> None:
        """Send a complete checkpoint. Only for rank 0."""
        self._callbacks.send(CheckpointEvent(kind="checkpoint", step=step, path=str(path)))

    def waits_for(self, kind: Literal["step", "train", "eval"]) -> bool:
        """Whether training waits for callbacks after events of a kind."""
        return self._callbacks.waits_for(kind)

    def wait(self, kind: Literal["step", "train", "eval"]) -> None:
        """Wait for callbacks after an event of a kind, if training waits for them. Collective."""
        self._callbacks.wait(kind)

    def pop_warnings(self) -> list[str]:
        """Return and remove the warnings about failed loggers. Only rank 0 has any."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def end(self, step: int, num_samples: int) -> None:
        """Send the end of a run that was not interrupted."""
        outcome: Literal["stopped", "completed"] = "stopped" if self.should_stop else "completed"
        self._callbacks.send(EndEvent(kind="end", outcome=outcome, step=step, num_samples=num_samples))

    def close(self, outcome: Outcome = "failed") -> list[str]:
        """End the runs of all loggers, and return warnings about those that failed. A second call has no effect."""
        loggers, self._loggers = self._loggers, []
        for logger in loggers:
            logger.start_close(outcome)
        # The other ranks wait for this one.
        deadline_s = time.monotonic() + min(CLOSE_TIMEOUT_S, ProcessTimeouts.limits.stall_timeout_s / 2)
        for logger in loggers:
            logger.wait(max(deadline_s - time.monotonic(), 0.0))
        return self.pop_warnings()
