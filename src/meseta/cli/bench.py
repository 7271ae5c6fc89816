"""`meseta bench ops` and `meseta bench e2e`: benchmarks of Meseta and other systems in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Benchmark Meseta against other systems on this machine.", no_args_is_help=True)

PeersOption = Annotated[bool, typer.Option("--peers/--no-peers", help="Also measure other systems in the same run.")]
PeerPythonOption = Annotated[
    str | None,
    typer.Option(help="Python interpreter with FBGEMM and TorchRec. Default: $PEER_PYTHON, else this interpreter."),
]
OutOption = Annotated[Path | None, typer.Option(help="CSV file to which the results are appended. Default: none.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Timing windows per start. The median is printed.")]
StartsOption = Annotated[int, typer.Option(min=1, help="Number of times that each process is started.")]
QuickOption = Annotated[
    bool,
    typer.Option("--quick", help="Use small tables and short windows to try the command. Results are not saved."),
]


@app.command()
def ops(
    configs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG]...", help="Configurations from docs/benchmarks.md. Default: all."),
    ] = None,
    threads: Annotated[str, typer.Option(help="Numbers of threads, separated by commas.")] = "1,2",
    optimizers: Annotated[
        str, typer.Option(help="Row optimizers, separated by commas, or all.")
    ] = "rowwise_adagrad,sgd,adagrad,adam",
    dtypes: Annotated[
        str, typer.Option(help="Data types of rows. Default: all for rowwise_adagrad, float32 for other optimizers.")
    ] = "",
    peers: PeersOption = True,
    peer_python: PeerPythonOption = None,
    out: OutOption = None,
    rounds: RoundsOption = 3,
    starts: StartsOption = 2,
    quick: QuickOption = False,
) -> None:
    """Benchmark embedding lookups and training steps.

    Prints lookups/s, the share of the speed limit given by memory gathers, and the ratio to other systems.
    """
    from meseta.measure.bench import ops as bench
    from meseta.measure.bench.tables import ops_table
    from meseta.measure.bench.workloads import OPS_WORKLOADS, OPTIMIZERS, shrink

    traffics = _select("configuration", configs, {traffic.name: traffic for traffic in OPS_WORKLOADS})
    names = _select("optimizer", None if optimizers == "all" else optimizers.split(","), {n: n for n in OPTIMIZERS})
    types = dtypes.split(",") if dtypes else None
    if quick:
        traffics = [shrink(traffic, max_rows=1000, max_batch=64, max_tables=4) for traffic in traffics]
    counts = tuple(_parse_count(word) for word in threads.split(","))
    peer_systems, show = _find_peers(peer_python, peers), _ResultPrinter(out, quick)
    timing = _timing_options(rounds, starts, 0.25, quick)
    for traffic in traffics:
        contests = list(bench.contests(traffic, names, types, counts, peer_systems))
        ours = [member.variant for _, members in contests for member in members if member.name == "ours"]
        # Do not measure operators whose results are wrong.
        bench.check_operators([traffic], sorted({(optimizer, dtype) for optimizer, dtype in ours}))
        for optimizer, members in contests:
            result = bench.measure_operators(traffic, optimizer, members, timing, show.log)
            show.print_result(ops_table(result), bench.comparisons(result), result.timing_result.failures)
    show.raise_failures()


@app.command()
def e2e(
    configs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG]...", help="Configurations from docs/benchmarks.md. Default: all."),
    ] = None,
    layouts: Annotated[
        str, typer.Option(help="Pairs of processes x threads per process, separated by commas.")
    ] = "1x2,2x1",
    peers: PeersOption = True,
    peer_python: PeerPythonOption = None,
    out: OutOption = None,
    rounds: RoundsOption = 3,
    starts: StartsOption = 2,
    quick: QuickOption = False,
) -> None:
    """Benchmark DLRM training. Prints samples/s and the ratio to plain PyTorch and TorchRec."""
    from dataclasses import replace

    from meseta.measure.bench import e2e as bench
    from meseta.measure.bench.tables import e2e_table
    from meseta.measure.bench.workloads import E2E_WORKLOADS, shrink
    from meseta.system.processors import read_processor
    from meseta.train.bench import MesetaTraining, TrainingCheck

    trainings = _select("configuration", configs, {training.name: training for training in E2E_WORKLOADS})
    if quick:
        trainings = [replace(t, lookups=shrink(t.lookups, max_rows=1000, max_batch=64)) for t in trainings]
    pairs = [(_parse_count(a), _parse_count(b)) for a, _, b in (word.partition("x") for word in layouts.split(","))]
    ours = bench.MesetaTargets(target=MesetaTraining, check=TrainingCheck)
    peer_systems, show = _find_peers(peer_python, peers), _ResultPrinter(out, quick)
    if why := read_processor().bfloat16_unavailable_reason():
        show.log(f"skipping bfloat16: {why}")
    timing = _timing_options(rounds, starts, 0.6, quick)
    # Do not measure models whose losses are wrong.
    bench.check_training(trainings, ours)
    for training in trainings:
        members = [member for pair in pairs for member in bench.training_targets(training, pair, ours, peer_systems)]
        result = bench.measure_training(training, members, timing, show.log)
        show.print_result(e2e_table(result), bench.comparisons(result), result.timing_result.failures)
    show.raise_failures()


class _ResultPrinter:
    """Prints tables to stdout and progress to stderr, and appends results to a CSV file."""

    def __init__(self, out: Path | None, quick: bool) -> None:
        self.out, self.quick = out, quick
        self.failures: list[str] = []

    def log(self, text: str) -> None:
        """Print a line of progress."""
        typer.echo(text, err=True)

    def print_result(self, table: Any, comparisons: Sequence[Any], failures: dict[str, str]) -> None:
        """Print the table of one comparison, save its measurements and collect failures of Meseta."""
        from rich.console import Console

        from meseta.telemetry.benchmark_history import append_comparisons

        console = Console()
        # The default width of 80 would truncate names and ratios in a file or pipe.
        Console(width=None if console.is_terminal else 240).print(table)
        # Measurements of small tables in short windows are not comparable.
        if self.out is not None and not self.quick:
            append_comparisons(self.out, comparisons)
        # A failure of another system does not fail the command.
        self.failures += [text for title, text in failures.items() if title.startswith("ours")]

    def raise_failures(self) -> None:
        """Raise MesetaError if a measurement of Meseta failed."""
        from meseta.errors import MesetaError

        if self.failures:
            raise MesetaError(f"bench: measurement failed for {self.failures[0]}")


def _find_peers(python: str | None, enabled: bool) -> Any:
    from meseta.measure.bench.peers import find_peers

    peers = find_peers(python, enabled=enabled)
    for line in peers.missing:
        typer.echo(line, err=True)
    return peers


def _timing_options(rounds: int, starts: int, window_s: float, quick: bool) -> Any:
    from meseta.measure.harness.interleaved import TimingOptions

    if quick:
        return TimingOptions(num_starts=1, num_rounds=1, window_s=0.01, max_retries=0)
    return TimingOptions(num_starts=starts, num_rounds=rounds, window_s=window_s)


def _select(kind: str, names: Sequence[str] | None, known: dict[str, Any]) -> list[Any]:
    """Return the values of `names`, or all values if there are no names."""
    from meseta.errors import MesetaError, suggest

    for name in names or ():
        if name not in known:
            raise MesetaError(f"bench: {kind} {name!r} is unknown; {suggest(name, known)}")
    return [known[name] for name in names or known]


def _parse_count(text: str) -> int:
    from meseta.errors import MesetaError

    if not text.isdigit() or int(text) < 1:
        raise MesetaError(
            f"bench: {text!r} must be a whole number of at least 1, as in --threads 1,2 or --layouts 1x2,2x1"
        )
    return int(text)
