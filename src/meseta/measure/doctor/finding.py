"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "problem"]
"""note: training works, but slower, or without a part of Meseta; problem: training, or a part of it, will fail."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    """What was looked at: 'memory', 'disk', ..."""
    state: State
    text: str
    """What is there."""
    way_out: str = ""
    """What a person can do about it. A problem has one always."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same in numbers, for programs; keys carry units."""

    def __post_init__(self) -> None:
        if self.state == "problem" and not self.way_out:
            raise ValueError(f"{self.topic}: a problem needs a way out")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def ok(topic: str, text: str, **figures: Any) -> Finding:
    """All is well."""
    return Finding(topic, "ok", text, "", figures)


def note(topic: str, text: str, remedy: str = "", **figures: Any) -> Finding:
    """Good to know."""
    return Finding(topic, "note", text, remedy, figures)


def problem(topic: str, text: str, remedy: str, **figures: Any) -> Finding:
    """Training, or a part of it, will fail."""
    return Finding(topic, "problem", text, remedy, figures)
