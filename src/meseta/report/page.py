"""Puts the page together and writes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meseta.machine.files import write_atomic
from meseta.report.charts.curves import curves_section
from meseta.report.charts.markup import escape, table, tag
from meseta.report.charts.plan_treemap import plan_section
from meseta.report.data_statistics import data_section
from meseta.report.document import html_document
from meseta.report.evaluation import evaluation_section
from meseta.report.headline import Headline, final_evaluation, headline
from meseta.report.prediction import predicted_section
from meseta.report.record import RUN_FILES, RunRecord, flatten, read_run
from meseta.report.stages import stages_section
from meseta.spec import MesetaError
from meseta.telemetry.formatting import format_count, format_decimal, format_duration, format_si, is_drawable
from meseta.telemetry.splits import TEST, VALID
from meseta.telemetry.timeline import TIMELINE_FILE


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of a run, whole or not at all, to `out` or to `report.html` in its directory; returns the path.

    Reads only the files of the directory (config.yaml, dataset.json, plan.json, environment.json, metrics.jsonl,
    summary.json and, where there is one, timeline.json); the page says which are absent. Raises MesetaError for a
    directory without a run, or a file that cannot be written.
    """
    run_dir = Path(run_dir)
    path = run_dir / "report.html" if out is None else Path(out)
    if out is None and os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise MesetaError(f"report: {str(path)!r} is no regular file; move it away, or name another with --out")
    write_atomic(path, render_report(read_run(run_dir)))
    return path


def render_report(record: RunRecord) -> str:
    """The whole page."""
    sections: list[tuple[str, Callable[[RunRecord], str], str, str]] = [
        ("Curves", curves_section, "metrics.jsonl", "no training step has been logged"),
        ("Evaluation", evaluation_section, "metrics.jsonl", "no evaluation has been recorded"),
        ("Plan", plan_section, "plan.json", "there is no plan with tables"),
        ("Step time", stages_section, "metrics.jsonl", "no stage has been timed"),
        ("Predicted", predicted_section, "summary.json", "the run has not ended, or nothing was predicted"),
        ("Data", data_section, "dataset.json", "there are no statistics of the data"),
        ("Config", _config, "config.yaml", "there is no config"),
        ("Environment", _environment, "environment.json", "nothing was noted about the machine"),
    ]
    body = [_header(record), _problems(record), _tiles(record)]
    for title, build, file, absence in sections:
        problem = f" ({file}: {record.problems[file].text})" if file in record.problems else ""
        content = build(record) or tag("p", escape(f"Not shown: {absence}{problem}."), class_="absent")
        body.append(tag("section", tag("h2", escape(title)), content, id=title.lower().replace(" ", "-")))
    return html_document(f"{record.name}: Meseta run", *body)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One headline figure."""

    name: str
    value: str
    note: str = ""
    is_main: bool = False


def tiles(record: RunRecord) -> list[Tile]:
    """Headline figures, from the summary or, for a run that has not ended, from the last lines of the metrics."""
    head = headline(record)
    is_done = head.is_done
    return [
        _metric_tile(record, head, "auc", "AUC"),
        _metric_tile(record, head, "ne", "NE"),
        Tile(name="samples/s", value=format_si(head.samples_per_s), note="" if is_done else "median so far"),
        Tile(
            name="steps",
            value=format_count(head.num_steps),
            note=f"{format_si(head.num_samples)} samples" if head.num_samples is not None else "",
        ),
        Tile(name="ranks", value=format_count(head.num_ranks)),
        Tile(name="training time", value=format_duration(head.train_s), note="" if is_done else "so far"),
    ]


def _metric_tile(record: RunRecord, head: Headline, key: str, name: str) -> Tile:
    """A figure of the evaluation that counts, with what it is held against."""
    line, valid = head.evaluation, final_evaluation(record, [VALID])
    if line is None:
        return Tile(name=f"{TEST} {name}", value=format_decimal(None), note="no evaluation yet", is_main=True)
    is_last = head.is_done and line.step in (0, head.num_steps)  # an old summary does not say of which step it is
    notes = [
        _teacher_note(record, key),
        f"{VALID} {format_decimal(getattr(valid, key))}" if valid and line.split != VALID else "",
        "" if is_last else f"{'best ' * head.is_done}at step {line.step:,}",
    ]
    note = ", ".join(note for note in notes if note)
    return Tile(name=f"{line.split} {name}", value=format_decimal(getattr(line, key)), note=note, is_main=True)


def _teacher_note(record: RunRecord, figure: str) -> str:
    teacher = record.summary.teacher if record.summary else None
    value = getattr(teacher, figure, None)
    return f"teacher {format_decimal(value)}" if is_drawable(value) else ""


def _header(record: RunRecord) -> str:
    facts = [
        record.config_value("model.name"),
        f"width {record.config_value('model.embedding_dim')}"
        if record.config_value("model.embedding_dim") is not None
        else None,
        f"batch {record.config_value('train.batch_size')}"
        if record.config_value("train.batch_size") is not None
        else None,
        f"seed {record.config_value('seed')}" if record.config_value("seed") is not None else None,
    ]
    shown = " · ".join(str(fact) for fact in facts if fact)
    return tag("header", tag("h1", escape(record.name)), tag("p", escape(shown), class_="facts") if shown else "")


def _problems(record: RunRecord) -> str:
    notes = []
    if record.is_unfinished:
        step = (
            f"The last line of its metrics is of step {record.train_lines[-1].step:,}. " if record.train_lines else ""
        )
        notes.append(f"This run has not ended, or was interrupted. {step}Figures are those so far.")
    files = (*RUN_FILES, TIMELINE_FILE)
    notes += [f"{name}: {record.problems[name].text}." for name in files if name in record.problems]
    return tag("ul", *(tag("li", escape(note)) for note in notes), class_="problems") if notes else ""


def _tiles(record: RunRecord) -> str:
    shown = [
        tag(
            "div",
            tag("div", escape(tile.name), class_="tile-name"),
            tag("div", escape(tile.value), class_="tile-value"),
            tag("div", escape(tile.note), class_="tile-note"),
            class_="tile main" if tile.is_main else "tile",
        )
        for tile in tiles(record)
    ]
    return tag("div", *shown, class_="tiles")


def _config(record: RunRecord) -> str:
    return tag("pre", escape(record.config_text)) if record.config_text else ""


def _environment(record: RunRecord) -> str:
    if not record.environment:
        return ""
    rows = [[escape(key), escape(value)] for key, value in flatten(record.environment.to_dict())]
    return table([], rows, set(), "compact environment")
