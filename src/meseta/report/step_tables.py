"""Section of a run's page about the time of a step, and the order and colors of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from meseta.report.charts.chart import stacked_bars
from meseta.report.charts.markup import escape, table, tag
from meseta.report.charts.timeline_chart import timeline_section
from meseta.spec.stages import STAGE_NAMES, STAGES
from meseta.telemetry.formatting import format_bytes, format_count, format_percent, is_drawable
from meseta.telemetry.metrics_file import TrainLine
from meseta.telemetry.row_traffic import RowTraffic
from meseta.telemetry.span import RowWait, TransferMeans

if TYPE_CHECKING:
    from meseta.report.record import RunRecord

NUM_SPARE_COLORS = 3
MAX_BARS = 48


def stages_section(record: RunRecord) -> str:
    """Return charts and tables of stages, transfers and waits, or an empty string if no stage was timed."""
    lines = [line for line in record.train_lines if line.stages_s]
    if not lines:
        return ""
    names = order_stages({name for line in lines for name in line.stages_s})
    size = -(-len(lines) // MAX_BARS)  # Long runs have more lines than bars fit into the chart.
    groups = [lines[start : start + size] for start in range(0, len(lines), size)]
    # Each bar starts at the last sample of the previous bar.
    starts = [0, *(group[-1].num_samples for group in groups[:-1])]
    spans = [(float(start), float(group[-1].num_samples)) for start, group in zip(starts, groups, strict=True)]
    layers = [(name, stage_css_class(names, name), [_mean_ms(group, name) for group in groups]) for name in names]
    means = {name: _mean_ms(lines, name) for name in names}
    total = sum(means.values())
    rows = [
        [
            tag("span", class_=f"swatch {stage_css_class(names, name)}") + escape(name),
            escape(f"{means[name]:.2f}"),
            escape(format_percent(means[name] / total) if total else format_percent(None)),
        ]
        for name in reversed(names)  # The last stage is at the top of the bars.
    ]
    rows.append([tag("b", "all stages"), tag("b", escape(f"{total:.2f}")), ""])
    chart = stacked_bars("Milliseconds per step by stage", spans, layers)
    caption = tag("h3", "Milliseconds per step, rank 0")
    pictures = tag(
        "div",
        tag("div", caption, chart),
        tag("div", table(["stage", "mean ms", "share"], rows, {1, 2}, "compact")),
        class_="wide-narrow",
    )
    waited = row_waits_table(record, groups, spans)
    over_time = transfers_table(record) + row_traffic_table(record) + timeline_section(record.timeline)
    graphs = "".join(tag("p", escape(line)) for line in _graph_lines(record))
    return tag("p", escape(_intro(record, total))) + graphs + pictures + _stages_legend(names) + waited + over_time


def _stages_legend(names: Sequence[str]) -> str:
    entries = [
        tag("li", tag("b", escape(stage.name)), escape(f": {stage.description}"))
        for stage in STAGES
        if stage.name in names
    ]
    return tag("ul", *entries, class_="legend")


def mean_stages_s(record: RunRecord) -> dict[str, float]:
    """Return the mean seconds per step of each stage on rank 0. Empty if no stage was timed."""
    lines = [line for line in record.train_lines if line.stages_s]
    names = order_stages({name for line in lines for name in line.stages_s})
    return {name: _mean_ms(lines, name) / 1000.0 for name in names}


def _intro(record: RunRecord, total_ms: float) -> str:
    intro = f"The timed stages of a step take {total_ms:.3g} ms on rank 0."
    summary = record.summary
    if summary and summary.num_steps and summary.train_s is not None and is_drawable(summary.train_s):
        whole_ms = 1000.0 * summary.train_s / summary.num_steps
        intro += (
            f" The mean over the whole run is {whole_ms:.3g} ms ({format_count(summary.num_steps)} steps, without "
            "evaluations and checkpoints)."
        )
    return intro


def order_stages(names: set[str]) -> list[str]:
    """Sort stages by their order within a step. Unknown stages follow in alphabetical order."""
    return [name for name in STAGE_NAMES if name in names] + sorted(names - set(STAGE_NAMES))


def stage_css_class(names: Sequence[str], name: str) -> str:
    """Return the CSS class that sets the color of the stage `name`. `names` are all stages of the chart."""
    if name in STAGE_NAMES:
        return f"stage-{name}"
    # Unknown stages of one chart share a few spare colors in turn.
    unknown = [other for other in names if other not in STAGE_NAMES]
    return f"stage-spare-{unknown.index(name) % NUM_SPARE_COLORS}"


def _mean_ms(lines: Sequence[TrainLine], name: str) -> float:
    # A stage took no time in a line that does not contain it.
    values = [line.stages_s.get(name, 0.0) for line in lines]
    return 1000.0 * sum(max(v, 0.0) for v in values if is_drawable(v)) / len(lines)


ROW_TRAFFIC_COLUMNS = ["table", "hits", "misses", "ms exposed", "read from disk", "written", "write amplification"]
TRANSFER_COLUMNS = ["transfer", "times", "to its host", "to other hosts", "ms in progress", "ms hidden", "ms exposed"]


def transfers_table(record: RunRecord) -> str:
    """Return a table of the transfers of rank 0 as means per step, or an empty string if there were none."""
    lines = [line for line in record.train_lines if line.transfers]
    names = dict.fromkeys(name for line in lines for name in line.transfers)
    if not names:
        return ""
    rows = [[escape(name), *_transfer_cells(_mean_transfer(lines, name))] for name in names]
    intro = (
        "Data that rank 0 sends to other ranks in a step. A transfer is in progress from its start until its end is "
        "detected. Exposed is the part for which the rank is blocked. The rest is hidden behind computation."
    )
    return (
        tag("h3", "Exchanges per step, rank 0")
        + tag("p", escape(intro))
        + "".join(tag("p", escape(line)) for line in _overlap_lines(record))
        + table(TRANSFER_COLUMNS, rows, set(range(1, len(TRANSFER_COLUMNS))), "compact")
    )


def row_traffic_table(record: RunRecord) -> str:
    """Return a table of the cache traffic of offloaded tables as means per step, or an empty string without any."""
    lines = [line for line in record.train_lines if line.row_traffic]
    names = dict.fromkeys(name for line in lines for name in line.row_traffic)
    if not names:
        return ""
    # A line without a table counts as zero traffic of this table.
    every = {name: [line.row_traffic.get(name, RowTraffic()) for line in lines] for name in names}
    means = {name: sum(of_table, RowTraffic()).scaled(1 / len(lines)) for name, of_table in every.items()}
    intro = (
        "Distinct rows that a step looks up, over all ranks. Rows in the cache are hits. The others are misses and are "
        "fetched from host memory or from a disk. Exposed is the time for which ranks are blocked by row fetches. "
        "Write amplification is the number of bytes written to the disk per byte of evicted rows."
    )
    rows = [[escape(name), *_traffic_cells(mean)] for name, mean in means.items()]
    rows.append(["all", *_traffic_cells(sum(means.values(), RowTraffic()))])
    return (
        tag("h3", "Cache traffic per step")
        + tag("p", escape(intro))
        + table(ROW_TRAFFIC_COLUMNS, rows, set(range(1, len(ROW_TRAFFIC_COLUMNS))), "compact")
    )


def _traffic_cells(mean: RowTraffic) -> list[str]:
    amplification = mean.write_amplification
    return [
        f"{mean.num_rows - mean.num_misses:,.0f}",
        f"{mean.num_misses:,.0f}",
        f"{1e3 * mean.wait_s:.2f}",
        escape(format_bytes(mean.read_bytes)),
        escape(format_bytes(mean.written_bytes)),
        "" if amplification is None else f"{amplification:.2f}",
    ]


def _overlap_lines(record: RunRecord) -> list[str]:
    """Return one line about the exchanges that overlap with computation, and one per exchange that does not."""
    overlap = None if record.summary is None else record.summary.overlap
    if overlap is None:
        return []
    hidden = f"Hidden behind computation: {', '.join(overlap.hidden) or 'nothing'}."
    return [hidden, *(f"Not hidden: {name}, because {why}." for name, why in overlap.excluded.items())]


def _graph_lines(record: RunRecord) -> list[str]:
    """Return one line about the steps that were replayed from CUDA graphs, and one per reason for other steps."""
    graphs = None if record.summary is None else record.summary.graphs
    if graphs is None:
        return []
    replayed = f"Steps replayed from {graphs.num_graphs or 0} CUDA graphs: {graphs.num_replayed_steps or 0:,}."
    return [replayed, *(f"Eager steps: {count:,}, because of {why}." for why, count in graphs.eager_steps.items())]


def _mean_transfer(lines: Sequence[TrainLine], name: str) -> TransferMeans:
    spans = [line.transfers[name] for line in lines if name in line.transfers]
    means = {
        field.name: sum(v for v in (getattr(span, field.name) for span in spans) if is_drawable(v)) / len(lines)
        for field in fields(TransferMeans)
    }
    return TransferMeans(**means)


def _transfer_cells(mean: TransferMeans) -> list[str]:
    sizes = (format_bytes(mean.intra_host_bytes), format_bytes(mean.inter_host_bytes))
    hidden_s = max(mean.seconds - mean.wait_s, 0.0)
    return [
        f"{mean.num_calls:.3g}",
        *map(escape, sizes),
        *(f"{1e3 * s:.2f}" for s in (mean.seconds, hidden_s, mean.wait_s)),
    ]


CAUSE_CSS_CLASSES = {
    "storage_s": "stage-spare-0",
    "decode_s": "stage-spare-1",
    "transform_s": "stage-spare-2",
    "transfer_s": "stage-copy",
    "no_lease_s": "stage-data",
}
"""Field of `RowWait` -> CSS class of its bars."""
CAUSE_TEXTS = {
    "storage_s": "storage",
    "decode_s": "decode",
    "transform_s": "transform",
    "transfer_s": "wire",
    "no_lease_s": "no lease",
}
"""Field of `RowWait` -> name of the cause in the report."""


def row_waits_table(record: RunRecord, groups: Sequence[Sequence[TrainLine]], spans: list[tuple[float, float]]) -> str:
    """Return stacked bars by cause and a table by reader, both of means per step.

    Args:
        record: The run.
        groups: Consecutive lines about training. Each group becomes one bar.
        spans: Numbers of samples before and after each group.

    Returns:
        HTML, or an empty string if rank 0 never waited for a reader.
    """
    lines = [line for group in groups for line in group]
    readers = sorted({reader for line in lines for reader in line.row_waits})
    if not readers:
        return ""
    by_group = [sum((_mean_wait(group, reader) for reader in readers), RowWait()) for group in groups]
    layers = [
        (CAUSE_TEXTS[cause], colour, [1e3 * getattr(wait, cause) for wait in by_group])
        for cause, colour in CAUSE_CSS_CLASSES.items()
    ]
    means = {reader: _mean_wait(lines, reader) for reader in readers}
    rows = [[escape(reader.partition("://")[2] or reader), *_wait_cells(mean)] for reader, mean in means.items()]
    rows.append([tag("b", "all"), *_wait_cells(sum(means.values(), RowWait()))])
    heads = [
        "reader",
        *(tag("span", class_=f"swatch {colour}") + CAUSE_TEXTS[cause] for cause, colour in CAUSE_CSS_CLASSES.items()),
        "all",
    ]
    intro = (
        "Time for which the stage data was blocked by readers, by cause. Storage: the reader waited for files. Decode: "
        "it decoded prepared data. Transform: it parsed and encoded raw rows. Wire: all other causes with an assigned "
        "reader, such as transmission. No lease: no reader was assigned."
    )
    chart = stacked_bars("Milliseconds per step that rows were waited for", spans, layers)
    return (
        tag("h3", "Milliseconds per step that rows were waited for, rank 0")
        + tag("p", escape(intro))
        + (chart and tag("div", tag("div", chart), class_="wide-narrow"))
        + table(heads, rows, set(range(1, len(heads))), "compact")
    )


def _mean_wait(lines: Sequence[TrainLine], reader: str) -> RowWait:
    waits = [line.row_waits[reader] for line in lines if reader in line.row_waits]
    sums = {
        field.name: sum(v for v in (getattr(wait, field.name) for wait in waits) if is_drawable(v) and v > 0)
        for field in fields(RowWait)
    }
    # A line without this reader counts as zero wait.
    return RowWait(**sums).scaled(1.0 / len(lines))


def _wait_cells(mean: RowWait) -> list[str]:
    return [
        f"{1e3 * seconds:.2f}" for seconds in (*(getattr(mean, cause) for cause in CAUSE_CSS_CLASSES), mean.total_s)
    ]
