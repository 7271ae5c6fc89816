"""Status of a dispatcher as text, and in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meseta.data.service.messages import ReaderServiceStatus, ReaderStatus, SessionStatus
from meseta.errors import format_value
from meseta.telemetry.formatting import format_bytes, format_count, format_percent, format_quantity, format_si

REDECODE_REASONS = {"room": "to make room for earlier ones", "idle": "after no rows were requested"}
FORMER_METRICS = {
    "readers_target": "readers_wanted",
    "reader_windows_redecoded_total": "reader_windows_again_total",
    "windows_reassigned_total": "windows_moved_total",
}
"""Former names of metrics, which are written too, because dashboards and autoscalers may read them."""
REASSIGN_REASONS = {"silent": "of one that fell silent", "lost": "after trouble", "slow": "of a slow one"}


def status_lines(status: ReaderServiceStatus) -> Iterator[str]:
    """Yield a line for each dataset, reader and session, and a summary."""
    for name, folder in status.datasets.items():
        yield f"dataset {format_value(name)}: {format_value(folder)}"
    yield from map(_reader_line, status.readers)
    yield from map(_session_line, status.sessions)
    target = (
        status.scale and f", {status.scale.target} wanted (of {status.scale.min_readers} to {status.scale.max_readers})"
    )
    moved = _format_reasons(status.num_moved, REASSIGN_REASONS) or "none"
    yield f"{format_quantity(len(status.readers), 'reader')}{target or ''}; windows that went to another one: {moved}"


def _reader_line(reader: ReaderStatus) -> str:
    buffered = f"{format_bytes(reader.buffered_bytes)} of {format_bytes(reader.max_buffer_bytes)} held"
    pace = f"{format_si(reader.rows_per_s)} rows/s, busy {format_percent(reader.busy_share)}"
    done = f"{format_count(reader.num_rows)} rows in {format_quantity(reader.num_windows, 'window')} decoded"
    again = _format_reasons(reader.num_redecoded, REDECODE_REASONS)
    return (
        f"reader {format_value(reader.reader)}{', leaving' * reader.is_draining}: {pace}; "
        f"{format_quantity(reader.num_leases, 'window')} leased, {buffered}; {done}"
        + (f", of them again {again}" if again else "")
    )


def _session_line(session: SessionStatus) -> str:
    by_rank = ", ".join(
        f"rank {rank} {format_percent(value)}" for rank, value in list(session.waiting_shares.items())[:8]
    )
    return (
        f"run {format_value(session.run)}, split {format_value(session.split)} of {format_value(session.dataset)}, "
        f"{format_quantity(session.num_ranks, 'rank')}: waits {format_percent(session.waiting_share)} of the time "
        f"({by_rank})"
    )


def _format_reasons(numbers: Mapping[Any, int], words: Mapping[str, str]) -> str:
    return ", ".join(f"{format_count(number)} {words[why]}" for why, number in numbers.items() if number)


def prometheus_text(status: ReaderServiceStatus) -> str:
    """Format a status as text format 0.0.4 of Prometheus, for the textfile collector of its node exporter
    (https://prometheus.io/docs/instrumenting/exposition_formats/)."""
    readers, scale = status.readers, status.scale
    families = [
        _format_family("readers", "gauge", "Readers at work", [({}, sum(not one.is_draining for one in readers))]),
        _format_family("readers_target", "gauge", "Readers that training needs", [({}, scale.target)] if scale else []),
        _reader_family("rows_total", "counter", "Rows decoded", {r.reader: r.num_rows for r in readers}),
        _reader_family("busy_seconds_total", "counter", "Time spent decoding", {r.reader: r.busy_s for r in readers}),
        _reader_family("leases", "gauge", "Windows leased", {r.reader: r.num_leases for r in readers}),
        _reader_family("held_bytes", "gauge", "Decoded windows held", {r.reader: r.buffered_bytes for r in readers}),
        _reader_family("buffer_bytes", "gauge", "Maximum size of the buffer",
                {r.reader: r.max_buffer_bytes for r in readers}),
        _format_family("reader_windows_redecoded_total", "counter", "Windows decoded again before all ranks had them",
                [({"reader": r.reader, "why": why}, n) for r in readers for why, n in r.num_redecoded.items()]),
        _format_family("windows_reassigned_total", "counter", "Windows that went to another reader",
                [({"why": why}, number) for why, number in status.num_moved.items()]),
        _format_family("waiting_ratio", "gauge", "Share of time that a rank waits for batches",
                [({"run": s.run, "dataset": s.dataset, "split": s.split, "rank": rank}, value)
                 for s in status.sessions for rank, value in s.waiting_shares.items()]),
    ]  # fmt: skip
    former = [
        family.replace(f"meseta_{name}", f"meseta_{former_name}")
        for name, former_name in FORMER_METRICS.items()
        for family in families
        if family.startswith(f"# HELP meseta_{name} ")
    ]
    return "".join([*families, *former])


def _reader_family(name: str, kind: str, help_: str, values: Mapping[str, float]) -> str:
    return _format_family(f"reader_{name}", kind, help_, [({"reader": url}, value) for url, value in values.items()])


def _format_family(name: str, kind: str, help_: str, samples: list[tuple[dict[str, str], float]]) -> str:
    """Format one metric. Returns an empty string if there are no samples."""
    if not samples:
        return ""
    lines = [f"# HELP meseta_{name} {help_}.", f"# TYPE meseta_{name} {kind}"]
    for labels, value in samples:
        within = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        lines.append(f"meseta_{name}{{{within}}} {value}" if within else f"meseta_{name} {value}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
