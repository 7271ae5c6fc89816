"""Execution of the runs of a suite in child processes, and its result."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from meseta.spec import MesetaError
from meseta.system import FolderLock
from tools.quality.comparison import COMPARED_METRICS, ConfidenceInterval, SuiteResult, compare_configs
from tools.quality.jobs import Job, Step, StopSignals, last_output_line, run_jobs
from tools.quality.page import JSON_FILE, PAGE_FILE, TEXT_FILE, write_suite_result
from tools.quality.resampling import bootstrap_rows
from tools.quality.scoring import check_configs, score_run
from tools.quality.study import Study, SuiteRound, SuiteRun
from tools.quality.suite import load_suite
from tools.quality.tables import format_metric, to_markdown
from tools.quality.worlds import ROWS_FOLDER, world_steps

PROBE_ROWS = 1000
"""Number of rows of a world that is made only to find its columns."""


def run_suite(suite: Path, out: Path, num_workers: int) -> int:
    """Execute the pending runs of a suite, write and print its result, and return the exit code.

    Raises MesetaError if the suite is invalid or runs failed.
    """
    study = Study(load_suite(suite), suite.stem, out)
    study.open()
    lock = FolderLock(out)
    lock.acquire()
    try:
        runner = SuiteRunner(study, num_workers)
        runner.run()
        result = build_suite_result(study, runner.problems)
        write_suite_result(result, out)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal_number
    finally:
        lock.release()
    print(to_markdown(result))
    print(f"tables: {out / TEXT_FILE}, {out / JSON_FILE}")
    print(f"report: {out / PAGE_FILE}")
    if runner.problems:
        raise MesetaError(
            f"quality: {len(runner.problems)} training runs failed, the first: {runner.problems[0]}; the same command "
            "retries them"
        )
    return 0


class Interrupted(Exception):
    """The user stopped the command by a signal."""

    def __init__(self, signal_number: int, progress: str) -> None:
        super().__init__(f"interrupted at {progress} runs; the same command resumes from there")
        self.signal_number = signal_number


class SuiteRunner:
    """Executes the pending runs of a suite."""

    def __init__(self, study: Study, num_workers: int) -> None:
        self.problems: list[str] = []
        self._study, self._num_workers = study, num_workers
        self._signals = StopSignals()
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
        suite, probe = self._study.suite, self._study.out / "probe"
        # All worlds have the same columns, so the rows of the first one are enough.
        rows = [world.model_copy(update={"rows": PROBE_ROWS}) for world in suite.worlds[:1]]
        steps = [step for world in rows for step in world_steps(world, suite.first_seed, probe)]
        try:
            self._run_job(
                "configs checked with the columns of the data",
                self._study.out / "check.log",
                [*steps, partial(check_configs, self._study, probe / ROWS_FOLDER)],
            )
        finally:
            shutil.rmtree(probe, ignore_errors=True)

    def _make_rows(self, one: SuiteRound) -> None:
        """Create the rows of a world if needed, and save its best reachable metrics."""
        if one.world is None:
            return
        if one.needs_rows:
            name = f"{one.world.eval_dataset.name}, seed {one.seed}: rows"
            self._run_job(name, one.folder.with_suffix(".log"), world_steps(one.world, one.seed, one.folder))
        self._study.save_best_reachable(one)

    def _run_job(self, name: str, log: Path, steps: Sequence[Step]) -> None:
        """Run the steps of a job. Raises MesetaError if it fails, because all later runs need it."""
        log.unlink(missing_ok=True)
        for done in run_jobs([Job(name, log, steps)], 1, self._signals):
            self._exit_if_interrupted()
            if done.exit_code:
                raise MesetaError(last_output_line(log))
            log.unlink(missing_ok=True)
            print(f"{name} in {done.seconds:.0f} s", file=sys.stderr, flush=True)
        self._exit_if_interrupted()

    def _train(self, runs: Sequence[SuiteRun]) -> None:
        """Train several runs at a time, and report each one when it ends."""
        by_title = {run.title: run for run in runs}
        jobs = [Job(title, run.log, _steps(run)) for title, run in by_title.items()]
        for done in run_jobs(jobs, self._num_workers, self._signals):
            if self._signals.first_signal is None:
                self.report_run(by_title[done.name], done)
        self._exit_if_interrupted()

    def report_run(self, run: SuiteRun, done: Job) -> None:
        """Print the result of a run and the progress of the suite."""
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
        left = f", about {_format_duration(left_s)} left" if self._num_done < self._num_runs else ""
        print(
            f"[{self._num_done}/{self._num_runs}] {run.title}: {text} ({_format_duration(done.seconds)}{left})",
            flush=True,
        )

    def _exit_if_interrupted(self) -> None:
        if self._signals.first_signal is not None:
            raise Interrupted(self._signals.first_signal, f"{self._num_done} of {self._num_runs}")


def _steps(run: SuiteRun) -> list[Step]:
    """Return the pending steps of a run: training without the test split, then one evaluation on it if selected."""
    train: list[Step] = [["train", str(run.config), *run.overrides, "--no-test"]]
    return [*(train if run.read_summary() is None else []), *([partial(score_run, run)] if run.reads_test else [])]


def _metrics_text(run: SuiteRun, choose_by: str) -> str:
    """Format the metrics of a finished run."""
    score = run.score() if run.reads_test else None
    if score is None:
        return f"{choose_by} {format_metric(run.valid_metric(choose_by))} of valid"
    shown = ((metric, score.metric_value(metric)) for metric in COMPARED_METRICS)
    return "  ".join(f"{metric.name} {format_metric(value)}" for metric, value in shown if value is not None)


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def build_suite_result(study: Study, problems: Sequence[str]) -> SuiteResult:
    """Return the result of all runs that are done. `problems` describe the runs that failed.

    Raises MesetaError if saved predictions cannot be read.
    """
    suite, intervals = study.suite, dict[tuple[str, str, str, str], ConfidenceInterval]()
    for entry in suite.datasets:
        runs = {name: study.scored_runs(entry, name) for name in suite.config_names(entry)}
        intervals |= bootstrap_rows(entry.eval_dataset.name, runs, suite.resamples, suite.first_seed)
    return SuiteResult(
        name=study.name,
        reference=suite.reference or next(iter(suite.configs)),
        num_trials=suite.trials,
        num_seeds=suite.seeds,
        eval_datasets=tuple(compare_configs(study.scores(), intervals)),
        problems=tuple(problems),
    )
