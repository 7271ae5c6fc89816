"""Puts the page together and writes it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from meseta.spec import MesetaError
from meseta.train.report.chart import Series, line_chart, reliability_plot
from meseta.train.report.data_statistics import data_section
from meseta.train.report.figures import ABSENT, count, drawable, duration, fixed, plural, short
from meseta.train.report.markup import table, tag, text
from meseta.train.report.plan_picture import plan_section
from meseta.train.report.record import RUN_FILES, EvalLine, RunRecord, read_run
from meseta.train.report.stages import stages_section

MAX_EVALS = 12


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory, whole or not at all, and return its path.

    Reads only the files of the directory (config.yaml, dataset.json, plan.json, environment.json, metrics.jsonl,
    summary.json); the page says which are absent. Raises MesetaError for a directory without a run, or one that
    cannot be written.
    """
    run_dir = Path(run_dir)
    content = render(read_run(run_dir)).encode("utf-8", errors="replace")
    path = run_dir / "report.html"
    unfinished = run_dir / f".report-{os.getpid()}.html"
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise MesetaError(f"report: {str(path)!r} cannot be written: {error.strerror}") from None
    return path


def render(record: RunRecord) -> str:
    """The whole page."""
    sections: list[tuple[str, Callable[[RunRecord], str], str, str]] = [
        ("Curves", _curves, "metrics.jsonl", "no training step has been logged"),
        ("Evaluation", _evaluation, "metrics.jsonl", "no evaluation has been recorded"),
        ("Plan", plan_section, "plan.json", "there is no plan with tables"),
        ("Step time", stages_section, "metrics.jsonl", "no stage has been timed"),
        ("Data", data_section, "dataset.json", "there are no statistics of the data"),
        ("Config", _config, "config.yaml", "there is no config"),
        ("Environment", _environment, "environment.json", "nothing was noted about the machine"),
    ]
    body = [_header(record), _problems(record), _tiles(record)]
    for title, build, file, absence in sections:
        problem = f" ({file}: {record.problems[file]})" if file in record.problems else ""
        content = build(record) or tag("p", text(f"Not shown: {absence}{problem}."), class_="absent")
        body.append(tag("section", tag("h2", text(title)), content, id=title.lower().replace(" ", "-")))
    style = resources.files("meseta.train.report").joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        tag("title", text(f"{record.name}: Meseta run")),
        tag("style", style),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", tag("main", *body)), lang="en") + "\n"


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One headline figure."""

    name: str
    value: str
    note: str = ""
    is_main: bool = False


def tiles(record: RunRecord) -> list[Tile]:
    """Headline figures, from the summary or, for a run that has not ended, from the last lines of the metrics."""
    summary, last = record.summary, record.train[-1] if record.train else None
    test = final_evaluation(record)
    is_done = summary is not None
    rates = [
        line.samples_per_s for line in record.train if line.samples_per_s is not None and drawable(line.samples_per_s)
    ]
    samples_per_s = summary.samples_per_s if summary else statistics.median(rates) if rates else None
    num_steps = summary.num_steps if summary else last.step if last else None
    num_samples = summary.num_samples if summary else last.num_samples if last else None
    train_s = summary.train_s if summary else last.time_s if last else None
    num_ranks = summary.num_ranks if summary else None
    if num_ranks is None and record.plan is not None:
        num_ranks = record.plan.num_ranks
    split = test.split if test else "test"
    at = "no evaluation yet" if test is None else "" if is_done else f"at step {test.step:,}"
    return [
        Tile(
            name=f"{split} AUC",
            value=fixed(test.auc if test else None),
            note=_teacher(record, "auc") or at,
            is_main=True,
        ),
        Tile(
            name=f"{split} NE", value=fixed(test.ne if test else None), note=_teacher(record, "ne") or at, is_main=True
        ),
        Tile(name="samples/s", value=short(samples_per_s), note="" if is_done else "median so far"),
        Tile(
            name="steps",
            value=count(num_steps),
            note=f"{short(num_samples)} samples" if num_samples is not None else "",
        ),
        Tile(name="ranks", value=count(num_ranks)),
        Tile(name="training time", value=duration(train_s), note="" if is_done else "so far"),
    ]


def final_evaluation(record: RunRecord) -> EvalLine | None:
    """The summary's, or the last one of the metrics, if there is one of the test split."""
    if record.summary and record.summary.test:
        return record.summary.test
    candidates = [line for line in record.evals if line.split == "test"] or record.evals
    return candidates[-1] if candidates else None


def _teacher(record: RunRecord, figure: str) -> str:
    teacher = record.summary.teacher if record.summary else None
    value = getattr(teacher, figure, None)
    return f"teacher {fixed(value)}" if drawable(value) else ""


def _header(record: RunRecord) -> str:
    facts = [
        record.setting("model.name"),
        f"width {record.setting('model.embedding_dim')}" if record.setting("model.embedding_dim") is not None else None,
        f"batch {record.setting('train.batch_size')}" if record.setting("train.batch_size") is not None else None,
        f"seed {record.setting('seed')}" if record.setting("seed") is not None else None,
    ]
    shown = " · ".join(str(fact) for fact in facts if fact)
    return tag("header", tag("h1", text(record.name)), tag("p", text(shown), class_="facts") if shown else "")


