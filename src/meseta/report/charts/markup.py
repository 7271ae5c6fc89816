"""HTML and SVG as strings; whatever comes from a file passes through `text` or an attribute, which escape it."""

from __future__ import annotations

import html
import math
import re

from meseta.telemetry.formatting import Number

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def escape(value: object) -> str:
    """Escaped text; control characters and lone surrogates, which no page may hold, become U+FFFD."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", str(value)), quote=True)


def coordinate(value: Number) -> str:
    """A coordinate with two decimals at most; raises ValueError for one that no browser could draw."""
    if not math.isfinite(value):
        raise ValueError(f"coordinate {value} is not finite")
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def tag(name: str, /, *children: str, **attributes: object) -> str:
    """An element around markup. `class_` is written class, `stroke_width` stroke-width; None leaves one out."""
    written = []
    for key, value in attributes.items():
        if value is not None:
            content = coordinate(value) if isinstance(value, float) else escape(value)
            written.append(f' {key.rstrip("_").replace("_", "-")}="{content}"')
    opening = name + "".join(written)
    if name in {"rect", "line", "path", "circle", "meta", "input"} and not children:
        return f"<{opening}>" if name == "meta" else f"<{opening}/>"
    return f"<{opening}>{''.join(children)}</{name}>"


def svg_text(x: Number, y: Number, content: object, class_: str = "tick", anchor: str = "start") -> str:
    """SVG text with its baseline at (x, y)."""
    return tag("text", escape(content), x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def svg(width: Number, height: Number, title: str, *children: str, class_: str = "chart") -> str:
    """An inline SVG that scales with its container and tells screen readers what it shows."""
    box = f"0 0 {coordinate(float(width))} {coordinate(float(height))}"
    return tag("svg", *children, viewBox=box, class_=class_, role="img", aria_label=title)


def table(header: list[str], rows: list[list[str]], numeric: set[int], class_: str | None = None) -> str:
    """A table of cells that are markup already; the columns in `numeric` are right-aligned."""

    def cells(kind: str, row: list[str]) -> str:
        return tag("tr", *(tag(kind, c, class_="num" if i in numeric else None) for i, c in enumerate(row)))

    head = tag("thead", cells("th", header)) if header else ""
    body = tag("table", head, tag("tbody", *(cells("td", row) for row in rows)), class_=class_)
    return tag("div", body, class_="scroll")
