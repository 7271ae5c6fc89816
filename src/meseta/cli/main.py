"""Entry point of the `meseta` command. Prints errors that users can fix as one line, without a traceback."""

from __future__ import annotations

import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import meseta
from meseta.cli import launch
from meseta.cli.calibrate import calibrate
from meseta.cli.checkpoint import app as checkpoint_app
from meseta.cli.config import config
from meseta.cli.data import app as data_app
from meseta.cli.doctor import doctor
from meseta.cli.evaluate import evaluate
from meseta.cli.launch import LOST_CONNECTION_EXIT_CODE, is_peer_loss, resume_hint
from meseta.cli.lazy_dynamo import defer_dynamo_import
from meseta.cli.plan import app as plan_app
from meseta.cli.predict import predict
from meseta.cli.prepare import prepare
from meseta.cli.readers import app as readers_app
from meseta.cli.report import report
from meseta.cli.status import status
from meseta.cli.sweep import sweep
from meseta.cli.topology import app as topology_app
from meseta.cli.train import train
from meseta.cli.verify import verify
from meseta.errors import ERROR_PREFIX, FormerNameWarning, MesetaError, error_summary
from meseta.system.environment import package_version
from meseta.system.environment_variables import environ, set_wait_policy
from meseta.system.processes import exit_immediately, remove_scratch_files
from meseta.system.ranks import RENDEZVOUS_VARIABLE
from meseta.telemetry.rank_record import RANK_RECORD_VARIABLE, CurrentRankRecord
from meseta.telemetry.watching import StallReporter, check_start_memory

TORCH_COMMANDS = {"train", "eval", "predict", "verify", "sweep", "calibrate"}
"""Commands that import torch with any options."""
MOVED_COMMANDS = {
    "bench": "'python benchmarks/bench_ops.py' or 'python benchmarks/bench_e2e.py'",
    "quality": "'python tools/quality'",
}
"""Former commands, and what to run instead in a clone of the repository."""
PEER_LOSS_GRACE_S = 5.0
"""Seconds that a rank waits after a peer was lost, so that its watchdog can report which rank it was."""

COMMANDS: dict[str, dict[str, typer.Typer | Callable[..., None]]] = {
    "Data": {"data": data_app, "prepare": prepare},
    "Runs": {
        "train": train,
        "sweep": sweep,
        "config": config,
        "eval": evaluate,
        "predict": predict,
        "report": report,
        "status": status,
        "hang": status,
        "verify": verify,
        "doctor": doctor,
    },
    "Plans": {"plan": plan_app, "calibrate": calibrate, "topology": topology_app},
    "Checkpoints": {"checkpoint": checkpoint_app},
    "Services": {"readers": readers_app},
}
"""Commands by name, in the groups and the order of `meseta --help`."""
ALIASES = {"prepare": "data prepare", "hang": "status"}
"""Names of commands that have another name, which `meseta --help` prints."""


