"""The frame of a page that needs nothing but itself, and how it comes to disk."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from meseta.spec import MesetaError
from meseta.train.report.markup import tag, text


def document(title: str, *body: str, style: str = "") -> str:
    """A whole page with the style sheet inside; its policy lets a browser fetch nothing and run nothing."""
    sheet = resources.files("meseta.train.report").joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        tag("title", text(title)),
        tag("style", sheet + style),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", tag("main", *body)), lang="en") + "\n"


def write_whole(path: Path, page: str) -> Path:
    """Write a page, whole or not at all, and return its path. Raises MesetaError where it cannot be written."""
    if path.is_dir():
        raise MesetaError(f"report: {str(path)!r} is a directory; name a file, such as {str(path / 'report.html')!r}")
    unfinished = path.with_name(f".report-{os.getpid()}.html")
    try:
        with unfinished.open("wb") as file:
            file.write(page.encode("utf-8", errors="replace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise MesetaError(f"report: {str(path)!r} cannot be written: {error.strerror}; choose another") from None
    return path
