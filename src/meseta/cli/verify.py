"""`meseta verify CONFIG --nproc N`: compares the first steps of a sharded run with one process, row by row."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meseta.cli.launch import run_ranks
from meseta.errors import MesetaError
from meseta.system.processes import exec_module
from meseta.system.ranks import is_distributed

if TYPE_CHECKING:
    from meseta.config import RunConfig
    from meseta.train.verify import Verification


def verify(
    config: Annotated[Path, typer.Argument(help="YAML config of the run.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings that override the config, such as train.batch_size=4096."
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Number of ranks of the sharded run, on this machine.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to compare.")] = 20,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="Plan file, or a sharding type for all tables, such as row_wise. Default: plan of the config.",
        ),
    ] = None,
    float64: Annotated[
        bool, typer.Option("--float64", help="Use float64 from the start. Default: only if float32 is inconclusive.")
    ] = False,
    record_to: Annotated[
        Path | None, typer.Option(hidden=True, help="Internal: folder to which a rank writes its rows.")
    ] = None,
) -> None:
    """Train some steps on N ranks and in one process, and compare them.

    Prints the first table, row and step that differ. Exits with 1 if there is one.
    """
    chosen = _verification_config(config, settings or [], plan, float64)
    if record_to is not None:
        from meseta.train.session import session
        from meseta.train.verify import record

        with session(chosen) as world:
            record(chosen, world, record_to, steps)
        return
    if is_distributed():
        raise MesetaError(
            "verify: the command starts its own ranks on this machine; run it with --nproc N instead of torchrun"
        )
    verification = _run_and_compare(chosen, sys.argv[1:], steps, nproc)
    _print_verification(verification, chosen)
    is_inconclusive = (
        verification.first_mismatch is not None
        and verification.first_mismatch.phase == "training"
        and verification.comm.is_lossless
    )
    if is_inconclusive and chosen.embedding.dtype == "float32":
        print("either a bug or amplified rounding; checking with float64, where rounding shrinks to 1e-10\n")
        exec_module("meseta.cli.main", [*sys.argv[1:], "--float64"])
    raise typer.Exit(0 if verification.first_mismatch is None else 1)


def _run_and_compare(config: RunConfig, arguments: list[str], steps: int, nproc: int) -> Verification:
    """Run the ranks of this command, then one process, and compare. Exits with the code of the ranks if they fail."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory(prefix="meseta-verify-") as folder:
        code = run_ranks([*arguments, "--record-to", folder], nproc, config.comm.time_limits)
        if code:
            sys.exit(code)
        for number, handler in handlers.items():  # Handlers of `run_ranks` only record a signal.
            signal.signal(number, handler)

        from meseta.train.verify import compare

        return compare(config, Path(folder), steps, nproc)


def _verification_config(path: Path, settings: list[str], plan: str | None, float64: bool) -> RunConfig:
    """Return the config of both runs. The dense part is float32, and the device a CPU unless the config has a GPU."""
    from meseta.config import read_config_document, validate_document
    from meseta.config.load import set_default
    from meseta.spec import ShardingType
    from meseta.spec.codecs import DIRECTIONS

    document = read_config_document(path, settings)
    if plan is not None:
        document["plan"] = {"tables": {"*": plan}} if plan in list(ShardingType) else plan
    if float64:
        set_default(document, "embedding.dtype", "float64")
    set_default(document, "device", "cpu")
    chosen = validate_document(document, path)
    embedding = chosen.embedding.model_copy(update={"dtype": "float64"}) if float64 else chosen.embedding
    comm = chosen.comm.model_copy(update={"precision": "fp32", **dict.fromkeys(DIRECTIONS)}) if float64 else chosen.comm
    dense = chosen.dense.model_copy(update={"dtype": "float32"})
    device = "cpu" if chosen.device == "auto" else chosen.device
    return chosen.model_copy(update={"embedding": embedding, "dense": dense, "device": device, "comm": comm})


def _print_verification(verification: Verification, config: RunConfig) -> None:
    """Print a table of the differences, the losses and the verdict."""
    from rich.table import Table

    from meseta.cli.report import plain_console

    console = plain_console()
    print(f"{verification.num_steps} steps of {config.train.batch_size:,} samples on "
          f"{verification.plan.ranks_text} and in one process, "
          f"{config.embedding.dtype}; largest differences and tolerances")  # fmt: skip
    table = Table(box=None, pad_edge=False)
    heads = ("table", "plan", "embedding alone", "allowed", "training", "its states", "allowed")
    for place, name in enumerate(heads):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=True)
    for name, alone in verification.tables["embedding"].items():
        trained = verification.tables["training"][name]
        shown = (
            f"{value:.2g}"
            for value in (alone.max_row_difference, trained.max_row_difference, trained.max_state_difference)
        )
        rows_alone, rows, states = shown
        scheme = str(verification.plan[name].sharding)
        table.add_row(name, scheme, rows_alone, str(alone.rule), rows, states, str(trained.rule))
    console.print(table)
    apart = [abs(a - b) for a, b in verification.losses]
    # Print the losses of the first and last step, and of the step with the largest difference.
    for step in sorted({1, verification.num_steps, 1 + apart.index(max(apart))}):
        sharded, alone_loss = verification.losses[step - 1]
        print(f"loss of step {step}: {sharded:.12g} sharded, {alone_loss:.12g} unsharded, {apart[step - 1]:.2g} apart")
    if verification.first_mismatch is None:
        print("no difference exceeds the tolerances")
        return
    print(f"differs first in {verification.first_mismatch}")
