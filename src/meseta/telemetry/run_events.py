"""Events of a run, which rank 0 sends to the callbacks of the process that started it."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import ValidationError

from meseta.errors import MesetaError
from meseta.system.files import parse_json
from meseta.telemetry.metrics_file import Count, Entry, EvalLine, TrainLine

# Descriptor of events, descriptor of answers, and kinds of events to send, such as 5:6:step,eval.
CALLBACKS_VARIABLE = "MESETA_CALLBACKS"
"""Environment variable with the pipes to callbacks."""
STOPPING_KINDS = ("step", "train", "eval")
"""Kinds of events that are answered before training continues."""
CONTINUE, STOP, INTERRUPT = b"c", b"s", b"i"  # The last one ends the run after a checkpoint.
"""Answers to an event."""


class StartEvent(Entry):
    """Start of training, after data and checkpoint were loaded."""

    kind: Literal["start"]
    run_dir: str
    step: Count
    """Number of steps done by earlier starts."""
    num_steps: Count
    """Number of the last step."""
    num_samples: Count
    """Number of samples trained on by earlier starts."""
    num_ranks: Count


class StepEvent(Entry):
    """End of a training step."""

    kind: Literal["step"]
    step: Count
    num_samples: Count
    """Number of samples trained on so far."""


class CheckpointEvent(Entry):
    """Checkpoint that is completely written."""

    kind: Literal["checkpoint"]
    step: Count
    path: str
    """Path or URL of the checkpoint."""


class EndEvent(Entry):
    """End of a run."""

    kind: Literal["end"]
    outcome: Literal["completed", "stopped", "interrupted", "failed"]
    """'stopped' by a callback, 'interrupted' by Ctrl-C, or 'failed' with an error."""
    step: Count | None = None
    """Number of steps done. `None` after an interruption or an error."""
    num_samples: Count | None = None
    error: str | None = None


Event = StartEvent | StepEvent | TrainLine | EvalLine | CheckpointEvent | EndEvent
_CLASSES: dict[str, type[Event]] = {
    "start": StartEvent,
    "step": StepEvent,
    "train": TrainLine,
    "eval": EvalLine,
    "checkpoint": CheckpointEvent,
    "end": EndEvent,
}
EVENT_KINDS = tuple(_CLASSES)


def encode_event(event: Event) -> bytes:
    """Return an event as a line of JSON."""
    return f"{json.dumps(event.to_dict())}\n".encode()


def parse_event(line: bytes) -> Event:
    """Parse a line of `encode_event`. Raises MesetaError if it is invalid."""
    try:
        document: Any = parse_json(line, finite=False)
        return _CLASSES[document["kind"]].model_validate(document)
    except (ValueError, KeyError, TypeError, ValidationError):
        raise MesetaError(f"event {line[:80]!r} of a run has another format; use the same version of Meseta") from None
