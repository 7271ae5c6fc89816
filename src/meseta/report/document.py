"""HTML document of a self-contained page."""

from __future__ import annotations

from importlib import resources

from meseta.report.charts.markup import escape, tag


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
