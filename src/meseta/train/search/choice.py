"""Choice between trials by one validation metric, and the price of the choice in another one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meseta.telemetry.metrics import HIGHER_IS_BETTER, METRICS
from meseta.telemetry.metrics_file import EvalLine
from meseta.telemetry.summary import TrialEntry

# Part of the standard error of a metric by which a trial must be better. The trials share rows, so that most of the
# error is common to them.
_MARGIN = 0.1
# Metrics whose trade-off is shown. NE is log loss in other units.
_COMPARED = ("auc", "logloss")


def trial_entry(settings: dict[str, object], evaluation: EvalLine, metric: str, task: str | None = None) -> TrialEntry:
    """Return the entry of a trial, whose value is `metric` of `task`, or of the first label."""
    metrics = evaluation.tasks.get(task) if task and evaluation.tasks else evaluation
    if metrics is None:
        return TrialEntry(settings=settings)
    return TrialEntry(
        settings=settings, value=metrics.metric(metric), auc=metrics.metric("auc"), logloss=metrics.metric("logloss")
    )


def score(value: float | None, metric: str) -> float:
    """Return a number that is larger for better values of a metric, and the smallest one for undefined values."""
    if value is None or not math.isfinite(value):
        return -math.inf
    return value if metric in HIGHER_IS_BETTER else -value


def is_better(value: float | None, than: float | None, metric: str) -> bool:
    """Whether a value is defined, and better than another one, which may be undefined."""
    return score(value, metric) > score(than, metric)


def select_best(values: Sequence[float | None], metric: str) -> int | None:
    """Return the index of the first best value, or `None` if all are undefined."""
    best: int | None = None
    for index, value in enumerate(values):
        if is_better(value, None if best is None else values[best], metric):
            best = index
    return best


def noise_margin(line: EvalLine, value: float | None, metric: str) -> float:
    """Return the gain below which a trial counts as equal to one with `value` on the rows of `line`."""
    num_rows, num_positives = line.num_samples or 1, line.num_positives or 0
    if value is None:
        return 0.0
    if metric in HIGHER_IS_BETTER:
        rarer = max(min(num_positives, num_rows - num_positives), 1)
        return _MARGIN * math.sqrt(max(value * (1 - value), 0.0) / rarer)
    return _MARGIN * value / math.sqrt(num_rows)


def describe_trade_off(trials: Sequence[TrialEntry], selected: int | None, metric: str) -> str:
    """Describe what the choice by `metric` costs in AUC or log loss, compared with the trial that is best in it.

    The text is empty if the selected trial is best in both, or nothing was selected.
    """
    if selected is None:
        return ""
    names = {one.key: one.name for one in METRICS}
    chosen, notes = trials[selected], []
    for other in (name for name in _COMPARED if name != metric):
        best = select_best([getattr(trial, other) for trial in trials], other)
        if best in (None, selected):
            continue
        rival = trials[best]
        if rival.auc is None or rival.logloss is None or chosen.auc is None or chosen.logloss is None:
            continue
        if getattr(rival, other) == getattr(chosen, other):
            continue
        settings = " ".join(f"{key}={value}" for key, value in rival.settings.items())
        notes.append(
            f"the {names[other]} would choose {settings}: AUC {rival.auc - chosen.auc:+.4f}, log loss "
            f"{(rival.logloss / chosen.logloss - 1) * 100:+.1f} % (set train.early_stopping.metric={other})"
        )
    return "; ".join(notes)
