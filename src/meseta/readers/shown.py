"""What a dispatcher knows, as people read it, and as Prometheus does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meseta.data.read.served.messages import ReaderStatus, SessionStatus, TierStatus
from meseta.errors import shown
from meseta.telemetry.shown import byte_size, count, plural, share, short

AGAIN = {"room": "to make room for earlier ones", "idle": "after nobody had taken rows"}
MOVED = {"silent": "of one that fell silent", "lost": "after trouble", "slow": "of a slow one"}


def status_lines(status: TierStatus) -> Iterator[str]:
    """A line for each dataset, reader and run, and one of all."""
    for name, folder in status.datasets.items():
        yield f"dataset {shown(name)}: {shown(folder)}"
    yield from map(_reader_line, status.readers)
    yield from map(_session_line, status.sessions)
    wanted = status.scale and f", {status.scale.wanted} wanted (of {status.scale.least} to {status.scale.most})"
    moved = _reasons(status.num_moved, MOVED) or "none"
    yield f"{plural(len(status.readers), 'reader')}{wanted or ''}; windows that went to another one: {moved}"


def _reader_line(reader: ReaderStatus) -> str:
    held = f"{byte_size(reader.held_bytes)} of {byte_size(reader.buffer_bytes)} held"
    pace = f"{short(reader.rows_per_s)} rows/s, busy {share(reader.busy_share)}"
    done = f"{count(reader.num_rows)} rows in {plural(reader.num_windows, 'window')} decoded"
    again = _reasons(reader.num_again, AGAIN)
    return (
        f"reader {shown(reader.reader)}{', leaving' * reader.is_leaving}: {pace}; "
        f"{plural(reader.num_leases, 'window')} leased, {held}; {done}" + (f", of them again {again}" if again else "")
    )


def _session_line(session: SessionStatus) -> str:
    by_rank = ", ".join(f"rank {rank} {share(value)}" for rank, value in list(session.waiting_shares.items())[:8])
    return (
        f"run {shown(session.run)}, split {shown(session.split)} of {shown(session.dataset)}, "
        f"{plural(session.num_ranks, 'rank')}: waits {share(session.waiting_share)} of the time ({by_rank})"
    )


def _reasons(numbers: Mapping[Any, int], words: Mapping[str, str]) -> str:
    return ", ".join(f"{count(number)} {words[why]}" for why, number in numbers.items() if number)


def prometheus_text(status: TierStatus) -> str:
    """The text format of Prometheus, version 0.0.4, for the textfile collector of its node exporter.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    readers, scale = status.readers, status.scale
    families = [
        _family("readers", "gauge", "Readers at work", [({}, sum(not reader.is_leaving for reader in readers))]),
        _family("readers_wanted", "gauge", "Readers that there should be", [({}, scale.wanted)] if scale else []),
        _of_readers("rows_total", "counter", "Rows decoded", {r.reader: r.num_rows for r in readers}),
        _of_readers("busy_seconds_total", "counter", "Time spent decoding", {r.reader: r.busy_s for r in readers}),
        _of_readers("leases", "gauge", "Windows leased", {r.reader: r.num_leases for r in readers}),
        _of_readers("held_bytes", "gauge", "Decoded windows held", {r.reader: r.held_bytes for r in readers}),
        _of_readers("buffer_bytes", "gauge", "Most that may be held", {r.reader: r.buffer_bytes for r in readers}),
        _family("reader_windows_again_total", "counter", "Windows decoded once more before all ranks had them",
                [({"reader": r.reader, "why": why}, n) for r in readers for why, n in r.num_again.items()]),
        _family("windows_moved_total", "counter", "Windows that went to another reader",
                [({"why": why}, number) for why, number in status.num_moved.items()]),
        _family("waiting_ratio", "gauge", "Share of its time that a rank stands still for batches",
                [({"run": s.run, "dataset": s.dataset, "split": s.split, "rank": rank}, value)
                 for s in status.sessions for rank, value in s.waiting_shares.items()]),
    ]  # fmt: skip
    return "".join(families)


def _of_readers(name: str, kind: str, help_: str, values: Mapping[str, float]) -> str:
    return _family(f"reader_{name}", kind, help_, [({"reader": url}, value) for url, value in values.items()])


def _family(name: str, kind: str, help_: str, samples: list[tuple[dict[str, str], float]]) -> str:
    """Of one metric; nothing where there is no sample."""
    if not samples:
        return ""
    lines = [f"# HELP meseta_{name} {help_}.", f"# TYPE meseta_{name} {kind}"]
    for labels, value in samples:
        within = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"meseta_{name}{{{within}}} {value}" if within else f"meseta_{name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
