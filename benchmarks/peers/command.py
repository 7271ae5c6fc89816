"""Options, output and exit codes that bench_ops.py and bench_e2e.py share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import PeerComparison, append_comparisons
from rich.console import Console
from rich.table import Table

from meseta.measure.harness.interleaved import TimingOptions
from meseta.spec import MesetaError, suggest
from meseta.system import set_wait_policy
from peers.installed import Peers, find_peers


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "configs", nargs="*", metavar="CONFIG", help="configurations from docs/benchmarks.md (default: all)"
    )
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure other systems in the same run",
    )
    parser.add_argument(
        "--peer-python",
        help="Python interpreter with FBGEMM and TorchRec (default: $PEER_PYTHON, else this interpreter)",
    )
    parser.add_argument("--out", type=Path, help="CSV file to which the results are appended (default: none)")
    parser.add_argument(
        "--rounds", type=_positive, default=3, help="timing windows per start; the median is printed (default: 3)"
    )
    parser.add_argument(
        "--starts", type=_positive, default=2, help="number of times that each process is started (default: 2)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use small tables and short windows to try the command; results are not saved",
    )
    return parser


def timing_options(arguments: argparse.Namespace, window_s: float) -> TimingOptions:
    if arguments.quick:
        return TimingOptions(num_starts=1, num_rounds=1, window_s=0.01, max_retries=0)
    return TimingOptions(num_starts=arguments.starts, num_rounds=arguments.rounds, window_s=window_s)


def select_peers(arguments: argparse.Namespace) -> Peers:
    peers = find_peers(arguments.peer_python, enabled=arguments.peers)
    for line in peers.missing:
        log(line)
    return peers


def select_named(kind: str, names: Sequence[str], values: Mapping[str, Any]) -> list[Any]:
    for name in names:
        if name not in values:
            raise MesetaError(f"bench: {kind} {name!r} is unknown; {suggest(name, values)}")
    return [values[name] for name in names or values]


def parse_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise MesetaError(
            f"bench: {text!r} must be a whole number of at least 1, as in --threads 1,2 or --layouts 1x2,2x1"
        )
    return int(text)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ResultPrinter:
    def __init__(self, arguments: argparse.Namespace) -> None:
        # Measurements of small tables in short windows are not comparable.
        self.out: Path | None = None if arguments.quick else arguments.out
        self.failures: list[str] = []

    def print_result(self, table: Table, comparisons: Iterable[PeerComparison], failures: Mapping[str, str]) -> None:
        console = Console()
        # The default width of 80 would truncate names and ratios in a file or pipe.
        Console(width=None if console.is_terminal else 240).print(table)
        if self.out is not None:
            append_comparisons(self.out, tuple(comparisons))
        # A failure of another system does not fail the command.
        self.failures += [text for title, text in failures.items() if title.startswith("ours")]

    def raise_failures(self) -> None:
        if self.failures:
            raise MesetaError(f"bench: measurement failed for {self.failures[0]}")


def run_command(command: Callable[[], None]) -> None:
    """Run a command, with the wait policy of `meseta train` in the processes that it starts.

    Exits with code 1 after a MesetaError or an error of the operating system, and with 130 after Ctrl-C. The message is
    one line.
    """
    set_wait_policy(os.environ)
    try:
        command()
    except MesetaError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        named = f"{error.filename!r}: " if error.filename else ""
        sys.exit(f"error: {named}{error.strerror or error}; fix this and run the command again")
    except KeyboardInterrupt:
        log("interrupted")
        sys.exit(130)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value
