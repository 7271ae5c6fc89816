"""What rank 0 waited for rows that readers decode, by cause and by reader."""

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
"""Of each cause, as it is called in metrics.jsonl."""
CAUSE_TEXTS = {
    "storage_s": "storage",
    "decode_s": "decode",
    "transform_s": "transform",
    "transfer_s": "wire",
    "no_lease_s": "no lease",
}
"""Field of `RowWait` -> name of the cause in the report."""


def row_waits_table(record: RunRecord, groups: Sequence[Sequence[TrainLine]], spans: list[tuple[float, float]]) -> str:
    """Stacked bars by cause beside a table by reader, means per step; an empty string where no reader was waited for.

    `groups`: neighbouring lines that make a bar each, and `spans` the samples that these reach over.
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
        "What the stage data waited for, of rows that readers decode: bytes of files, decoding, parsing of raw rows, "
        "the wire with all else at a reader that was there, and readers that were not."
    )
    chart = stacked_bars("Milliseconds per step that rows were waited for", spans, layers)
    return (
        tag("h3", "Milliseconds per step that rows were waited for, rank 0")
        + tag("p", escape(intro))
        + (chart and tag("div", tag("div", chart), class_="wide-narrow"))
        + table(heads, rows, set(range(1, len(heads))), "compact")
    )


def _mean_wait(lines: Sequence[TrainLine], reader: str) -> RowWait:
    found = [line.row_waits[reader] for line in lines if reader in line.row_waits]
    sums = {
        field.name: sum(v for v in (getattr(wait, field.name) for wait in found) if is_drawable(v) and v > 0)
        for field in fields(RowWait)
    }
    return RowWait(**sums).scaled(1.0 / len(lines))


def _wait_cells(mean: RowWait) -> list[str]:
    return [
        f"{1e3 * seconds:.2f}" for seconds in (*(getattr(mean, cause) for cause in CAUSE_CSS_CLASSES), mean.total_s)
    ]
