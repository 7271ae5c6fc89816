"""`meseta sweep CONFIG key=[a,b] ... --out DIR`: grid search or random search over settings, with a ranking."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from meseta.cli.jobs import CommandJob, command_step, last_output_line, run_jobs
from meseta.cli.launch import StopSignals
from meseta.cli.prepare import QuietOption, VerboseOption
from meseta.errors import MesetaError
from meseta.telemetry.detail import CurrentDetail, Detail

if TYPE_CHECKING:
    from meseta.train.sweep import Sweep, SweepTrial, TrialResult, TrialTable


class SweepMetric(enum.StrEnum):
    """Metrics by which trials can be ranked."""

    NE = "ne"
    AUC = "auc"
    LOGLOSS = "logloss"
    PR_AUC = "pr_auc"


def sweep(
    config: Annotated[Path, typer.Argument(help="YAML config of all trials.")],
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUES...",
            help="Search space: 'key=\\[a,b,c]', with --random also 'key=loguniform(1e-4,1e-1)', uniform(a,b) and "
            "randint(a,b). Any other key=value applies to all trials.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the sweep. Each trial is a run in it.")],
    random_search: Annotated[bool, typer.Option("--random", help="Draw trials at random. Default: a grid.")] = (False),
    trials: Annotated[int | None, typer.Option(min=1, help="Number of random trials. Required with --random.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of --random.")] = 0,
    metric: Annotated[
        SweepMetric, typer.Option(help="Metric by which trials are ranked, on the split valid, or on test without it.")
    ] = SweepMetric.NE,
    nproc: Annotated[int, typer.Option(min=1, help="Number of ranks of each trial.")] = 1,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Train once per combination of settings and rank the runs. A restarted sweep keeps its finished trials."""
    from meseta.telemetry.metrics import selection_on_test_warning
    from meseta.train.sweep import (
        TrialResult,
        TrialTable,
        grid_settings,
        open_sweep,
        parse_space,
        random_settings,
        rank_trials,
        write_page,
        write_tables,
    )

    CurrentDetail.choose("sweep", quiet=quiet, verbose=verbose)
    if random_search != (trials is not None):
        raise MesetaError("sweep: --random and --trials N need each other; a grid runs each combination once")
    space, fixed = parse_space(settings)
    chosen = grid_settings(space) if trials is None else random_settings(space, trials, seed)
    plan = open_sweep(out, config, fixed, chosen, allow_growth=random_search)
    signals = StopSignals()
    signals.install()
    results = [TrialResult(trial, trial.summary(), "not run yet") for trial in plan.trials]
    table = TrialTable(chosen, metric.value)
    for index, trial in enumerate(plan.trials):
        results[index] = _finish_trial(plan, trial, nproc, signals, table)
        # An interrupted sweep keeps the results so far.
        write_tables(plan, rank_trials(results, metric.value))
        if signals.first_signal is not None:
            print(f"interrupted in trial {index + 1}; the same command resumes from there", file=sys.stderr)
            raise typer.Exit(128 + signals.first_signal)
    ranked = rank_trials(results, metric.value)
    ranked[0] = _evaluate_best(plan, ranked[0], nproc, signals)
    write_tables(plan, ranked)
    page = write_page(plan, ranked, metric.value)
    _print_ranking(ranked)
    if note := selection_on_test_warning(ranked[0].split if len(ranked) > 1 else None, ["which trial is the best"]):
        print(f"note: {note}")
    print(f"tables: {plan.out / 'sweep.csv'}, {plan.out / 'sweep.md'}")
    if page is None:
        raise MesetaError(f"sweep: no trial has finished; see their logs in {str(out)!r}")
    print(f"report: {page}")


def _finish_trial(plan: Sweep, trial: SweepTrial, nproc: int, signals: StopSignals, table: TrialTable) -> TrialResult:
    """Run a trial if it is not finished, and print its result as a row of `table`."""
    from meseta.train.sweep import TrialResult

    summary, problem = trial.summary(), ""
    kept = summary is not None
    if summary is None:
        # The test split must not influence the ranking. Only the best trial is evaluated on it.
        code = _run_training([*_train_command(plan, trial, nproc), "--no-test"], plan.log(trial), signals)
        summary = trial.summary()
        if signals.first_signal is not None:
            problem = "stopped"
        elif code != 0 or summary is None:
            summary, problem = None, f"failed with exit code {code}: {last_output_line(plan.log(trial))}"
    result = TrialResult(trial, summary, problem)
    if signals.first_signal is None:
        table.print_row(trial.number, result.metric(table.metric), *[problem] * bool(problem), *["(kept)"] * kept)
    return result


def _evaluate_best(plan: Sweep, result: TrialResult, nproc: int, signals: StopSignals) -> TrialResult:
    """Evaluate the best trial on the test split, unless that was done, and return its result."""
    # If the trials were ranked on the validation split, none of them has read the test split before.
    from meseta.telemetry.metrics import TEST
    from meseta.train.sweep import TrialResult

    if result.summary is None or TEST in result.summary.evaluated_splits:
        return result
    code = _run_training(_train_command(plan, result.trial, nproc), plan.log(result.trial), signals)
    if signals.first_signal is not None:
        print("interrupted at the test split of the best trial; the same command resumes from there", file=sys.stderr)
        raise typer.Exit(128 + signals.first_signal)
    summary = result.trial.summary()
    if summary is None or TEST not in summary.evaluated_splits:
        raise MesetaError(
            f"sweep: the best trial, {result.trial.run_dir.name}, could not be evaluated on the test split (exit code "
            f"{code}): {last_output_line(plan.log(result.trial))}"
        )
    return TrialResult(result.trial, summary)


def _train_command(plan: Sweep, trial: SweepTrial, nproc: int) -> list[str]:
    more = ["--verbose"] if CurrentDetail.level == Detail.VERBOSE else []
    return ["train", str(plan.config), *trial.overrides, *more, "--nproc", str(nproc)]


def _run_training(arguments: Sequence[str], log: Path, signals: StopSignals) -> int:
    """Run a training command in a child process and return its exit code."""
    job = CommandJob("meseta trial", log, [command_step(arguments, "meseta trial")])
    return next((done.exit_code for done in run_jobs([job], 1, signals)), 1)


def _print_ranking(ranked: Sequence[TrialResult]) -> None:
    """Print the ranking as a table."""
    from rich.table import Table

    from meseta.cli.report import plain_console
    from meseta.train.sweep import PROBLEM, format_cell, table_rows

    console = plain_console()
    cells = table_rows(ranked)
    columns = [column for column in cells[0] if column != PROBLEM or any(row[PROBLEM] for row in cells)]
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.kind == "text" else "right"
        table.add_column(column.name, justify=justify, no_wrap=column != PROBLEM)
    for row in cells:
        table.add_row(*(format_cell(column, row[column]) for column in columns))
    console.print(table)
