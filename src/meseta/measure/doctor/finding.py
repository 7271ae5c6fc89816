"""Result of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "problem"]
"""Severity. With a `note`, training works, but slower or without a part of Meseta. With a `problem`, training or a part
of it fails."""


@dataclass(frozen=True)
class Finding:
    """One entry of the report."""

    topic: str
    """Name of the checked property, such as 'memory' or 'disk'."""
    state: State
    text: str
    """Observed state in words."""
    way_out: str = ""
    """Remedy for the user. Required for a problem, otherwise optional."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Observed values for programs. Keys include the unit."""

    def __post_init__(self) -> None:
        if self.state == "problem" and not self.way_out:
            raise ValueError(f"{self.topic}: a problem needs a remedy in way_out")

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return asdict(self)


def ok(topic: str, text: str, **figures: Any) -> Finding:
    """Create a finding that needs no attention."""
    return Finding(topic, "ok", text, "", figures)


def note(topic: str, text: str, remedy: str = "", **figures: Any) -> Finding:
    """Create a finding for a property that makes training slower, or disables a part of Meseta."""
    return Finding(topic, "note", text, remedy, figures)


def problem(topic: str, text: str, remedy: str, **figures: Any) -> Finding:
    """Create a finding for a property with which training or a part of it fails."""
    return Finding(topic, "problem", text, remedy, figures)
