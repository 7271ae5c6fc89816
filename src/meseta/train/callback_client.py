"""Sender of the events of a run to callbacks in the process that started it."""

from __future__ import annotations

import os
import select
import threading
from typing import IO

from meseta.comm import World
from meseta.system.environment_variables import environ
from meseta.telemetry.run_events import (
    CALLBACKS_VARIABLE,
    CONTINUE,
    INTERRUPT,
    STOP,
    STOPPING_KINDS,
    Event,
    encode_event,
)

ANSWER_POLL_INTERVAL_S = 1.0
"""Seconds that rank 0 waits for an answer before it lets the other ranks know that it is still waiting."""


class CallbackClient:
    """Thread-safe sender of the events of a run. Without callbacks, all methods have no effect.

    Every rank has one, and all ranks make the same calls of `open` and `wait`. Rank 0 sends the events.
    """

    def __init__(self, world: World) -> None:
        self.should_stop = False
        """Whether a callback has stopped the run. Equal on all ranks."""
        self.is_interrupted = False
        """Whether a callback has raised an error. Equal on all ranks."""
        self._world = world
        self._lock = threading.Lock()
        self._num_unanswered = 0
        self._answer = CONTINUE
        self._kinds: frozenset[str] = frozenset()
        self._events: IO[bytes] | None = None
        self._answers_fd = -1

    def open(self) -> None:
        """Open the pipes of the environment variable, if it is set."""
        if variable := environ.get(CALLBACKS_VARIABLE):
            events_fd, answers_fd, kinds = variable.split(":")
            self._kinds = frozenset(kinds.split(","))
            if self._world.rank == 0:
                self._events, self._answers_fd = os.fdopen(int(events_fd), "wb", closefd=False), int(answers_fd)

    def send(self, event: Event) -> None:
        """Send an event if a callback processes it. Only rank 0 sends it."""
        if self._events is None or event.kind not in self._kinds:
            return
        with self._lock:
            try:
                self._events.write(encode_event(event))
                self._events.flush()
            except OSError:  # A callback has raised an error. The other process stops this run by a signal.
                self._events = None
                return
            self._num_unanswered += event.kind in STOPPING_KINDS

    def waits_for(self, kind: str) -> bool:
        """Whether training waits for the answers to events of a kind."""
        return kind in self._kinds and kind in STOPPING_KINDS

    def wait(self, kind: str) -> None:
        """Wait until all events are answered, if training waits for those of `kind`. Collective."""
        if not self.waits_for(kind):
            return
        # A callback may take minutes. The other ranks take part in a transfer per interval, so that none seems stuck.
        while (answer := self._world.broadcast_from_rank_0(self._poll_answers)) is None:
            pass
        self.should_stop, self.is_interrupted = answer == STOP, answer == INTERRUPT

    def _poll_answers(self) -> bytes | None:
        """Return the strongest answer so far, or `None` if an answer is still missing after an interval."""
        while self._events is not None and self._num_unanswered:
            if not select.select([self._answers_fd], [], [], ANSWER_POLL_INTERVAL_S)[0]:
                return None
            answers = os.read(self._answers_fd, self._num_unanswered)
            if not answers:
                self._events = None  # The other process ends this run by a signal.
            self._num_unanswered -= len(answers)
            self._answer = next(one for one in (INTERRUPT, STOP, CONTINUE) if one in answers + self._answer)
        return self._answer
