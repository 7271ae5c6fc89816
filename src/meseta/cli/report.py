"""`meseta report RUN`: one offline HTML page about a run."""

from pathlib import Path
from typing import Annotated

import typer


def report(run_dir: Annotated[Path, typer.Argument(help="Directory of a training run, finished or not.")]) -> None:
    """Write RUN/report.html from the files of the run, and print its path."""
    from meseta.train.report import write_report

    typer.echo(write_report(run_dir))
