"""What a step sends to other ranks, by the name of the transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from meseta.report.charts.markup import escape, table, tag
from meseta.report.record import RunRecord
from meseta.telemetry.formatting import format_bytes, is_drawable
from meseta.telemetry.metrics_file import TrainLine
from meseta.telemetry.row_traffic import RowTraffic
from meseta.telemetry.transfers import TransferMeans

ROW_TRAFFIC_COLUMNS = ["table", "hits", "misses", "ms waited for", "read from disk", "written", "times its rows"]
TRANSFER_COLUMNS = ["transfer", "times", "to its host", "to other hosts", "ms under way", "ms hidden", "ms waited for"]


def transfers_table(record: RunRecord) -> str:
    """Means per step of rank 0 over the whole run; an empty string where nothing was sent."""
    lines = [line for line in record.train_lines if line.transfers]
    names = dict.fromkeys(name for line in lines for name in line.transfers)
    if not names:
        return ""
    rows = [[escape(name), *_transfer_cells(_mean_transfer(lines, name))] for name in names]
    intro = (
        "What rank 0 sends to others in a step. Under way is from its beginning until it is known to be done; the rank "
        "computes meanwhile, so that this is hidden, but for what it waits."
    )
    return (
        tag("h3", "Exchanges per step, rank 0")
        + tag("p", escape(intro))
        + "".join(tag("p", escape(line)) for line in _overlap_lines(record))
        + table(TRANSFER_COLUMNS, rows, set(range(1, len(TRANSFER_COLUMNS))), "compact")
    )


def row_traffic_table(record: RunRecord) -> str:
    """Rows that come and go of each table that lies far, per step over the whole run; an empty string where none."""
    lines = [line for line in record.train_lines if line.row_traffic]
    names = dict.fromkeys(name for line in lines for name in line.row_traffic)
    if not names:
        return ""
    every = {name: [line.row_traffic.get(name, RowTraffic()) for line in lines] for name in names}
    means = {name: sum(of_table, RowTraffic()).scaled(1 / len(lines)) for name, of_table in every.items()}
    intro = (
        "Distinct rows that a step looks up, over all ranks; those that lie near are hits, the others come from memory "
        "of the host or from a disk. Written is what the disk was sent, for each byte of a row that was pushed out."
    )
    rows = [[escape(name), *_traffic_cells(mean)] for name, mean in means.items()]
    rows.append(["all", *_traffic_cells(sum(means.values(), RowTraffic()))])
    return (
        tag("h3", "Rows near and far, per step")
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
    """What `pipeline.overlap` has hidden, and what it could not, with the reason."""
    overlap = None if record.summary is None else record.summary.overlap
    if overlap is None:
        return []
    hidden = f"Hidden behind computation: {', '.join(overlap.hidden) or 'nothing'}."
    return [hidden, *(f"Not hidden: {name}, since {why}." for name, why in overlap.excluded.items())]


def _mean_transfer(lines: Sequence[TrainLine], name: str) -> TransferMeans:
    found = [line.transfers[name] for line in lines if name in line.transfers]
    means = {
        field.name: sum(v for v in (getattr(one, field.name) for one in found) if is_drawable(v)) / len(lines)
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
