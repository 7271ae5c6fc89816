"""`meseta`: the entry point. Errors that users can act on are printed as one line, without traceback."""

from __future__ import annotations

import os
import sys

import typer

from meseta.cli.data import app as data_app
from meseta.cli.evaluate import evaluate
from meseta.cli.predict import predict
from meseta.cli.prepare import prepare
from meseta.cli.report import report
from meseta.cli.train import train
from meseta.spec import MesetaError

app = typer.Typer(
    name="meseta",
    help="Train recommendation models whose embedding tables are larger than one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.command()(prepare)
app.command()(train)
app.command(name="eval")(evaluate)
app.command()(predict)
app.command()(report)


def main() -> None:
    """Run a command; exit code 1 for a MesetaError, 130 for Ctrl-C."""
    try:
        app()
    except MesetaError as error:
        rank = os.environ.get("RANK", "0")
        where = "" if rank == "0" else f"rank {rank}: "
        print(f"error: {where}{error}", file=sys.stderr, flush=True)
        # Other ranks may wait for this one in a collective; leaving at once lets the launcher stop them.
        os._exit(1) if "RANK" in os.environ else sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
