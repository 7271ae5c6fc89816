"""HTML page about a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meseta.report.charts.curves import curves_section
from meseta.report.charts.markup import escape, html_document, table, tag
from meseta.report.charts.plan_treemap import plan_section
from meseta.report.data_statistics import data_section
from meseta.report.evaluation import Headline, evaluation_section, final_evaluation, headline
from meseta.report.importance import importance_section
from meseta.report.new_rows import PROGRESSIVE, TEST_FIRST, measured_epochs, new_rows_section
from meseta.report.prediction import predicted_section
from meseta.report.record import RUN_FILES, RunRecord, flatten, read_run
from meseta.report.step_tables import stages_section
from meseta.spec import MesetaError
from meseta.system.files import write_atomic
from meseta.telemetry.formatting import (
    NO_VALUE,
    format_bytes,
    format_count,
    format_decimal,
    format_duration,
    format_si,
    is_drawable,
)
from meseta.telemetry.history import HISTORY_FILE
from meseta.telemetry.metrics import TEST, VALID
from meseta.telemetry.summary import TRIALS_FILE
from meseta.telemetry.timeline import TIMELINE_FILE


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page about a run atomically and return its path.

    Only these files of the run folder are read: config.yaml, dataset.json, plan.json, environment.json, metrics.jsonl,
    summary.json, and timeline.json, trials.json and history.jsonl if they exist. The page names missing and invalid
    files.

    Args:
        run_dir: Run folder. The run may be unfinished.
        out: Path of the page. The default is `report.html` in the run folder.

    Raises:
        MesetaError: The folder contains no run, or the page cannot be written.
    """
    run_dir = Path(run_dir)
    path = run_dir / "report.html" if out is None else Path(out)
    # A run folder may be untrusted. A link in it must not redirect the page to another file.
    if out is None and os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise MesetaError(f"report: {str(path)!r} is not a regular file; move it, or set another path with --out")
    write_atomic(path, render_report(read_run(run_dir)))
    return path


def render_report(record: RunRecord) -> str:
    """Return the HTML page about a run."""
    sections: list[tuple[str, Callable[[RunRecord], str], str, str]] = [
        ("Curves", curves_section, "metrics.jsonl", "no training step has been logged"),
        ("Evaluation", evaluation_section, "metrics.jsonl", "no evaluation has been recorded"),
        (
            "Importance",
            importance_section,
            "summary.json",
            "the run has not ended, or measured no importance of features",
        ),
        ("Plan", plan_section, "plan.json", "the run has no plan with tables"),
        ("Step time", stages_section, "metrics.jsonl", "no stage times have been logged"),
        ("Predicted", predicted_section, "summary.json", "the run has not ended, or has no prediction"),
        ("Data", data_section, "dataset.json", "the run has no statistics of the data"),
        ("Config", _config, "config.yaml", "the run has no config"),
        ("Environment", _environment, "environment.json", "the run has no record of its environment"),
    ]
    body = [_header(record), _problems(record), _tiles(record)]
    if new_rows := new_rows_section(record):
        body.append(tag("section", tag("h2", "New rows"), new_rows, id="new-rows"))
    for title, build, file, absence in sections:
        problem = f" ({file}: {record.problems[file].text})" if file in record.problems else ""
        content = build(record) or tag("p", escape(f"Not shown: {absence}{problem}."), class_="absent")
        body.append(tag("section", tag("h2", escape(title)), content, id=title.lower().replace(" ", "-")))
    return html_document(f"{record.name}: Meseta run", *body)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Metric or measurement at the top of the page."""

    name: str
    value: str
    note: str = ""
    is_main: bool = False
    """Whether the tile is highlighted."""


def tiles(record: RunRecord) -> list[Tile]:
    """Return the tiles of a run, from its summary, or from the newest metrics if the run has not ended."""
    head = headline(record)
    is_done = head.is_done
    new_rows = _new_rows_tiles(record)
    # A run on new rows often evaluates no split.
    evaluated = () if new_rows and head.evaluation is None else (("auc", "AUC"), ("ne", "NE"))
    return [
        *new_rows,
        *(_metric_tile(record, head, key, name) for key, name in evaluated),
        Tile(name="samples/s", value=format_si(head.samples_per_s), note="" if is_done else "median so far"),
        Tile(
            name="steps",
            value=format_count(head.num_steps),
            note=f"{format_si(head.num_samples)} samples" if head.num_samples is not None else "",
        ),
        Tile(name="ranks", value=format_count(head.num_ranks)),
        Tile(
            name="memory",
            value=NO_VALUE if head.peak_memory_bytes is None else format_bytes(head.peak_memory_bytes),
            note="" if head.peak_memory_bytes is None else "peak of a rank",
        ),
        Tile(name="training time", value=format_duration(head.train_s), note="" if is_done else "so far"),
    ]


def _new_rows_tiles(record: RunRecord) -> list[Tile]:
    """Return the metrics on the new rows of a run that continues from another one."""
    continued = record.summary.continued if record.summary else None
    epochs = {} if continued is None else measured_epochs(continued)
    shown = []
    for kind in (TEST_FIRST, PROGRESSIVE):
        for key, name in (("ne", "NE"), ("auc", "AUC")) if kind in epochs else ():
            epoch = epochs[kind]
            groups = (("new ids", epoch.with_new_ids), ("others", epoch.without_new_ids))
            texts = [f"{group} {format_decimal(m.metric(key))}" for group, m in groups if m and m.num_samples]
            value = format_decimal(epoch.total.metric(key))
            shown.append(Tile(name=f"{kind} {name}", value=value, note=", ".join(texts), is_main=True))
    return shown


def _metric_tile(record: RunRecord, head: Headline, key: str, name: str) -> Tile:
    """Return the tile of a metric, with the teacher's value and that of the validation split as a note."""
    line, valid = head.evaluation, final_evaluation(record, [VALID])
    if line is None:
        return Tile(name=f"{TEST} {name}", value=format_decimal(None), note="no evaluation yet", is_main=True)
    # Summaries of older versions do not record the step of their evaluation. It is then 0.
    is_last = head.is_done and line.step in (0, head.num_steps)
    notes = [
        _teacher_note(record, key),
        f"{VALID} {format_decimal(getattr(valid, key))}" if valid and line.split != VALID else "",
        "" if is_last else f"{'best ' * head.is_done}at step {line.step:,}",
    ]
    note = ", ".join(note for note in notes if note)
    return Tile(name=f"{line.split} {name}", value=format_decimal(getattr(line, key)), note=note, is_main=True)


def _teacher_note(record: RunRecord, metric: str) -> str:
    teacher = record.summary.teacher if record.summary else None
    value = getattr(teacher, metric, None)
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
        step = f"Its last logged step is {record.train_lines[-1].step:,}. " if record.train_lines else ""
        notes.append(f"This run has not ended, or was interrupted. {step}Metrics and times are preliminary.")
    files = (*RUN_FILES, TIMELINE_FILE, TRIALS_FILE, HISTORY_FILE)
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
