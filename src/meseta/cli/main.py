"""`meseta`: the entry point. Errors that users can act on are printed as one line, without traceback."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import nullcontext
from types import FrameType
from typing import Annotated

import typer

import meseta
from meseta.cli.bench import app as bench_app
from meseta.cli.calibrate import calibrate
from meseta.cli.checkpoint import app as checkpoint_app
from meseta.cli.config import config
from meseta.cli.data import app as data_app
from meseta.cli.doctor import doctor
from meseta.cli.eager import leave_dynamo_out
from meseta.cli.evaluate import evaluate
from meseta.cli.hang import hang
from meseta.cli.launch import LOST_CONNECTION, is_loss_of_peer, way_on
from meseta.cli.plan import plan
from meseta.cli.predict import predict
from meseta.cli.prepare import prepare
from meseta.cli.quality import quality
from meseta.cli.readers import app as readers_app
from meseta.cli.report import report
from meseta.cli.sweep import sweep
from meseta.cli.topology import app as topology_app
from meseta.cli.train import train
from meseta.cli.verify import verify
from meseta.errors import ERROR_PREFIX, MesetaError, one_line
from meseta.machine.environment import version_of
from meseta.machine.processes import leave_at_once, remove_all_scratch
from meseta.machine.rendezvous import VARIABLE
from meseta.machine.variables import variables
from meseta.machine.waiting import choose_waiting
from meseta.telemetry.rank_record import VARIABLE as RANK_RECORD
from meseta.telemetry.rank_record import ThisProcess
from meseta.telemetry.watching.memory_watch import check_start_memory
from meseta.telemetry.watching.stalls import StallReports

USES_TORCH = {"train", "eval", "predict", "verify", "sweep", "quality", "calibrate"}
"""Commands that import torch, whatever their options."""
LAST_WORDS_S = 5.0
"""How long a rank that has lost another one may take to find out why."""

app = typer.Typer(
    name="meseta",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.command()(prepare)
app.command()(train)
app.command()(sweep)
app.command()(quality)
app.command()(config)
app.command()(plan)
app.command()(verify)
app.add_typer(bench_app, name="bench")
app.command(name="eval")(evaluate)
app.command()(predict)
app.command()(report)
app.command()(hang)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(readers_app, name="readers")
app.add_typer(topology_app, name="topology")
app.command()(calibrate)
app.command()(doctor)


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"meseta {meseta.__version__}, torch {version_of('torch')}")
        raise typer.Exit
    return asked


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the versions and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Train recommendation models whose embedding tables are larger than one device."""
    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    if command in USES_TORCH and "RANK" not in variables and "--help" not in sys.argv:
        check_start_memory(1)


class Interrupted(BaseException):
    """Ctrl-C. No KeyboardInterrupt, which typer turns into an exit code before it comes here."""


def main() -> None:
    """Run a command; exit code 1 for a MesetaError, for what the system refuses and for too little memory, 130 for
    Ctrl-C."""
    choose_waiting(variables)  # read when torch is imported, here and in every process that a command starts
    leave_dynamo_out()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    rank = variables.get("RANK", "0")
    where = ERROR_PREFIX if rank == "0" else f"{ERROR_PREFIX}rank {rank}: "
    try:
        if RANK_RECORD in variables:  # of a rank that `--nproc` has started, which has torch
            from meseta.comm.recording import begin_record

            begin_record()
        with StallReports() if ThisProcess.record is None else nullcontext():  # a launcher watches those with records
            _run()
    except MesetaError as error:
        _leave(1, f"{where if error.rank is None else ERROR_PREFIX}{error}")
    except OSError as error:
        named = f"{error.filename!r}: " if error.filename else ""
        _leave(1, f"{where}{named}{error.strerror or error}; see to that, and run the command again")
    except (MemoryError, RuntimeError) as error:
        if _is_lack_of_memory(error):
            way_out = "use smaller tables, layers or batches, or more ranks"
            _leave(1, f"{where}not enough memory ({one_line(error)}); {way_out}")
        if not (isinstance(error, RuntimeError) and is_loss_of_peer(error)):
            raise
        # The launcher names the rank that went away, or the thread that watches the others, which then ends this one.
        if ThisProcess.record is not None and VARIABLE not in variables:
            time.sleep(LAST_WORDS_S)
        text = f"{ERROR_PREFIX}lost the connection to another rank: {error}"
        _leave(LOST_CONNECTION, "" if VARIABLE in variables else text)
    except Interrupted:
        _leave(130, f"interrupted{way_on()}")
    except SystemExit as left:
        if "RANK" not in variables or not isinstance(left.code, int):
            raise
        # All ranks have met and left the group. Some thread was seen to abort a rank at its very end, when the
        # interpreter takes everything apart.
        _leave(left.code, "")


def _run() -> None:
    """The command, and what it has left to print."""
    try:
        app()
    finally:
        remove_all_scratch()  # a fork ends without the interpreter's own end
        sys.stdout.flush()


def _is_lack_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, of numpy, Arrow or the core, or of torch, which has no class for it on a CPU."""
    texts = ("can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise Interrupted


def _leave(code: int, text: str) -> None:
    """Print one line and end this process."""
    if text:
        print(text, file=sys.stderr, flush=True)
    if "RANK" in variables:
        # Other ranks may wait for this one in a collective; leaving at once lets the launcher stop them.
        sys.stdout.flush()
        sys.stderr.flush()
        leave_at_once(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