class GroupedCommands(TyperGroup):
    """Root command, which lists commands in the order of `COMMANDS`. typer lists those with subcommands last."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [name for commands in COMMANDS.values() for name in commands]


app = typer.Typer(
    name="meseta",
    cls=GroupedCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            short_help = f"Alias of `meseta {ALIASES[name]}`." if name in ALIASES else None
            app.command(name, rich_help_panel=panel, short_help=short_help)(command)


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"meseta {meseta.__version__}, torch {package_version('torch')}")
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
    # A launcher checks the memory for its ranks before it starts them.
    if command in TORCH_COMMANDS and "RANK" not in environ and "--help" not in sys.argv:
        check_start_memory(1)


# Built once, because it takes 25 ms: ranks that a launcher forks have it already.
COMMAND = typer.main.get_command(app)


class UserInterrupt(BaseException):
    """Ctrl-C. It is no KeyboardInterrupt, because typer would turn that into an exit code before `main` sees it."""


def _configure_warnings(*, is_quiet: bool) -> None:
    """Print warnings about former names as one line, unless another process of this command prints them."""
    if is_quiet:
        warnings.simplefilter("ignore", FormerNameWarning)
    format_other = warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, FormerNameWarning):
            return f"warning: {message}\n"
        return format_other(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning


def main() -> None:
    """Run a command and exit with its code.

    The code is 1 after a MesetaError, an error of the operating system or a lack of memory, 2 for a command in
    MOVED_COMMANDS, and 130 after Ctrl-C.
    """
    if len(sys.argv) > 1 and sys.argv[1] in MOVED_COMMANDS:
        command = sys.argv[1]
        _exit(2, f"{ERROR_PREFIX}meseta {command}: moved; run {MOVED_COMMANDS[command]} in a clone of the repository")
    # torch reads the policy during its import, in this process and in each process that a command starts.
    set_wait_policy(environ)
    # The stub must be in place before torch is imported.
    defer_dynamo_import()
    # Keep ignoring Ctrl-C if the parent process ignores it, as shell scripts do for background jobs.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _raise_interrupt)
    rank = environ.get("RANK", "0")
    _configure_warnings(is_quiet=rank != "0" or RANK_RECORD_VARIABLE in environ)
    where = ERROR_PREFIX if rank == "0" else f"{ERROR_PREFIX}rank {rank}: "
    try:
        if RANK_RECORD_VARIABLE in environ:  # A rank that a launcher started. It has imported torch already.
            from meseta.comm.recording import start_record

            start_record()
        # A launcher reports the stalls of ranks that have a record.
        with StallReporter() if CurrentRankRecord.record is None else nullcontext():
            _run_command()
    except MesetaError as error:
        # The message of an error from another rank already starts with that rank.
        _exit(1, f"{where if error.rank is None else ERROR_PREFIX}{error}")
    except OSError as error:
        named = f"{error.filename!r}: " if error.filename else ""
        _exit(1, f"{where}{named}{error.strerror or error}; fix this and run the command again")
    except (MemoryError, RuntimeError) as error:
        if _is_out_of_memory(error):
            way_out = "use smaller tables, layers or batches, or more ranks"
            _exit(1, f"{where}not enough memory ({error_summary(error)}); {way_out}")
        if not (isinstance(error, RuntimeError) and is_peer_loss(error)):
            raise
        # With --nproc, the launcher names the lost rank. Under torchrun, the PeerWatchdog of this process
        # names it and exits, so wait for that.
        if CurrentRankRecord.record is not None and RENDEZVOUS_VARIABLE not in environ:
            time.sleep(PEER_LOSS_GRACE_S)
        text = f"{ERROR_PREFIX}lost the connection to another rank: {error}"
        _exit(LOST_CONNECTION_EXIT_CODE, "" if RENDEZVOUS_VARIABLE in environ else text)
    except UserInterrupt:
        _exit(130, f"interrupted{resume_hint()}")
    except SystemExit as left:
        if "RANK" not in environ or not isinstance(left.code, int):
            raise
        # All ranks have already left the process group. A thread was seen to abort a rank while the interpreter shut
        # down, so skip that.
        _exit(left.code, "")


launch.command_line = main


def _run_command() -> None:
    """Run the command and flush its output."""
    try:
        COMMAND()
    finally:
        remove_scratch_files()  # A forked process exits without running atexit handlers.
        sys.stdout.flush()


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed in NumPy, Arrow, the core or torch, whose RuntimeError differs only in its text."""
    texts = ("can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def _raise_interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise UserInterrupt


def _exit(code: int, text: str) -> None:
    """Print `text` as one line, if it is not empty, and end this process."""
    if text:
        print(text, file=sys.stderr, flush=True)
    if "RANK" in environ:
        # Other ranks may wait for this one in a collective. After an immediate exit the launcher can stop them.
        sys.stdout.flush()
        sys.stderr.flush()
        exit_immediately(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
