"""Charts of a run's metrics over samples, steps or seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meseta.report.charts.chart import Series, line_chart
from meseta.report.charts.markup import escape, tag
from meseta.telemetry.formatting import is_drawable
from meseta.telemetry.metrics import TEST, Metric
from meseta.telemetry.metrics_file import EvalLine, TrainLine

if TYPE_CHECKING:
    from meseta.report.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class XAxisUnit:
    """Unit of the x axis of a chart."""

    name: str
    """Name of the unit, as shown next to the axis."""
    line_field: str
    """Field of a line about training that contains the x value."""


SAMPLES = XAxisUnit(name="samples", line_field="num_samples")
STEPS = XAxisUnit(name="steps", line_field="step")
SECONDS = XAxisUnit(name="seconds", line_field="time_s")


def train_points(record: RunRecord, key: str, progress: XAxisUnit = SAMPLES) -> list[tuple[float, float | None]]:
    """Return (x, value) of each line about training. `key` is the field with the value."""
    return [(float(getattr(line, progress.line_field)), getattr(line, key)) for line in _lines_with_x(record, progress)]


def eval_points(
    record: RunRecord, lines: Sequence[EvalLine], value: Callable[[EvalLine], float | None], progress: XAxisUnit
) -> list[tuple[float, float | None]]:
    """Return (x, value) of each evaluation in `lines`."""
    # Evaluations record only their step. Interpolate x between the steps of lines about training.
    placed = _lines_with_x(record, progress)
    steps = [0, *(line.step for line in placed)]
    xs = [0.0, *(float(getattr(line, progress.line_field)) for line in placed)]
    per_step = xs[-1] / max(steps[-1], 1)
    eval_xs = [float(np.interp(v.step, steps, xs)) if v.step <= steps[-1] else v.step * per_step for v in lines]
    # An evaluation after the last logged step is drawn at the right end.
    return [(min(x, xs[-1]), value(line)) for x, line in zip(eval_xs, lines, strict=True)]


def last_x(record: RunRecord, progress: XAxisUnit) -> float:
    """Return the x value of the last line about training, or 0 without lines."""
    lines = _lines_with_x(record, progress)
    return float(getattr(lines[-1], progress.line_field)) if lines else 0.0


def curves_section(record: RunRecord) -> str:
    """Return the charts of a run, or an empty string if no step was logged."""
    if not record.train_lines:
        return ""
    x_max = last_x(record, SAMPLES)
    teacher = record.summary.teacher if record.summary else None
    charts = []
    for title, train_key, life_key, eval_key, reference in (
        ("Log loss", "label_loss", "logloss", "logloss", None),
        ("Normalized entropy", "ne", "ne", "ne", teacher.ne if teacher else None),
        ("AUC", "auc", "auc_binned", "auc", teacher.auc if teacher else None),
    ):
        train = Series(name="train", points=train_points(record, train_key), class_="train")
        life = [(float(line.num_samples), getattr(line.lifetime, life_key)) for line in _lines_with_x(record, SAMPLES)]
        series = [
            train,
            Series(name="whole run", points=life, class_="life"),
            # Only the key of this metric is used, not its direction.
            *_eval_series(record, Metric(key=eval_key, name=title, better_direction="lower")),
        ]
        level = ("teacher", reference) if reference is not None and is_drawable(reference) else None
        charts.append((title, line_chart(title, series, x_max, reference=level, best_x=_best_x(record))))
    for title, key in (
        ("Samples per second", "samples_per_s"),
        ("Learning rate, dense", "lr_dense"),
        ("Learning rate, tables", "lr_sparse"),
    ):
        plain = Series(name="", points=train_points(record, key), class_="plain")
        charts.append((title, line_chart(title, [plain], x_max, include_zero=True)))
    drawn = [tag("div", tag("h3", escape(title)), svg) for title, svg in charts if svg]
    return tag("div", *drawn, class_="grid")


def _eval_series(record: RunRecord, metric: Metric) -> list[Series]:
    series: list[Series] = []
    for split in dict.fromkeys(line.split for line in record.eval_lines):
        lines = [line for line in record.eval_lines if line.split == split]
        points = eval_points(record, lines, metric.value_in, SAMPLES)
        class_ = "test" if split == TEST else "other"
        series.append(Series(name=split, points=points, class_=class_, draws_dots=True))
    return series


def _best_x(record: RunRecord) -> float | None:
    """Return the x value of the best evaluation, or `None` if it is unknown or the only one of its split."""
    best = [line for line in record.eval_lines if record.is_best(line)]
    if not best or sum(line.split == best[0].split for line in record.eval_lines) < 2:
        return None
    return eval_points(record, best, lambda line: None, SAMPLES)[0][0]


def _lines_with_x(record: RunRecord, progress: XAxisUnit) -> list[TrainLine]:
    return [
        line for line in record.train_lines if (x := getattr(line, progress.line_field)) is not None and is_drawable(x)
    ]
