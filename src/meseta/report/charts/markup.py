"""HTML and SVG as strings. Untrusted text must pass through `escape`, or an attribute of `tag`."""

from __future__ import annotations

import html
import math
import re
from importlib import resources

from meseta.telemetry.formatting import Number

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def escape(value: object) -> str:
    """Escape a text for HTML. Control characters and unpaired surrogates become U+FFFD."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", str(value)), quote=True)


def coordinate(value: Number) -> str:
    """Format a coordinate with at most two decimals. Raises ValueError if it is not finite."""
    if not math.isfinite(value):
        raise ValueError(f"coordinate {value} is not finite")
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def tag(name: str, /, *children: str, **attributes: object) -> str:
    """Return an element with `children`, which must be markup.

    Underscores in names of attributes become hyphens, as in stroke-width, and a trailing one is removed, as in class.
    Attributes with the value `None` are left out.
    """
    written = []
    for key, value in attributes.items():
        if value is not None:
            content = coordinate(value) if isinstance(value, float) else escape(value)
            written.append(f' {key.rstrip("_").replace("_", "-")}="{content}"')
    opening = name + "".join(written)
    # HTML elements such as meta have no end tag, and empty SVG elements close themselves.
    if name in {"rect", "line", "path", "circle", "meta", "input"} and not children:
        return f"<{opening}>" if name == "meta" else f"<{opening}/>"
    return f"<{opening}>{''.join(children)}</{name}>"


def svg_text(x: Number, y: Number, content: object, class_: str = "tick", anchor: str = "start") -> str:
    """Return SVG text with its baseline at (x, y). `content` is escaped."""
    return tag("text", escape(content), x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def svg(width: Number, height: Number, title: str, *children: str, class_: str = "chart") -> str:
    """Return an inline SVG that scales with its container. `title` describes it for screen readers."""
    box = f"0 0 {coordinate(float(width))} {coordinate(float(height))}"
    return tag("svg", *children, viewBox=box, class_=class_, role="img", aria_label=title)


def table(header: list[str], rows: list[list[str]], numeric: set[int], class_: str | None = None) -> str:
    """Return a table whose cells are markup. The columns with indices in `numeric` are right-aligned."""

    def cells(kind: str, row: list[str]) -> str:
        return tag("tr", *(tag(kind, c, class_="num" if i in numeric else None) for i, c in enumerate(row)))

    head = tag("thead", cells("th", header)) if header else ""
    body = tag("table", head, tag("tbody", *(cells("td", row) for row in rows)), class_=class_)
    return tag("div", body, class_="scroll")


def html_document(title: str, *body: str, style: str = "") -> str:
    """Return a complete HTML page. The style sheet, followed by `style`, is part of the page."""
    sheet = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        # The policy forbids scripts and external resources. A page contains texts of untrusted files.
        tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        tag("title", escape(title)),
        tag("style", sheet + style),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", tag("main", *body)), lang="en") + "\n"