def _problems(record: RunRecord) -> str:
    notes = []
    if record.summary is None and record.problems.get("summary.json", "").startswith("it is not"):
        step = f"The last line of its metrics is of step {record.train[-1].step:,}. " if record.train else ""
        notes.append(f"This run has not ended, or was interrupted. {step}Figures are those so far.")
    notes += [f"{name}: {record.problems[name]}." for name in RUN_FILES if name in record.problems]
    return tag("ul", *(tag("li", text(note)) for note in notes), class_="problems") if notes else ""


def _tiles(record: RunRecord) -> str:
    shown = [
        tag(
            "div",
            tag("div", text(tile.name), class_="tile-name"),
            tag("div", text(tile.value), class_="tile-value"),
            tag("div", text(tile.note), class_="tile-note"),
            class_="tile main" if tile.is_main else "tile",
        )
        for tile in tiles(record)
    ]
    return tag("div", *shown, class_="tiles")


def _curves(record: RunRecord) -> str:
    if not record.train:
        return ""
    x_max = float(record.train[-1].num_samples)
    teacher = record.summary.teacher if record.summary else None
    charts = []
    for title, train_key, eval_key, reference in (
        ("Log loss", "loss", "logloss", None),
        ("Normalised entropy", "ne", "ne", teacher.ne if teacher else None),
        ("AUC", "auc", "auc", teacher.auc if teacher else None),
    ):
        series = [_train_series(record, train_key, "train", "train"), *_eval_series(record, eval_key)]
        level = ("teacher", reference) if reference is not None and drawable(reference) else None
        charts.append((title, line_chart(title, series, x_max, reference=level)))
    for title, key in (
        ("Samples per second", "samples_per_s"),
        ("Learning rate, dense", "lr_dense"),
        ("Learning rate, tables", "lr_sparse"),
    ):
        charts.append((title, line_chart(title, [_train_series(record, key, "", "plain")], x_max, from_zero=True)))
    drawn = [tag("div", tag("h3", text(title)), svg) for title, svg in charts if svg]
    return tag("div", *drawn, class_="grid")


def _train_series(record: RunRecord, key: str, name: str, class_: str) -> Series:
    points = [(float(line.num_samples), getattr(line, key)) for line in record.train]
    return Series(name=name, points=points, class_=class_)


def _eval_series(record: RunRecord, key: str) -> list[Series]:
    """One series per split. Evaluations know their step; the training lines tell how many samples that is."""
    steps = [0, *(line.step for line in record.train)]
    samples = [0, *(line.num_samples for line in record.train)]
    per_step = samples[-1] / max(steps[-1], 1)
    series: list[Series] = []
    for split in dict.fromkeys(line.split for line in record.evals):
        lines = [line for line in record.evals if line.split == split]
        xs = [float(np.interp(v.step, steps, samples)) if v.step <= steps[-1] else v.step * per_step for v in lines]
        points = [(min(x, float(samples[-1])), getattr(line, key)) for x, line in zip(xs, lines, strict=True)]
        series.append(Series(name=split, points=points, class_="other" if series else "test", is_dots=True))
    return series


def _evaluation(record: RunRecord) -> str:
    final = final_evaluation(record)
    if final is None:
        return ""
    lines = list(record.evals) or [final]
    rows = [
        [
            count(v.step),
            text(v.split),
            *(text(fixed(x)) for x in (v.logloss, v.ne, v.auc)),
            text(fixed(v.calibration, 3)),
        ]
        for v in lines[-MAX_EVALS:]
    ]
    teacher = record.summary.teacher if record.summary else None
    if teacher:
        rows.append(["", "teacher", ABSENT, text(fixed(teacher.ne)), text(fixed(teacher.auc)), ABSENT])
    header = ["step", "split", "log loss", "NE", "AUC", "calibration"]
    parts = [table(header, rows, {0, 2, 3, 4, 5}, "compact")]
    if len(lines) > MAX_EVALS:
        parts.append(tag("p", text(f"The last {MAX_EVALS} of {len(lines)} evaluations."), class_="note"))
    parts.append(tag("p", text(_calibration_note(final)), class_="note"))
    plot = reliability_plot(final.reliability)
    drawn = (
        tag("div", tag("h3", "Reliability"), plot)
        if plot
        else tag("p", "No reliability curve was recorded.", class_="absent")
    )
    return tag("div", drawn, tag("div", tag("h3", "Figures"), *parts), class_="narrow-wide")


def _calibration_note(final: EvalLine) -> str:
    note = "Calibration is mean prediction / mean label"
    if final.calibration is not None and drawable(final.calibration):
        off = final.calibration - 1.0
        note += f"; the model predicts {abs(off):.1%} {'more' if off >= 0 else 'fewer'} positives than there are"
    if final.num_samples:
        note += f", over {plural(final.num_samples, 'sample')}"
    dots = "The dots are bins of equal count with 95% intervals; on the diagonal, predictions are right on average."
    return f"{note}. {dots}" if final.reliability else f"{note}."


def _config(record: RunRecord) -> str:
    return tag("pre", text(record.config_text)) if record.config_text else ""


def _environment(record: RunRecord) -> str:
    if not record.environment:
        return ""
    rows = [[text(key), text(value)] for key, value in _flatten(record.environment)]
    return table([], rows, set(), "compact environment")


def _flatten(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested keys with dots between them."""
    pairs: list[tuple[str, Any]] = []
    for key, item in value.items():
        if isinstance(item, dict):
            pairs += _flatten(item, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", ", ".join(map(str, item)) if isinstance(item, list) else item))
    return pairs
