"""HTML page about a comparison of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meseta.errors import join_names
from meseta.report.charts.chart import Series, horizontal_bars, line_chart
from meseta.report.charts.curves import SAMPLES, SECONDS, STEPS, XAxisUnit, eval_points, last_x, train_points
from meseta.report.charts.markup import escape, html_document, table, tag
from meseta.report.comparison import (
    OVERALL,
    ComparedRun,
    Comparison,
    EvaluationPart,
    FactDifference,
    group_differences,
    speed_ratio,
)
from meseta.report.step_tables import order_stages, stage_css_class
from meseta.report.trials import trials_table
from meseta.system.files import write_atomic
from meseta.telemetry.formatting import (
    NO_VALUE,
    format_bytes,
    format_count,
    format_decimal,
    format_difference,
    format_duration,
    format_si,
)
from meseta.telemetry.metrics import METRICS, Metric
from meseta.telemetry.summary import TrialsRecord

NUM_COLORS = 8
DASHES = ("", "6 3", "2 3")
MAX_POINTS = 200
MAX_ROWS = 14


def write_comparison(comparison: Comparison, out: Path, trials: TrialsRecord | None = None) -> Path:
    """Write the page of a comparison atomically and return its path. Raises MesetaError if it cannot be written.

    `trials` are all trials of a sweep, of which the comparison has the best ones.
    """
    write_atomic(out, render_comparison(comparison, trials))
    return Path(out)


def render_comparison(comparison: Comparison, trials: TrialsRecord | None = None) -> str:
    """Return the HTML page of a comparison, with a list of `trials` if they are given."""
    labels = [run.label for run in comparison.runs]
    sections = [
        *([("Trials", trials_table(trials), "")] if trials else []),
        ("Metrics", _metrics_section(comparison), "no run has been evaluated"),
        ("Curves", _curves_section(comparison), "no training step has been logged"),
        ("Config", _differences_table(comparison.config, labels), "the configs are equal, except for run_dir"),
        ("Data", _differences_table(comparison.data, labels), "the data are equal"),
        ("Plan", _differences_table(comparison.plan, labels), "the plans are equal"),
        ("Speed", _speed_section(comparison), "no times have been logged"),
        ("Environment", _differences_table(comparison.environment, labels), "machine and versions are equal"),
    ]
    notes = tag("ul", *(tag("li", escape(note)) for note in comparison.notes), class_="problems")
    names = join_names(labels, 3, " · ")
    body = [
        tag("header", tag("h1", escape(names)), tag("p", escape(f"{len(labels)} runs"), class_="facts")),
        notes if comparison.notes else "",
        _legend(comparison.runs),
    ]
    for title, content, absence in sections:
        shown = content or tag("p", escape(f"{absence[0].upper()}{absence[1:]}."), class_="absent")
        body.append(tag("section", tag("h2", escape(title)), shown, id=title.lower()))
    return html_document(f"{names}: Meseta runs", *body, style=_run_styles(len(labels)))


def _run_styles(num_runs: int) -> str:
    """Return CSS rules for the lines, dots and swatches of each run."""
    # From the ninth run on, the eight colors are repeated with dashed lines.
    rules = []
    for i in range(num_runs):
        colour, dash = f"var(--run-{i % NUM_COLORS})", DASHES[i // NUM_COLORS % len(DASHES)]
        dashed = f" stroke-dasharray: {dash};" if dash else ""
        rules.append(f"svg .run-{i}-line, svg .run-{i}-link {{ stroke: {colour};{dashed} }}")
        rules.append(
            f"svg .run-{i}-dot {{ fill: {colour}; stroke: var(--paper); }} .run-{i} {{ background: {colour}; }}"
        )
    return "\n".join(rules)


def _swatch(index: int, label: str) -> str:
    return tag("span", class_=f"swatch run-{index}") + escape(label)


def _legend(runs: Sequence[ComparedRun]) -> str:
    entries = [
        tag("li", _swatch(i, run.label), tag("span", escape(_run_facts(run)), class_="tile-note"))
        for i, run in enumerate(runs)
    ]
    return tag("ul", *entries, class_="legend runs")


def _run_facts(run: ComparedRun) -> str:
    model, batch = run.record.config_value("model.name"), run.record.config_value("train.batch_size")
    known = [model, f"batch {batch}" if batch is not None else None, "not ended" if run.record.is_unfinished else None]
    return ", ".join(str(fact) for fact in known if fact)


def _metrics_section(comparison: Comparison) -> str:
    runs = comparison.runs
    if all(run.headline.evaluation is None for run in runs):
        return ""
    note = (
        f"Small numbers are differences from {runs[0].label}. The best value of a column is bold. "
        "Log loss and NE are better if lower, calibration if closer to 1, all other metrics if higher."
    )
    labels = [part for part in comparison.part_names if part.kind == "label"]
    segments = [part for part in comparison.part_names if part.kind == "segment"]
    shown = _metrics_table(comparison, [OVERALL]) + tag("p", escape(note), class_="note")
    if labels:
        shown += tag("h3", "By label") + _metrics_table(comparison, labels)
    if segments:
        shown += tag("details", tag("summary", "By segment"), _metrics_table(comparison, segments))
    return shown


def _metrics_table(comparison: Comparison, parts: Sequence[EvaluationPart]) -> str:
    """Return a table with one row per part and run. Parts that a run was not evaluated on are left out."""
    header = ["", "run", "step", *(escape(m.name) + tag("span", class_="delta") for m in comparison.metrics)]
    rows = []
    for part in parts:
        evaluated = [
            (i, run) for i, run in enumerate(comparison.runs) if part == OVERALL or part in run.metrics_by_part
        ]
        for i, run in evaluated:
            step = format_count(run.headline.evaluation.step if run.headline.evaluation else None)
            values = [_metric_cell(comparison, metric, run, part) for metric in comparison.metrics]
            rows.append([escape(part.text) if i == evaluated[0][0] else "", _swatch(i, run.label), step, *values])
    # The part `OVERALL` has no name, so its table needs no column for it.
    if parts == [OVERALL]:
        header, rows = header[1:], [row[1:] for row in rows]
    return table(header, rows, set(range(len(header) - len(comparison.metrics) - 1, len(header))), "compact")


def _metric_cell(comparison: Comparison, metric: Metric, run: ComparedRun, part: EvaluationPart) -> str:
    """Return a metric and its difference from the first run. The best value is bold."""
    value = comparison.value(metric, run, part)
    if value is None:
        return NO_VALUE + tag("span", class_="delta")
    shown = escape(format_decimal(value, metric.decimals))
    compares = comparison.is_comparable(run)
    if compares and value == comparison.best_value(metric, part):
        shown = tag("b", shown)
    difference, first = comparison.difference(metric, run, part), comparison.value(metric, comparison.runs[0], part)
    if difference is None or first is None or run is comparison.runs[0]:
        return shown + tag("span", class_="delta")
    gain = metric.to_loss(first) - metric.to_loss(value)
    # A difference that is rounded to zero, or that is between other rows, has no color.
    is_colored = compares and abs(difference) >= 0.5 * 10**-metric.decimals
    class_ = "delta better" if is_colored and gain > 0 else "delta worse" if is_colored and gain < 0 else "delta"
    return shown + tag("span", escape(format_difference(difference, metric.decimals)), class_=class_)


def _curves_section(comparison: Comparison) -> str:
    """Return charts over samples, steps and seconds, with radio buttons that select one of them."""
    # The style sheet shows the charts of the checked radio button, because pages contain no scripts.
    axes = [axis for axis in (SAMPLES, STEPS, SECONDS) if any(last_x(run.record, axis) for run in comparison.runs)]
    if not axes:
        return ""
    switch, panels = [], []
    for i, axis in enumerate(axes):
        name = f"over-{axis.name}"
        checked = "checked" if i == 0 else None
        switch.append(tag("input", type="radio", name="axis", id=name, checked=checked))
        switch.append(tag("label", escape(f"over {axis.name}"), **{"for": name}))
        panels.append(tag("div", *_charts(comparison, axis), class_=f"panel {name}"))
    return tag("div", *switch, *panels, class_="switched")


def _charts(comparison: Comparison, axis: XAxisUnit) -> list[str]:
    x_max = max(last_x(run.record, axis) for run in comparison.runs)
    main = [metric for metric in METRICS if metric.is_main]
    training = [(m.name, [_train_series(i, run, m, axis) for i, run in enumerate(comparison.runs)]) for m in main]
    evaluations = [(m.name, [_eval_series(i, run, m, axis) for i, run in enumerate(comparison.runs)]) for m in main]
    rates = [
        (title, [_run_series(i, run, train_points(run.record, key, axis)) for i, run in enumerate(comparison.runs)])
        for title, key in (
            ("samples per second", "samples_per_s"),
            ("learning rate, dense", "lr_dense"),
            ("learning rate, tables", "lr_sparse"),
        )
    ]
    rows = []
    splits = {run.curve_split for run in comparison.runs}
    evaluated = splits.pop().capitalize() if len(splits) == 1 else "Evaluated"
    for kind, charts in ((evaluated, evaluations), ("Training", training), ("", rates)):
        drawn = []
        for title, series in charts:
            name = f"{kind} {title}" if kind else title.capitalize()
            svg = line_chart(name, series, x_max, include_zero=not kind, x_name=axis.name, has_legend=True)
            drawn += [tag("div", tag("h3", escape(name)), svg)] if svg else []
        rows.append(tag("div", *drawn, class_="grid") if drawn else "")
    return rows


def _train_series(index: int, run: ComparedRun, metric: Metric, axis: XAxisUnit) -> Series:
    key = "label_loss" if metric.key == "logloss" else metric.key
    return _run_series(index, run, train_points(run.record, key, axis))


def _run_series(index: int, run: ComparedRun, points: list[tuple[float, float | None]]) -> Series:
    return Series(name=run.label, points=points, class_=f"run-{index}", max_points=MAX_POINTS)


def _eval_series(index: int, run: ComparedRun, metric: Metric, axis: XAxisUnit) -> Series:
    lines = [line for line in run.record.eval_lines if line.split == run.curve_split]
    points = eval_points(run.record, lines, metric.value_in, axis)
    return Series(name=run.label, points=points, class_=f"run-{index}", draws_dots=True)


def _differences_table(rows: Sequence[FactDifference], labels: Sequence[str]) -> str:
    """Return a table of differences. Values that differ from the first run are bold, and long tables are folded."""
    rows = group_differences(rows)
    if not rows:
        return ""
    header = ["", *(_swatch(i, label) for i, label in enumerate(labels))]
    cells = [
        [
            escape(row.name),
            escape(row.values[0]),
            *(escape(v) if v in (row.values[0], NO_VALUE) else tag("b", escape(v)) for v in row.values[1:]),
        ]
        for row in rows
    ]
    shown = table(header, cells[:MAX_ROWS], set(), "compact differing")
    if len(cells) > MAX_ROWS:
        rest = table(header, cells[MAX_ROWS:], set(), "compact differing")
        shown += tag("details", tag("summary", escape(f"{len(cells) - MAX_ROWS} more")), rest)
    return shown


def _speed_section(comparison: Comparison) -> str:
    runs = comparison.runs
    header = ["run", "samples/s", f"to {escape(runs[0].label)}", "ranks", "steps", "samples", "training time"]
    header += ["checkpoint", "its bytes", "model"]
    rows = []
    for i, run in enumerate(runs):
        ratio, saved = speed_ratio(run, runs[0]), run.newest_checkpoint
        rows.append(
            [
                _swatch(i, run.label),
                format_si(run.headline.samples_per_s),
                f"{ratio:.2f}" if ratio is not None else NO_VALUE,
                format_count(run.headline.num_ranks),
                format_count(run.headline.num_steps),
                format_si(run.headline.num_samples),
                format_duration(run.headline.train_s),
                escape(f"step {saved.step:,}") if saved else NO_VALUE,
                format_bytes(saved.num_bytes) if saved else NO_VALUE,
                tag("code", escape(saved.checksum[:12])) if saved and saved.checksum else NO_VALUE,
            ]
        )
    note = (
        "Training time does not include evaluations and checkpoints. The column model shows the first digits of the "
        "checkpoint's checksum: runs with equal checksums have the same model to the last bit."
    )
    return (
        table(header, rows, {1, 2, 3, 4, 5, 6, 7, 8}, "compact")
        + tag("p", escape(note), class_="note")
        + _stages_section(runs)
    )


def _stages_section(runs: Sequence[ComparedRun]) -> str:
    timed = [(i, run, run.stages_ms_per_1000_samples) for i, run in enumerate(runs) if run.stages_ms_per_1000_samples]
    if not timed:
        return ""
    names = order_stages({name for _, _, stages in timed for name in stages})
    bars = [(run.label, [(name, stage_css_class(names, name), stages.get(name, 0.0)) for name in names])
            for _, run, stages in timed]  # fmt: skip
    header = ["stage", *(_swatch(i, run.label) for i, run, _ in timed)]
    rows = [
        [
            tag("span", class_=f"swatch {stage_css_class(names, name)}") + escape(name),
            *(escape(f"{stages[name]:.3g}") if name in stages else NO_VALUE for _, _, stages in timed),
        ]
        for name in names
    ]
    rows.append([tag("b", "all stages"), *(tag("b", f"{sum(stages.values()):.3g}") for _, _, stages in timed)])
    title = "Milliseconds per 1,000 samples by stage, rank 0"
    return (
        tag("h3", escape(title))
        + tag("div", horizontal_bars(title, bars, "ms"), class_="scroll")
        + table(header, rows, set(range(1, len(header))), "compact")
    )
