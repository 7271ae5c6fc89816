"""`meseta doctor`: checks this machine for what training needs, and suggests fixes."""

from __future__ import annotations

import json as json_format
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
TOPIC_WIDTH = 15


def doctor(
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder of data and runs. The speed of its disk is measured.")
    ] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print JSON, including the measurements.")] = False,
) -> None:
    """Check this machine for training and suggest fixes. Exits with 1 if training will fail."""
    from meseta.measure.doctor.checks import run_checks

    width = min(max(shutil.get_terminal_size((80, 24)).columns, 60), 110)
    findings = []
    for finding in run_checks(folder):
        findings.append(finding)
        if not json:
            typer.echo(_format_finding(finding, width))
    num_problems, num_notes = (sum(f.state == state for f in findings) for state in ("problem", "note"))
    if json:
        document = {"ok": num_problems == 0, "findings": [finding.to_dict() for finding in findings]}
        typer.echo(json_format.dumps(document, indent=1))
    else:
        stops = (
            f"{_format_plural(num_problems, 'problem')} will stop training"
            if num_problems
            else "Nothing stops training"
        )
        typer.echo(f"\n{stops}; {_format_plural(num_notes, 'note')}.")
    sys.exit(1 if num_problems else 0)


def _format_finding(finding: Any, width: int) -> str:
    """Format a finding as columns (state, topic, text), with its remedy on the lines below."""
    margin = " " * (9 + TOPIC_WIDTH)

    def wrapped(text: str, first: str, after: str) -> str:
        # Do not break commands and paths, so that they can be copied.
        return textwrap.fill(
            text, width, initial_indent=first, subsequent_indent=after, break_on_hyphens=False, break_long_words=False
        )

    body = wrapped(finding.text, margin, margin)[len(margin) :]
    head = typer.style(f"{finding.state:<9}", fg=COLORS[finding.state], bold=finding.state != "ok")
    text = f"{head}{finding.topic:<{TOPIC_WIDTH}}{body}"
    return f"{text}\n{wrapped(finding.way_out, f'{margin}-> ', f'{margin}   ')}" if finding.way_out else text


def _format_plural(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'s' * (number != 1)}"
