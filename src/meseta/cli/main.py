"""`meseta`: the entry point. Errors that users can act on are printed as one line, without traceback."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import typer

from meseta.cli.bench import app as bench_app
from meseta.cli.checkpoint import app as checkpoint_app
from meseta.cli.data import app as data_app
from meseta.cli.doctor import doctor
from meseta.cli.evaluate import evaluate
from meseta.cli.launch import FOLLOWS, LOST, follow_launcher, is_loss_of_peer, way_on
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
app.add_typer(bench_app, name="bench")
app.command(name="eval")(evaluate)
app.command()(predict)
app.command()(report)
app.add_typer(checkpoint_app, name="checkpoint")
app.command()(doctor)


class Interrupted(BaseException):
    """Ctrl-C. No KeyboardInterrupt, which typer turns into an exit code before it comes here."""


def main() -> None:
    """Run a command; exit code 1 for a MesetaError, 130 for Ctrl-C."""
    follow_launcher()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    except MesetaError as error:
        rank = os.environ.get("RANK", "0")
        where = "" if rank == "0" else f"rank {rank}: "
        _leave(1, f"error: {where}{error}")
    except RuntimeError as error:
        if not is_loss_of_peer(error):
            raise
        # The launcher names the rank that went away.
        _leave(LOST, "" if FOLLOWS in os.environ else f"error: lost the connection to another rank: {error}")
    except Interrupted:
        _leave(130, f"interrupted{way_on()}")
    except SystemExit as left:
        if "RANK" not in os.environ or not isinstance(left.code, int):
            raise
        # All ranks have met and left the group. Some thread was seen to abort a rank at its very end, when the
        # interpreter takes everything apart.
        _leave(left.code, "")


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise Interrupted


def _leave(code: int, text: str) -> None:
    """Print one line and end this process."""
    if text:
        print(text, file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        # Other ranks may wait for this one in a collective; leaving at once lets the launcher stop them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
