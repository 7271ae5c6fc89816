"""Metrics of evaluations that tables, charts and the terminal show."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from meseta.telemetry.formatting import is_drawable
from meseta.telemetry.metrics_file import EvalMetrics


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Metric of an evaluation."""

    key: str
    name: str
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
    Metric(key="logloss_clamped", name="clamped log loss", better_direction="lower"),
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


TEST, VALID = "test", "valid"
EVALUATED_SPLITS = (TEST, VALID)
"""Splits that runs evaluate. The first one is shown in headlines."""


def validation_split(splits: Collection[str]) -> str:
    """Return the split that is evaluated during training and selects models: valid if it exists, otherwise test."""
    # With a split valid, test is not used before the end.
    return VALID if VALID in splits else TEST


def selection_on_test_warning(split: str | None, chosen: Collection[str]) -> str:
    """Return a warning if the choices `chosen` were made on the test split, or an empty text."""
    if split != TEST or not chosen:
        return ""
    return (
        f"the test split decided {' and '.join(chosen)}, so its figures are flattered; data with a split valid "
        "(meseta prepare --valid-fraction 0.1) leave test untouched until the end"
    )
