"""`meseta data`: commands that prepare, check and describe datasets, and create synthetic click logs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meseta.cli.prepare import prepare

if TYPE_CHECKING:
    from meseta.data.dataset.describe import DatasetSummary

MAX_SHOWN_FAULTS = 50

app = typer.Typer(help="Prepare, check and describe datasets; create synthetic click logs.", no_args_is_help=True)
app.command()(prepare)


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="Folder to create.")],
    rows: Annotated[str, typer.Option(help="Total number of rows. Underscores are ignored.")] = "1_000_000",
    files: Annotated[
        int | None, typer.Option(help="Number of files: day_0.tsv, day_1.tsv, ...", show_default="1")
    ] = None,
    days: Annotated[int | None, typer.Option(help="Number of days, in place of --files: one file per day.")] = None,
    churn: Annotated[float, typer.Option(help="Share of ids that new ids replace each day, from 0 to 1.")] = 0.0,
    drift: Annotated[float, typer.Option(help="Angle in radians by which effects of ids rotate each day.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed. The log depends only on the seed and the other options.")] = 0,
    scale: Annotated[float, typer.Option(help="Factor on the 26 cardinalities of Criteo, at most 1.")] = 0.01,
    world: Annotated[
        str, typer.Option(help="Click model: pairs, or orders (with products of three and four categories).")
    ] = "pairs",
    strength: Annotated[float, typer.Option(help="Strength of the effects in the click model, from 0 to 1.")] = 1.0,
    gzip: Annotated[bool, typer.Option("--gzip", help="Compress the files: day_0.tsv.gz, ...")] = False,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write the true probability of each row, as Parquet.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing log in the folder.")] = False,
) -> None:
    """Write a synthetic click log in Criteo's TSV format.

    The clicks follow a known teacher. teacher.json has the best AUC and NE that a model can reach.
    """
    from meseta.data.synth.click_log import ClickLog, SynthOptions, write_click_log

    options = SynthOptions(
        out=out,
        num_rows=_parse_rows(rows),
        num_files=_num_files(files, days, changes=churn != 0 or drift != 0),
        log=ClickLog(seed, scale, world, strength, churn, drift),
        gzip=gzip,
        probabilities=probabilities,
        force=force,
    )
    start_s = time.perf_counter()
    with _progress_bar("write", options.num_rows) as on_rows:
        teacher = write_click_log(options, on_rows)
    _print_summary(teacher, out, time.perf_counter() - start_s)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `meseta prepare` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare all files and values of a prepared dataset with its dataset.json.

    Prints each fault. Exits with 1 if there is one.
    """
    from meseta.data.dataset.check import check_dataset as run

    start_s = time.perf_counter()
    with _progress_bar("check", None) as on_rows:
        result = run(path, on_rows)
    if as_json:
        typer.echo(json.dumps({"dir": str(path), "ok": not result.faults, **asdict(result)}, indent=1))
    else:
        for fault in result.faults[:MAX_SHOWN_FAULTS]:
            typer.echo(str(fault))
        if len(result.faults) > MAX_SHOWN_FAULTS:
            typer.echo(f"... and {len(result.faults) - MAX_SHOWN_FAULTS:,} more; --json lists all of them")
        what = f"{result.num_rows:,} rows in {result.num_files} files read in {time.perf_counter() - start_s:.1f} s"
        faults = f"{len(result.faults):,} {'fault' if len(result.faults) == 1 else 'faults'}"
        typer.echo(f"{path}: {faults if result.faults else 'no faults'}, {what}")
    if result.faults:
        raise typer.Exit(1)


