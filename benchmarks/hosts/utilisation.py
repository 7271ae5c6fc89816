"""How busy the links were, as pictures over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from meseta.report.charts.chart import Series, line_chart
from meseta.report.charts.markup import escape, html_document, table, tag
from meseta.system.files import write_atomic
from meseta.telemetry.formatting import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from hosts.hosts import Outcome
    from hosts.links import LinkTraffic

STYLE = """
svg .sent-line { stroke: var(--test); } svg .sent-label { fill: var(--test); font-weight: 600; }
svg .received-line { stroke: var(--other); } svg .received-label { fill: var(--other); font-weight: 600; }
"""


@dataclass(frozen=True)
class Sample:
    """What was counted up to one moment."""

    seconds: float
    """Since the command was started."""
    traffic: tuple[LinkTraffic, ...]
    """By host."""


def busy_shares(samples: Sequence[Sample], host: int, rate: float, way: str) -> list[tuple[float, float | None]]:
    """[(seconds, share of the link's `rate` in bits per second)] of a host's link between each two samples, in the way
    'sent' or 'received'."""
    return [
        (
            after.seconds,
            8
            * (getattr(after.traffic[host], f"{way}_bytes") - getattr(before.traffic[host], f"{way}_bytes"))
            / (rate * (after.seconds - before.seconds)),
        )
        for before, after in pairwise(samples)
    ]


def write_page(path: Path, title: str, outcome: Outcome) -> None:
    """A page that needs nothing but itself: of each host how busy its link was in both directions, and its counts."""
    charts, rows = [], []
    for host, traffic in enumerate(outcome.traffic):
        lines = [
            Series(name=way, points=busy_shares(outcome.samples, host, outcome.rate, way), class_=way)
            for way in ("sent", "received")
        ]
        chart = line_chart(
            f"host {host}", lines, outcome.seconds, reference=("rate", 1.0), include_zero=True, x_name="s"
        )
        charts.append(tag("figure", tag("figcaption", f"host {host}: share of its link"), chart))
        busy = (
            8 * number / (outcome.rate * outcome.seconds) for number in (traffic.sent_bytes, traffic.received_bytes)
        )
        sizes = (
            format_bytes(traffic.payload_bytes),
            format_bytes(traffic.sent_bytes),
            format_bytes(traffic.received_bytes),
        )
        rows.append([f"host {host}", *sizes, *(f"{share:.0%}" for share in busy), format_count(traffic.resent_packets)])
    head = ["", "sent, without headers", "sent", "received", "busy sending", "busy receiving", "packets sent again"]
    body = [
        tag("h1", escape(title)),
        tag(
            "p",
            escape(
                f"{format_duration(outcome.seconds)}; each link lets {format_bytes(outcome.rate / 8)} a second through"
            ),
        ),
        tag("div", *charts, class_="grid"),
        table(head, rows, set(range(1, len(head)))),
    ]
    write_atomic(path, html_document(title, *body, style=STYLE))
