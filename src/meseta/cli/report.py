"""`meseta report RUN...`: one offline HTML page about a run, or a comparison of several runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from meseta.report.comparison import Comparison

MAX_CHANGES = 6
"""Maximum number of differences per run to print. The page lists all of them."""


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of training runs, finished or not.")],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write. Default: RUN/report.html, or comparison.html for several runs."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON. A page is written only with --out.")
    ] = False,
) -> None:
    """Write a page about a run and print its path, or compare several runs on a page and in the terminal."""
    if len(run_dirs) == 1 and not as_json:
        from meseta.report import write_report

        typer.echo(write_report(run_dirs[0], out))
        return
    from meseta.report.comparison import compare_runs
    from meseta.report.comparison_page import write_comparison

    comparison = compare_runs(run_dirs)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict(), indent=1))
        if out is not None:
            write_comparison(comparison, out)
        return
    page = write_comparison(comparison, out or Path("comparison.html"))
    _print_comparison(comparison)
    typer.echo(f"report: {page}")


def plain_console() -> Console:
    """Create a console for tables of names and numbers."""
    from rich.console import Console

    # Names in the output may contain brackets, which are not markup.
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 10_000  # Do not wrap lines in a file or a pipe.
    return console


def _print_comparison(comparison: Comparison) -> None:
    """Print the main metrics with their differences from the first run, and differences of config, data and plan."""
    from rich.table import Table

    from meseta.report.comparison import group_differences, speed_ratio
    from meseta.telemetry.formatting import NO_VALUE, format_count, format_decimal, format_difference, format_si

    console = plain_console()
    first, metrics = comparison.runs[0], [m for m in comparison.metrics if m.is_main]
    table = Table(box=None, pad_edge=False)
    for name in ("run", "steps", "ranks", "samples/s", *(m.name for m in metrics)):
        table.add_column(name, justify="left" if name == "run" else "right", no_wrap=name != "run")
    for run in comparison.runs:
        ratio = speed_ratio(run, first)
        speed = format_si(run.headline.samples_per_s) + (
            f" ×{ratio:.2f}" if ratio is not None and run is not first else ""
        )
        cells = []
        for metric in metrics:
            value, difference = comparison.value(metric, run), comparison.difference(metric, run)
            shown = format_decimal(value, metric.decimals) if value is not None else NO_VALUE
            cells.append(
                shown
                if difference is None or run is first
                else f"{shown} {format_difference(difference, metric.decimals)}"
            )
        # An ellipsis marks a run that has not finished.
        steps = format_count(run.headline.num_steps) + ("" if run.headline.is_done else "…")
        table.add_row(run.label, steps, format_count(run.headline.num_ranks), speed, *cells)
    console.print(table)
    for index, run in enumerate(comparison.runs[1:], start=1):
        for part in ("config", "data", "plan"):
            rows = [row for row in group_differences(getattr(comparison, part)) if row.values[index] != row.values[0]]
            changes = [f"{row.name} {row.values[0]} -> {row.values[index]}" for row in rows[:MAX_CHANGES]]
            changes += [f"{len(rows) - MAX_CHANGES} more"] * (len(rows) > MAX_CHANGES)
            if rows and any(row.values[index] != NO_VALUE for row in rows):
                console.print(f"{part} of {run.label}: {', '.join(changes)}", soft_wrap=True)
    for note in comparison.notes:
        console.print(f"note: {note}", soft_wrap=True)
