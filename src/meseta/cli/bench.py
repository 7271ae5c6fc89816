"""`meseta bench ops` and `meseta bench e2e`: our speed on this machine, beside other systems in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Measure this machine, ours beside other systems.", no_args_is_help=True)

Wanted = Annotated[bool, typer.Option("--peers/--no-peers", help="Measure other systems in the same run.")]
PeerPython = Annotated[
    str | None, typer.Option(help="Interpreter that has FBGEMM and TorchRec; else PEER_PYTHON, else this one.")
]
Out = Annotated[Path | None, typer.Option(help="CSV file to append the figures to.")]
Rounds = Annotated[int, typer.Option(min=1, help="Windows of each figure and start; medians are shown.")]
Starts = Annotated[int, typer.Option(min=1, help="Times that every process is started anew.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small tables, short windows: to try the command. No figures.")]


@app.command()
def ops(
    configs: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG]...", help="As in docs/benchmarks.md.")
    ] = None,
    threads: Annotated[str, typer.Option(help="Numbers of threads, such as 1,2.")] = "1,2",
    optimizers: Annotated[
        str, typer.Option(help="Row optimizers; all: every one.")
    ] = "rowwise_adagrad,sgd,adagrad,adam",
    dtypes: Annotated[str, typer.Option(help="Types of rows; default: all for rowwise_adagrad, else float32.")] = "",
    peers: Wanted = True,
    peer_python: PeerPython = None,
    out: Out = None,
    rounds: Rounds = 3,
    starts: Starts = 2,
    quick: Quick = False,
) -> None:
    """Embedding lookups and train steps, as lookups/s, share of the gather limit, and ratio to other systems."""
    from meseta.measure.bench import ops as bench
    from meseta.measure.bench.tables import ops_table
    from meseta.measure.bench.workloads import OPS, OPTIMIZERS, small

    traffics = _choose("configuration", configs, {traffic.name: traffic for traffic in OPS})
    names = _choose("optimizer", None if optimizers == "all" else optimizers.split(","), {n: n for n in OPTIMIZERS})
    types = dtypes.split(",") if dtypes else None
    if quick:
        traffics = [small(traffic, max_rows=1000, max_batch=64, max_tables=4) for traffic in traffics]
    counts = tuple(_number(word) for word in threads.split(","))
    found, show = _find_peers(peer_python, peers), _Screen(out, quick)
    timing = _effort(rounds, starts, 0.25, quick)
    for traffic in traffics:
        contests = list(bench.contests(traffic, names, types, counts, found))
        ours = [member.variant for _, members in contests for member in members if member.name == "ours"]
        bench.check([traffic], sorted({(optimizer, dtype) for optimizer, dtype in ours}))
        for optimizer, members in contests:
            result = bench.measure(traffic, optimizer, members, timing, show.log)
            show.result(ops_table(result), bench.comparisons(result), result.outcome.failures)
    show.end()


@app.command()
def e2e(
    configs: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG]...", help="As in docs/benchmarks.md.")
    ] = None,
    layouts: Annotated[str, typer.Option(help="Processes x threads of each, such as 1x2,2x1.")] = "1x2,2x1",
    peers: Wanted = True,
    peer_python: PeerPython = None,
    out: Out = None,
    rounds: Rounds = 3,
    starts: Starts = 2,
    quick: Quick = False,
) -> None:
    """DLRM training, as samples/s and ratio to plain PyTorch and TorchRec."""
    from dataclasses import replace

    from meseta.machine.processors import this_processor
    from meseta.measure.bench import e2e as bench
    from meseta.measure.bench.tables import e2e_table
    from meseta.measure.bench.workloads import E2E, small
    from meseta.train.bench import OursTraining, TrainingGate

    trainings = _choose("configuration", configs, {training.name: training for training in E2E})
    if quick:
        trainings = [replace(t, traffic=small(t.traffic, max_rows=1000, max_batch=64)) for t in trainings]
    pairs = [(_number(a), _number(b)) for a, _, b in (word.partition("x") for word in layouts.split(","))]
    ours = bench.OurContenders(contender=OursTraining, gate=TrainingGate)
    found, show = _find_peers(peer_python, peers), _Screen(out, quick)
    if why := this_processor().why_no_bfloat16():
        show.log(f"bfloat16 is left out: {why}")
    timing = _effort(rounds, starts, 0.6, quick)
    bench.check(trainings, ours)
    for training in trainings:
        members = [member for pair in pairs for member in bench.members(training, pair, ours, found)]
        result = bench.measure(training, members, timing, show.log)
        show.result(e2e_table(result), bench.comparisons(result), result.outcome.failures)
    show.end()


class _Screen:
    """Tables to standard output, progress to standard error, figures to the file."""

    def __init__(self, out: Path | None, quick: bool) -> None:
        self.out, self.quick = out, quick
        self.failed: list[str] = []

    def log(self, text: str) -> None:
        """One line of progress."""
        typer.echo(text, err=True)

    def result(self, table: Any, comparisons: Sequence[Any], failures: dict[str, str]) -> None:
        """Show one contest."""
        from rich.console import Console

        from meseta.telemetry.history import append

        console = Console()
        # A file or a pipe has no width of its own; names and ratios must not be cut there.
        Console(width=None if console.is_terminal else 240).print(table)
        if self.out is not None and not self.quick:
            append(self.out, comparisons)
        self.failed += [text for title, text in failures.items() if title.startswith("ours")]

    def end(self) -> None:
        """Exit code 1 where one of ours has no figures."""
        from meseta.errors import MesetaError

        if self.failed:
            raise MesetaError(f"bench: no figures for {self.failed[0]}")


def _find_peers(python: str | None, wanted: bool) -> Any:
    from meseta.measure.bench.peers import find_peers

    found = find_peers(python, wanted=wanted)
    for line in found.missing:
        typer.echo(line, err=True)
    return found


def _effort(rounds: int, starts: int, window_s: float, quick: bool) -> Any:
    from meseta.measure.contest.contest import TimingOptions

    if quick:
        return TimingOptions(num_starts=1, num_rounds=1, window_s=0.01, num_retries=0)
    return TimingOptions(num_starts=starts, num_rounds=rounds, window_s=window_s)


def _choose(kind: str, names: Sequence[str] | None, known: dict[str, Any]) -> list[Any]:
    """The named ones, all where none is named."""
    from meseta.errors import MesetaError, nearest

    for name in names or ():
        if name not in known:
            raise MesetaError(f"bench: {kind} {name!r} is unknown; {nearest(name, known)}")
    return [known[name] for name in names or known]


def _number(text: str) -> int:
    from meseta.errors import MesetaError

    if not text.isdigit() or int(text) < 1:
        raise MesetaError(f"bench: {text!r} must be a whole number, at least 1: --threads 1,2, --layouts 1x2,2x1")
    return int(text)
