"""Puts the page together and writes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meseta.machine.files import write_whole
from meseta.report.charts.curves import curves_section
from meseta.report.charts.markup import table, tag, text
from meseta.report.charts.plan_picture import plan_section
from meseta.report.data_statistics import data_section
from meseta.report.document import document
from meseta.report.evaluation import evaluation_section
from meseta.report.headline import Headline, final_evaluation, headline
from meseta.report.predicted import predicted_section
from meseta.report.record import RUN_FILES, RunRecord, flatten, read_run
from meseta.report.stages import stages_section
from meseta.spec import MesetaError
from meseta.telemetry.shown import count, drawable, duration, fixed, short
from meseta.telemetry.splits import TEST, VALID
from meseta.telemetry.timeline import TIMELINE_NAME


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
    write_whole(path, render(read_run(run_dir)))
    return path


def render(record: RunRecord) -> str:
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
        content = build(record) or tag("p", text(f"Not shown: {absence}{problem}."), class_="absent")
        body.append(tag("section", tag("h2", text(title)), content, id=title.lower().replace(" ", "-")))
    return document(f"{record.name}: Meseta run", *body)


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
        _figure(record, head, "auc", "AUC"),
        _figure(record, head, "ne", "NE"),
        Tile(name="samples/s", value=short(head.samples_per_s), note="" if is_done else "median so far"),
        Tile(
            name="steps",
            value=count(head.num_steps),
            note=f"{short(head.num_samples)} samples" if head.num_samples is not None else "",
        ),
        Tile(name="ranks", value=count(head.num_ranks)),
        Tile(name="training time", value=duration(head.train_s), note="" if is_done else "so far"),
    ]


def _figure(record: RunRecord, head: Headline, key: str, name: str) -> Tile:
    """A figure of the evaluation that counts, with what it is held against."""
    line, valid = head.evaluation, final_evaluation(record, [VALID])
    if line is None:
        return Tile(name=f"{TEST} {name}", value=fixed(None), note="no evaluation yet", is_main=True)
    is_last = head.is_done and line.step in (0, head.num_steps)  # an old summary does not say of which step it is
    notes = [
        _teacher(record, key),
        f"{VALID} {fixed(getattr(valid, key))}" if valid and line.split != VALID else "",
        "" if is_last else f"{'best ' * head.is_done}at step {line.step:,}",
    ]
    note = ", ".join(note for note in notes if note)
    return Tile(name=f"{line.split} {name}", value=fixed(getattr(line, key)), note=note, is_main=True)


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
    if record.is_unfinished:
        step = f"The last line of its metrics is of step {record.train[-1].step:,}. " if record.train else ""
        notes.append(f"This run has not ended, or was interrupted. {step}Figures are those so far.")
    files = (*RUN_FILES, TIMELINE_NAME)
    notes += [f"{name}: {record.problems[name].text}." for name in files if name in record.problems]
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


def _config(record: RunRecord) -> str:
    return tag("pre", text(record.config_text)) if record.config_text else ""


def _environment(record: RunRecord) -> str:
    if not record.environment:
        return ""
    rows = [[text(key), text(value)] for key, value in flatten(record.environment.to_dict())]
    return table([], rows, set(), "compact environment")
