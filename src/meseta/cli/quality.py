"""`meseta quality SUITE --out DIR`: compares configs over worlds, datasets and seeds, with confidence intervals."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meseta.cli.jobs import (
    CommandJob,
    FinishedJob,
    StartProcess,
    command_step,
    function_step,
    last_output_line,
    run_jobs,
)
from meseta.cli.launch import StopSignals
from meseta.errors import MesetaError

if TYPE_CHECKING:
    from meseta.report.quality.suite_result import SuiteResult
    from meseta.train.quality.study import Study, SuiteRound, SuiteRun

SuiteArgument = Annotated[Path, typer.Argument(metavar="SUITE", help="YAML file of the suite, see docs/quality.md.")]
OutOption = Annotated[
    Path, typer.Option(help="Folder for the results. The same command resumes an interrupted suite there.")
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of simultaneous training runs, each with one thread.", show_default="the processors"
    ),
]

PROCESS_NAME = "meseta quality"
"""Title of the child processes."""


def quality(suite: SuiteArgument, out: OutOption, workers: WorkersOption = None) -> None:
    """Tune each config with the same number of trials, train it on new seeds, and compare the results.

    The result says which differences are significant. A restart of the command keeps finished runs.
    """
    from meseta.system.locks import FolderLock
    from meseta.system.processors import num_cores
    from meseta.train.quality.study import Study
    from meseta.train.quality.suite import load_suite

    study = Study(load_suite(suite), suite.stem, out)
    study.open()
    # Two commands must not write to the same folder.
    lock = FolderLock(out)
    lock.acquire()
    try:
        work = _SuiteRunner(study, workers or num_cores())
        work.run()
        outcome = _write_result(study, work.problems)
    finally:
        lock.release()
    _print_result(outcome, out)
    if work.problems:
        raise MesetaError(
            f"quality: {len(work.problems)} training runs failed, the first: {work.problems[0]}; the same command "
            "retries them"
        )


class _SuiteRunner:
    """Executes the pending runs of a suite."""

    def __init__(self, study: Study, num_workers: int) -> None:
        self.problems: list[str] = []
        self._study, self._num_workers = study, num_workers
        self._signals = StopSignals()
        self._signals.install()
        self._num_runs = study.num_runs
        self._num_done = self._num_timed = 0
        self._total_job_s = 0.0
        self._has_checked = False

    def run(self) -> None:
        """Execute all rounds. Rows are created only for rounds with pending runs."""
        for one in self._study.rounds():
            missing = one.pending_runs()
            self._num_done += len(one.runs) - len(missing)
            if missing:
                self._check_all()
                self._make_rows(one)
                self._train(missing)
            one.delete_rows_and_weights()

    def _check_all(self) -> None:
        """Check before the first training run that each config fits all datasets it is trained on."""
        if self._has_checked:
            return
        self._has_checked = True
        self._run_job(
            "configs checked with the columns of the data",
            self._study.out / "check.log",
            partial(_check_configs, self._study),
        )

    def _make_rows(self, one: SuiteRound) -> None:
        """Create the rows of a world if needed, and save its best reachable metrics."""
        if one.world is None:
            return
        if one.needs_rows:
            from meseta.train.quality.worlds import make_world

            name = f"{one.world.eval_dataset.name}, seed {one.seed}: rows"
            self._run_job(name, one.folder.with_suffix(".log"), partial(make_world, one.world, one.seed, one.folder))
        self._study.save_best_reachable(one)

    def _run_job(self, name: str, log: Path, work: Callable[[], object]) -> None:
        """Run `work` in a child process. Raises MesetaError if it fails, because all later runs need it."""
        log.unlink(missing_ok=True)
        for done in run_jobs([CommandJob(name, log, [function_step(work, PROCESS_NAME)])], 1, self._signals):
            self._exit_if_interrupted()
            if done.exit_code:
                raise MesetaError(last_output_line(log))
            log.unlink(missing_ok=True)
            print(f"{name} in {done.seconds:.0f} s", file=sys.stderr, flush=True)
        self._exit_if_interrupted()

    def _train(self, runs: Sequence[SuiteRun]) -> None:
        """Train several runs at a time, and report each one when it ends."""
        by_title = {run.title: run for run in runs}
        jobs = [CommandJob(title, run.log, _steps(run)) for title, run in by_title.items()]
        for done in run_jobs(jobs, self._num_workers, self._signals):
            if self._signals.first_signal is None:
                self._report_run(by_title[done.job.name], done)
        self._exit_if_interrupted()

    def _report_run(self, run: SuiteRun, done: FinishedJob) -> None:
        from meseta.telemetry.formatting import format_duration

        self._num_done += 1
        self._num_timed += 1
        self._total_job_s += done.seconds
        if done.exit_code or not run.is_done():
            text = f"failed with exit code {done.exit_code}: {last_output_line(run.log)}"
            self.problems.append(f"{run.title}: {text}")
        else:
            if not run.reads_test:
                run.delete_checkpoints()
            text = _metrics_text(run, self._study.suite.choose_by)
        # Estimate the remaining time from the mean duration of a job and the number of simultaneous jobs.
        left_s = (self._num_runs - self._num_done) * self._total_job_s / self._num_timed / self._num_workers
        left = f", about {format_duration(left_s)} left" if self._num_done < self._num_runs else ""
        print(
            f"[{self._num_done}/{self._num_runs}] {run.title}: {text} ({format_duration(done.seconds)}{left})",
            flush=True,
        )

    def _exit_if_interrupted(self) -> None:
        if self._signals.first_signal is not None:
            print(f"interrupted at {self._num_done} of {self._num_runs} runs; the same command resumes from there",
                  file=sys.stderr)  # fmt: skip
            raise typer.Exit(128 + self._signals.first_signal)


def _steps(run: SuiteRun) -> list[StartProcess]:
    """Return the pending steps of a run: training without the test split, then one evaluation on it if selected."""
    from meseta.train.quality.scoring import score_run

    train = command_step(["train", str(run.config), *run.overrides, "--no-test"], PROCESS_NAME)
    steps: list[StartProcess] = [] if run.is_trained() else [train]
    return [*steps, function_step(partial(score_run, run), PROCESS_NAME)] if run.reads_test else steps


def _check_configs(study: Study) -> None:
    """Check the first run of each config with the columns of each dataset and world. Runs in a child process."""
    # All worlds have the same columns, so the rows of the first one are enough.
    from meseta.train.quality.compatibility import PROBE_ROWS, check_configs_fit
    from meseta.train.quality.worlds import ROWS_FOLDER, make_world

    suite, probe = study.suite, study.out / "probe"
    try:
        for entry in suite.datasets:
            check_configs_fit(study.first_runs(entry), entry.dir)
        for number, world in enumerate(suite.worlds):
            if number == 0:
                make_world(world.model_copy(update={"rows": PROBE_ROWS}), suite.first_seed, probe)
            check_configs_fit(study.first_runs(world), probe / ROWS_FOLDER)
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _metrics_text(run: SuiteRun, choose_by: str) -> str:
    """Format the metrics of a finished run."""
    from meseta.report.quality.suite_result import COMPARED_METRICS
    from meseta.telemetry.formatting import format_decimal
    from meseta.train.sweep import TrialResult

    score = run.score() if run.reads_test else None
    if score is None:
        return (
            f"{choose_by} {format_decimal(TrialResult(run.trial, run.trial.summary()).metric(choose_by), 5)} of valid"
        )
    shown = ((metric, score.metric_value(metric)) for metric in COMPARED_METRICS)
    return "  ".join(f"{metric.name} {format_decimal(value, 5)}" for metric, value in shown if value is not None)


def _write_result(study: Study, problems: Sequence[str]) -> SuiteResult:
    """Write the results so far as tables, an HTML page and JSON."""
    from meseta.report.quality.page import write_suite_result
    from meseta.train.quality.suite_result import build_suite_result

    outcome = build_suite_result(study, problems)
    write_suite_result(outcome, study.out)
    return outcome


def _print_result(outcome: SuiteResult, out: Path) -> None:
    from meseta.report.quality.page import JSON_FILE, PAGE_FILE, TEXT_FILE
    from meseta.report.quality.tables import to_markdown

    print(to_markdown(outcome))
    print(f"tables: {out / TEXT_FILE}, {out / JSON_FILE}")
    print(f"report: {out / PAGE_FILE}")
