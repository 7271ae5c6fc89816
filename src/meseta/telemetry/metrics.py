"""Metrics of evaluations that tables, charts and the terminal show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meseta.telemetry.formatting import is_drawable
from meseta.telemetry.metrics_file import EvalMetrics


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Metric of an evaluation."""

    key: str
    """Name of the metric in metrics.jsonl."""
    name: str
    """Name of the metric in tables."""
    better_direction: Literal["lower", "higher", "one"]
    """Better direction of the metric. For 'one', values closer to 1 are better."""
    decimals: int = 4
    is_main: bool = False
    """Whether the metric has a table column even without values, a chart, and a place in the terminal."""

    def value_in(self, line: EvalMetrics | None) -> float | None:
        """Return the value in a line, or `None` if it is missing or cannot be drawn."""
        value = line.metric(self.key) if line else None
        return value if is_drawable(value) else None

    def to_loss(self, value: float) -> float:
        """Convert a value to a number that is smaller for better values."""
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
"""Keys of the metrics for which higher values are better."""


def metrics_in(lines: Iterable[EvalMetrics | None]) -> list[Metric]:
    """Return the main metrics, and all other metrics with a value in at least one line."""
    lines = list(lines)
    return [metric for metric in METRICS if metric.is_main or any(metric.value_in(line) is not None for line in lines)]
