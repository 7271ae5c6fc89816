"""The figures of an evaluation that pages show: one entry each, and every table and chart has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meseta.telemetry.formatting import is_drawable
from meseta.telemetry.metrics_file import EvalMetrics


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure of an evaluation."""

    key: str
    """Its name in an evaluation's line."""
    name: str
    """As a table's head shows it."""
    better_direction: Literal["lower", "higher", "one"]
    """Which of two values is the better one; 'one': that nearer to 1."""
    decimals: int = 4
    is_main: bool = False
    """Whether it has a column without being there, a chart, and a place in the terminal."""

    def value_in(self, line: EvalMetrics | None) -> float | None:
        """Its value in a line; None where the line does not have it, or nothing that could be shown."""
        value = line.metric(self.key) if line else None
        return value if is_drawable(value) else None

    def to_loss(self, value: float) -> float:
        """A number that is the smaller the better the value is."""
        return {"lower": value, "higher": -value, "one": abs(value - 1.0)}[self.better_direction]


METRICS = (
    Metric(key="logloss", name="log loss", better_direction="lower", is_main=True),
    Metric(key="ne", name="NE", better_direction="lower", is_main=True),
    Metric(key="auc", name="AUC", better_direction="higher", is_main=True),
    Metric(key="pr_auc", name="PR AUC", better_direction="higher"),
    Metric(key="gauc", name="grouped AUC", better_direction="higher"),
    Metric(key="ndcg", name="NDCG", better_direction="higher"),
    Metric(key="calibration", name="calibration", better_direction="one", decimals=3),
)

HIGHER_IS_BETTER = frozenset(metric.key for metric in METRICS if metric.better_direction == "higher")
"""Figures of which more is better; of the others less is."""


def metrics_in(lines: Iterable[EvalMetrics | None]) -> list[Metric]:
    """The main metrics, and the others that at least one line has."""
    lines = list(lines)
    return [metric for metric in METRICS if metric.is_main or any(metric.value_in(line) is not None for line in lines)]
