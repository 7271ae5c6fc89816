"""The page that lays runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meseta.machine.files import write_whole
from meseta.report.charts.chart import Series, line_chart, row_bars
from meseta.report.charts.curves import SAMPLES, SECONDS, STEPS, Progress, eval_points, last_x, train_points
from meseta.report.charts.markup import table, tag, text
from meseta.report.comparison import WHOLE, ComparedRun, Comparison, EvaluationPart, speed_ratio
from meseta.report.differences import FactDifference, grouped
from meseta.report.document import document
from meseta.report.stages import ordered, stage_colour
from meseta.telemetry.figures import METRICS, Metric
from meseta.telemetry.shown import ABSENT, byte_size, count, duration, fixed, short, signed

NUM_COLOURS = 8
DASHES = ("", "6 3", "2 3")
MAX_POINTS = 200
MAX_ROWS = 14


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Write the page, whole or not at all, and return its path. Raises MesetaError where it cannot be written."""
    write_whole(out, render(comparison))
    return Path(out)


def render(comparison: Comparison) -> str:
    """The whole page."""
    labels = [run.label for run in comparison.runs]
    sections = [
        ("Metrics", _metrics(comparison), "no run has been evaluated"),
        ("Curves", _curves(comparison), "no training step has been logged"),
        ("Config", _differences(comparison.config, labels), "the configs are the same, but for run_dir"),
        ("Data", _differences(comparison.data, labels), "the data are the same"),
        ("Plan", _differences(comparison.plan, labels), "the plans are the same"),
        ("Speed", _speed(comparison), "nothing was timed"),
        ("Environment", _differences(comparison.environment, labels), "machine and versions are the same"),
    ]
    notes = tag("ul", *(tag("li", text(note)) for note in comparison.notes), class_="problems")
    body = [
        tag("header", tag("h1", text(_title(labels))), tag("p", text(f"{len(labels)} runs"), class_="facts")),
        notes if comparison.notes else "",
        _legend(comparison.runs),
    ]
    for title, content, absence in sections:
        shown = content or tag("p", text(f"{absence[0].upper()}{absence[1:]}."), class_="absent")
        body.append(tag("section", tag("h2", text(title)), shown, id=title.lower()))
    return document(f"{_title(labels)}: Meseta runs", *body, style=_colours(len(labels)))


def _title(labels: Sequence[str]) -> str:
    return " · ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")


