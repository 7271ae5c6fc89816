"""Tables of a run's transfers and cache traffic per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from meseta.report.charts.markup import escape, table, tag
from meseta.report.record import RunRecord
from meseta.telemetry.formatting import format_bytes, is_drawable
from meseta.telemetry.metrics_file import TrainLine
from meseta.telemetry.row_traffic import RowTraffic
from meseta.telemetry.transfers import TransferMeans

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
