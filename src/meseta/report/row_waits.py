"""Chart and table of the time that rank 0 waited for rows of readers, by cause and by reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from meseta.report.charts.chart import stacked_bars
from meseta.report.charts.markup import escape, table, tag
from meseta.report.record import RunRecord
from meseta.telemetry.formatting import is_drawable
from meseta.telemetry.metrics_file import TrainLine
from meseta.telemetry.row_waits import RowWait

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