def _colours(num_runs: int) -> str:
    """Eight colours; the ninth run has the first one again, dashed."""
    rules = []
    for i in range(num_runs):
        colour, dash = f"var(--run-{i % NUM_COLOURS})", DASHES[i // NUM_COLOURS % len(DASHES)]
        dashed = f" stroke-dasharray: {dash};" if dash else ""
        rules.append(f"svg .run-{i}-line, svg .run-{i}-link {{ stroke: {colour};{dashed} }}")
        rules.append(
            f"svg .run-{i}-dot {{ fill: {colour}; stroke: var(--paper); }} .run-{i} {{ background: {colour}; }}"
        )
    return "\n".join(rules)


def _swatch(index: int, label: str) -> str:
    return tag("span", class_=f"swatch run-{index}") + text(label)


def _legend(runs: Sequence[ComparedRun]) -> str:
    entries = [
        tag("li", _swatch(i, run.label), tag("span", text(_facts(run)), class_="tile-note"))
        for i, run in enumerate(runs)
    ]
    return tag("ul", *entries, class_="legend runs")


def _facts(run: ComparedRun) -> str:
    model, batch = run.record.setting("model.name"), run.record.setting("train.batch_size")
    known = [model, f"batch {batch}" if batch is not None else None, "not ended" if run.record.is_unfinished else None]
    return ", ".join(str(fact) for fact in known if fact)


def _metrics(comparison: Comparison) -> str:
    runs = comparison.runs
    if all(run.head.evaluation is None for run in runs):
        return ""
    note = (
        f"Differences are to {runs[0].label}; the best value of a column is bold. "
        "Log loss and NE are better when lower, calibration when nearer to 1, the others when higher."
    )
    labels = [part for part in comparison.parts if part.kind == "label"]
    segments = [part for part in comparison.parts if part.kind == "segment"]
    shown = _table(comparison, [WHOLE]) + tag("p", text(note), class_="note")
    if labels:
        shown += tag("h3", "By label") + _table(comparison, labels)
    if segments:
        shown += tag("details", tag("summary", "By segment"), _table(comparison, segments))
    return shown


def _table(comparison: Comparison, parts: Sequence[EvaluationPart]) -> str:
    """One row per part and run."""
    header = ["", "run", "step", *(text(m.name) + tag("span", class_="delta") for m in comparison.metrics)]
    rows = []
    for part in parts:
        held = [(i, run) for i, run in enumerate(comparison.runs) if part == WHOLE or part in run.parts]
        for i, run in held:
            step = count(run.head.evaluation.step if run.head.evaluation else None)
            values = [_metric(comparison, metric, run, part) for metric in comparison.metrics]
            rows.append([text(part.text) if i == held[0][0] else "", _swatch(i, run.label), step, *values])
    if parts == [WHOLE]:
        header, rows = header[1:], [row[1:] for row in rows]
    return table(header, rows, set(range(len(header) - len(comparison.metrics) - 1, len(header))), "compact")


def _metric(comparison: Comparison, metric: Metric, run: ComparedRun, part: EvaluationPart) -> str:
    """The value, bold where it is the best, and its difference to the first run."""
    value = comparison.value(metric, run, part)
    if value is None:
        return ABSENT + tag("span", class_="delta")
    shown = text(fixed(value, metric.decimals))
    compares = comparison.is_comparable(run)
    if compares and value == comparison.best(metric, part):
        shown = tag("b", shown)
    difference, first = comparison.difference(metric, run, part), comparison.value(metric, comparison.runs[0], part)
    if difference is None or first is None or run is comparison.runs[0]:
        return shown + tag("span", class_="delta")
    gain = metric.loss(first) - metric.loss(value)
    seen = compares and abs(difference) >= 0.5 * 10**-metric.decimals
    class_ = "delta better" if seen and gain > 0 else "delta worse" if seen and gain < 0 else "delta"
    return shown + tag("span", text(signed(difference, metric.decimals)), class_=class_)


def _curves(comparison: Comparison) -> str:
    """The charts over samples, steps and seconds, of which a switch without script shows one set."""
    axes = [axis for axis in (SAMPLES, STEPS, SECONDS) if any(last_x(run.record, axis) for run in comparison.runs)]
    if not axes:
        return ""
    switch, panels = [], []
    for i, axis in enumerate(axes):
        name = f"over-{axis.name}"
        checked = "checked" if i == 0 else None
        switch.append(tag("input", type="radio", name="axis", id=name, checked=checked))
        switch.append(tag("label", text(f"over {axis.name}"), **{"for": name}))
        panels.append(tag("div", *_charts(comparison, axis), class_=f"panel {name}"))
    return tag("div", *switch, *panels, class_="switched")


def _charts(comparison: Comparison, axis: Progress) -> list[str]:
    x_max = max(last_x(run.record, axis) for run in comparison.runs)
    main = [metric for metric in METRICS if metric.is_main]
    training = [(m.name, [_train_series(i, run, m, axis) for i, run in enumerate(comparison.runs)]) for m in main]
    evaluations = [(m.name, [_eval_series(i, run, m, axis) for i, run in enumerate(comparison.runs)]) for m in main]
    rates = [
        (title, [_line(i, run, train_points(run.record, key, axis)) for i, run in enumerate(comparison.runs)])
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
            svg = line_chart(name, series, x_max, from_zero=not kind, x_name=axis.name, has_legend=True)
            drawn += [tag("div", tag("h3", text(name)), svg)] if svg else []
        rows.append(tag("div", *drawn, class_="grid") if drawn else "")
    return rows


def _train_series(index: int, run: ComparedRun, metric: Metric, axis: Progress) -> Series:
    key = "label_loss" if metric.key == "logloss" else metric.key
    return _line(index, run, train_points(run.record, key, axis))


def _line(index: int, run: ComparedRun, points: list[tuple[float, float | None]]) -> Series:
    return Series(name=run.label, points=points, class_=f"run-{index}", max_points=MAX_POINTS)


def _eval_series(index: int, run: ComparedRun, metric: Metric, axis: Progress) -> Series:
    lines = [line for line in run.record.evals if line.split == run.curve_split]
    points = eval_points(run.record, lines, metric.of, axis)
    return Series(name=run.label, points=points, class_=f"run-{index}", is_dots=True)


def _differences(rows: Sequence[FactDifference], labels: Sequence[str]) -> str:
    """One row per key that differs, bold where a run is unlike the first; many rows are folded."""
    rows = grouped(rows)
    if not rows:
        return ""
    header = ["", *(_swatch(i, label) for i, label in enumerate(labels))]
    cells = [
        [
            text(row.name),
            text(row.values[0]),
            *(text(v) if v in (row.values[0], ABSENT) else tag("b", text(v)) for v in row.values[1:]),
        ]
        for row in rows
    ]
    shown = table(header, cells[:MAX_ROWS], set(), "compact differing")
    if len(cells) > MAX_ROWS:
        rest = table(header, cells[MAX_ROWS:], set(), "compact differing")
        shown += tag("details", tag("summary", text(f"{len(cells) - MAX_ROWS} more")), rest)
    return shown


def _speed(comparison: Comparison) -> str:
    runs = comparison.runs
    header = ["run", "samples/s", f"to {text(runs[0].label)}", "ranks", "steps", "samples", "training time"]
    header += ["checkpoint", "its bytes", "model"]
    rows = []
    for i, run in enumerate(runs):
        ratio, saved = speed_ratio(run, runs[0]), run.saved
        rows.append(
            [
                _swatch(i, run.label),
                short(run.head.samples_per_s),
                f"{ratio:.2f}" if ratio is not None else ABSENT,
                count(run.head.num_ranks),
                count(run.head.num_steps),
                short(run.head.num_samples),
                duration(run.head.train_s),
                text(f"step {saved.step:,}") if saved else ABSENT,
                byte_size(saved.num_bytes) if saved else ABSENT,
                tag("code", text(saved.checksum[:12])) if saved and saved.checksum else ABSENT,
            ]
        )
    note = "Training time is without evaluations and checkpoints. Equal models have equal names, to the last bit."
    return (
        table(header, rows, {1, 2, 3, 4, 5, 6, 7, 8}, "compact") + tag("p", text(note), class_="note") + _stages(runs)
    )


def _stages(runs: Sequence[ComparedRun]) -> str:
    """Where the time went, per 1,000 samples, so that batch sizes do not matter."""
    timed = [(i, run, run.ms_per_1000_samples) for i, run in enumerate(runs) if run.ms_per_1000_samples]
    if not timed:
        return ""
    names = ordered({name for _, _, stages in timed for name in stages})
    bars = [(run.label, [(name, stage_colour(names, name), stages.get(name, 0.0)) for name in names])
            for _, run, stages in timed]  # fmt: skip
    header = ["stage", *(_swatch(i, run.label) for i, run, _ in timed)]
    rows = [
        [
            tag("span", class_=f"swatch {stage_colour(names, name)}") + text(name),
            *(text(f"{stages[name]:.3g}") if name in stages else ABSENT for _, _, stages in timed),
        ]
        for name in names
    ]
    rows.append([tag("b", "all stages"), *(tag("b", f"{sum(stages.values()):.3g}") for _, _, stages in timed)])
    title = "Milliseconds per 1,000 samples by stage, rank 0"
    return (
        tag("h3", text(title))
        + tag("div", row_bars(title, bars, "ms"), class_="scroll")
        + table(header, rows, set(range(1, len(header))), "compact")
    )