@app.command()
def stats(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `meseta prepare` wrote.")],
    html: Annotated[Path | None, typer.Option(help="HTML page to write.", show_default="DIR/statistics.html")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and write no page.")] = False,
) -> None:
    """Print statistics of the splits, dense features and sparse features, and write them as an HTML page."""
    from meseta.data.dataset.check import STATISTICS_PAGE
    from meseta.data.dataset.dataset import Dataset
    from meseta.data.dataset.describe import describe
    from meseta.report.data_page import data_page
    from meseta.system.files import write_atomic

    dataset = Dataset.load(path)
    with _progress_bar("count", sum(split.num_rows for split in dataset.splits.values())) as on_rows:
        description = describe(dataset, on_rows)
    if as_json:
        typer.echo(json.dumps({"dir": str(path), **description.to_dict()}, indent=1))
        return
    _print_description(description)
    page = data_page(path.resolve().name, dataset, description)
    place = html or path / STATISTICS_PAGE
    write_atomic(place, page)
    typer.echo(place)


def _print_description(description: DatasetSummary) -> None:
    """Print one table each for the splits, the dense features and the sparse features."""
    from meseta.telemetry.formatting import format_percent, format_si

    rows = [
        [name, f"{s.num_rows:,}", *(f"{v:,.0f} ({v / max(s.num_rows, 1):.2%})" for v in s.labels.values())]
        for name, s in description.splits.items()
    ]
    labels = next(iter(description.splits.values())).labels
    _print_table(["split", "rows", *labels], rows)
    dense = []
    for d in description.dense:
        v, shift = d.values, "" if d.test_shift is None else f"{round(d.test_shift, 3) + 0.0:+.3f}"
        dense.append(
            [d.name, format_percent(v.share_zero), *(format_si(x) for x in (v.mean, v.std, v.min, v.max)), shift]
        )
    _print_table(["dense", "zero or missing", "mean", "std", "least", "largest", "shift in test"], dense)
    sparse = []
    for f in description.sparse:
        row = [
            f.name,
            f"{f.num_embeddings:,}",
            f"{f.num_uniques:,}",
            format_percent(f.coverage),
            f"{f.mean_pooling_factor:.3g}",
        ]
        sparse.append(
            [*row, format_percent(f.top_shares[0]), format_percent(f.top_shares[2]), format_percent(f.unseen_lookups)]
        )
    _print_table(["sparse", "rows", "distinct", "used", "ids", "top 1", "top 100", "new in test"], sparse)


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table, with the first column left-aligned and all others right-aligned."""
    from rich.console import Console
    from rich.table import Table

    if not rows:
        return
    shown = Table(box=None, pad_edge=False)
    for place, name in enumerate(columns):
        shown.add_column(name, justify="right" if place else "left", no_wrap=bool(place))
    for row in rows:
        shown.add_row(*row)
    Console().print(shown, "")


def _parse_rows(text: str) -> int:
    from meseta.errors import MesetaError

    try:
        return int(text)
    except ValueError:
        raise MesetaError(f"data synth: --rows {text!r} must be a whole number, such as 1_000_000") from None


def _num_files(files: int | None, days: int | None, *, changes: bool) -> int:
    from meseta.errors import MesetaError

    if files is not None and days is not None:
        raise MesetaError(f"data synth: --days {days} and --files {files} exclude each other; each day is one file")
    if changes and days is None:
        raise MesetaError("data synth: --churn and --drift change the log from day to day, so they require --days")
    return next((number for number in (days, files) if number is not None), 1)


@contextmanager
def _progress_bar(verb: str, num_rows: int | None) -> Iterator[Callable[..., None]]:
    """Context manager that shows a progress bar on stderr: share, rows, rows/s and remaining time.

    It yields a function that takes the number of new rows. If `num_rows` is `None`, the function also takes the total.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(verb),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:>13,.0f} rows"),
        TextColumn("{task.fields[rate]:>9,.0f} rows/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task(verb, total=num_rows, rate=0.0)

        def update(num_new_rows: int | float, total: int | None = num_rows) -> None:
            state = bar.tasks[task]
            # The elapsed time may be 0 in the first update.
            rate = (state.completed + num_new_rows) / max(state.elapsed or 0.0, 1e-3)
            bar.update(task, total=total, advance=num_new_rows, rate=rate)

        yield update


def _print_summary(teacher: dict[str, Any], out: Path, elapsed_s: float) -> None:
    from rich import print as show

    metrics = teacher["all"]
    num_rows = metrics["num_rows"]
    show(f"{num_rows:,} rows in {elapsed_s:.1f} s ({num_rows / elapsed_s:,.0f} rows/s) to {out}")
    show(f"  {len(teacher['files'])} files, {metrics['num_positives'] / num_rows:.4f} positive")
    if metrics["auc"] is not None:
        show(
            f"  best reachable: AUC {metrics['auc']:.4f}, NE {metrics['ne']:.4f} (values per file are in teacher.json)"
        )
