"""Callbacks of a run, called in the process that started it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from meseta.errors import MesetaError, format_value
from meseta.telemetry.metrics_file import EvalLine, TrainLine
from meseta.telemetry.run_events import (
    CALLBACKS_VARIABLE,
    CONTINUE,
    INTERRUPT,
    STOP,
    STOPPING_KINDS,
    CheckpointEvent,
    EndEvent,
    Event,
    StartEvent,
    StepEvent,
    parse_event,
)


class Callback:
    """Base class of callbacks for `meseta.fit`.

    Methods are called in the process and thread of `fit`, in the order of the steps, with immutable records. Training
    waits for `on_step`, `on_log` and `on_evaluate` if a callback overrides them. If one of them returns `True`, the run
    stops after this step, and the weights so far are saved and evaluated. Otherwise callbacks change no bit of the
    result. If a callback raises an error, all ranks save a checkpoint and end, and `fit` raises the error.
    """

    def on_start(self, event: StartEvent) -> None:
        """Process the start of training."""

    def on_step(self, event: StepEvent) -> bool | None:
        """Process the end of a step. Return `True` to stop the run."""

    def on_log(self, line: TrainLine) -> bool | None:
        """Process training metrics, once per `train.log_every_steps`. Return `True` to stop the run."""

    def on_evaluate(self, line: EvalLine) -> bool | None:
        """Process an evaluation, also of the final weights. Return `True` to stop the run."""

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """Process a checkpoint that is completely written."""

    def on_end(self, event: EndEvent) -> None:
        """Process the end of the run, also after an error."""


_METHODS = {
    "start": "on_start",
    "step": "on_step",
    "train": "on_log",
    "eval": "on_evaluate",
    "checkpoint": "on_checkpoint",
}


class CallbackRunner:
    """Context manager that calls callbacks with the events of a child process, and closes the pipes to it."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        """Create the pipes. Raises MesetaError if a callback has another class than Callback."""
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise MesetaError(
                    f"fit: callback {format_value(callback)} must be an object of a subclass of meseta.Callback"
                )
        self._callbacks = callbacks
        overridden = [kind for kind, name in _METHODS.items() if any(_overrides(one, name) for one in callbacks)]
        self.events_fd, self._child_events_fd = os.pipe()
        self._child_answers_fd, self._answers_fd = os.pipe()
        self.child_fds = (self._child_events_fd, self._child_answers_fd)
        """Descriptors that the child inherits."""
        kinds = ",".join([*overridden, "end"])
        self.variables = {CALLBACKS_VARIABLE: f"{self._child_events_fd}:{self._child_answers_fd}:{kinds}"}
        """Environment variables of the child."""
        self._open = {self.events_fd, self._answers_fd, *self.child_fds}
        self._received = b""
        self._end: EndEvent | None = None

    def __enter__(self) -> CallbackRunner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close_child_ends(self) -> None:
        """Close the descriptors of the child in this process, after the child was started."""
        self._close(*self.child_fds)

    def close(self) -> None:
        """Close all pipes. The run continues without callbacks."""
        self._close(*self._open)

    def _close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            if descriptor in self._open:
                self._open.remove(descriptor)
                os.close(descriptor)

    def process(self) -> bool:
        """Read events from the pipe and call the callbacks. Returns whether there may be more events.

        Raises the error of a callback.
        """
        content = os.read(self.events_fd, 1 << 16)
        *lines, self._received = (self._received + content).split(b"\n")
        for line in lines:
            self._call(parse_event(line))
        return content != b""

    def _call(self, event: Event) -> None:
        if isinstance(event, EndEvent):
            self._end = event
            return
        name, answer = _METHODS[event.kind], INTERRUPT
        try:
            answers = [getattr(callback, name)(event) for callback in self._callbacks]
            answer = STOP if any(one is True for one in answers) else CONTINUE
        finally:
            if event.kind in STOPPING_KINDS:
                with suppress(BrokenPipeError):  # If the child has ended, its error is reported.
                    os.write(self._answers_fd, answer)

    def end(self, error: BaseException | None) -> None:
        """Call `on_end` after the child has ended, with `error` if it is raised by `fit`."""
        if error is None:
            event = self._end or EndEvent(kind="end", outcome="completed")
        elif isinstance(error, KeyboardInterrupt):
            event = EndEvent(kind="end", outcome="interrupted")
        else:
            event = EndEvent(kind="end", outcome="failed", error=str(error))
        for callback in self._callbacks:
            callback.on_end(event)


def _overrides(callback: Callback, name: str) -> bool:
    return getattr(type(callback), name) is not getattr(Callback, name) or name in vars(callback)
