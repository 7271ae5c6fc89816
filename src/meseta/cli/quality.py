"""`meseta quality SUITE.yaml --out DIR`: configs compared on worlds and datasets over seeds, with intervals."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meseta.cli.jobs import CommandJob, DoneJob, Start, command_step, last_words, run_jobs, work_step
from meseta.cli.launch import StopSignals
from meseta.errors import MesetaError

if TYPE_CHECKING:
    from meseta.report.quality.outcome import QualityOutcome
    from meseta.train.quality.study import Round, Study, SuiteRun

Suite = Annotated[Path, typer.Argument(metavar="SUITE", help="YAML file of the suite, see docs/quality.md.")]
Out = Annotated[Path, typer.Option(help="Folder of the suite; the same command goes on in it.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Trainings at a time, of one thread each.", show_default="the processors")
]

PROCESS = "meseta quality"
"""Name of the processes."""


def quality(suite: Suite, out: Out, workers: Workers = None) -> None:
    """Tune each config by the same number of trials, train it on fresh seeds, and say which differences are no chance;
    started again, keep what is done and go on."""
    from meseta.machine.locks import FolderLock
    from meseta.machine.processors import num_cores
    from meseta.train.quality.study import Study
    from meseta.train.quality.suite import load_suite

    study = Study(load_suite(suite), suite.stem, out)
    study.open()
    lock = FolderLock(out)
    lock.acquire()
    try:
        work = _SuiteWork(study, workers or num_cores())
        work.finish()
        outcome = _outcome(study, work.problems)
    finally:
        lock.release()
    _show(outcome, out)
    if work.problems:
        raise MesetaError(
            f"quality: {len(work.problems)} of the trainings have failed, the first: {work.problems[0]}; the same "
            "command tries them again"
        )


class _SuiteWork:
    """What is left to do, done."""

    def __init__(self, study: Study, num_workers: int) -> None:
        self.problems: list[str] = []
        self._study, self._num_workers = study, num_workers
        self._signals = StopSignals()
        self._signals.install()
        self._num_runs = study.num_runs
        self._num_done = self._num_timed = 0
        self._seconds = 0.0
        self._checked = False

    def finish(self) -> None:
        """Every round: its rows, where they have to be made, and its trainings."""
        for one in self._study.rounds():
            missing = one.missing()
            self._num_done += len(one.runs) - len(missing)
            if missing:
                self._check_all()
                self._make_rows(one)
                self._train(missing)
            one.drop_rows_and_weights()

    def _check_all(self) -> None:
        """Before the first training: whether each config fits all that it is to be trained on."""
        if self._checked:
            return
        self._checked = True
        self._one(
            "configs tried on the columns of the data", self._study.out / "check.log", partial(_check, self._study)
        )

    def _make_rows(self, one: Round) -> None:
        """Of a world, with the copy of what its truth reaches."""
        if one.world is None:
            return
        if one.needs_rows:
            from meseta.train.quality.worlds import make_world

            name = f"{one.world.ground.name}, seed {one.seed}: rows"
            self._one(name, one.folder.with_suffix(".log"), partial(make_world, one.world, one.seed, one.folder))
        self._study.keep_best(one)

    def _one(self, name: str, log: Path, work: Callable[[], object]) -> None:
        """What all else needs, in a process of its own. Raises MesetaError where it fails."""
        log.unlink(missing_ok=True)
        for done in run_jobs([CommandJob(name, log, [work_step(work, PROCESS)])], 1, self._signals):
            self._leave_if_told()
            if done.code:
                raise MesetaError(last_words(log))
            log.unlink(missing_ok=True)
            print(f"{name} in {done.seconds:.0f} s", file=sys.stderr, flush=True)
        self._leave_if_told()

    def _train(self, runs: Sequence[SuiteRun]) -> None:
        """Several at a time, telling each."""
        by_title = {run.title: run for run in runs}
        jobs = [CommandJob(title, run.log, _steps(run)) for title, run in by_title.items()]
        for done in run_jobs(jobs, self._num_workers, self._signals):
            if self._signals.number is None:
                self._tell(by_title[done.job.name], done)
        self._leave_if_told()

    def _tell(self, run: SuiteRun, done: DoneJob) -> None:
        from meseta.telemetry.shown import duration

        self._num_done += 1
        self._num_timed += 1
        self._seconds += done.seconds
        if done.code or not run.is_done():
            told = f"failed with exit code {done.code}: {last_words(run.log)}"
            self.problems.append(f"{run.title}: {told}")
        else:
            if not run.reads_test:
                run.forget_weights()
            told = _figures(run, self._study.suite.choose_by)
        left_s = (self._num_runs - self._num_done) * self._seconds / self._num_timed / self._num_workers
        left = f", about {duration(left_s)} left" if self._num_done < self._num_runs else ""
        print(f"[{self._num_done}/{self._num_runs}] {run.title}: {told} ({duration(done.seconds)}{left})", flush=True)

    def _leave_if_told(self) -> None:
        if self._signals.number is not None:
            print(f"interrupted at {self._num_done} of {self._num_runs} trainings; the same command goes on from there",
                  file=sys.stderr)  # fmt: skip
            raise typer.Exit(128 + self._signals.number)


def _steps(run: SuiteRun) -> list[Start]:
    """Train, where that is not done, without a look at test; then, of the settings chosen, one look."""
    from meseta.train.quality.scoring import score

    train = command_step(["train", str(run.config), *run.overrides, "--no-test"], PROCESS)
    steps: list[Start] = [] if run.is_trained() else [train]
    return [*steps, work_step(partial(score, run), PROCESS)] if run.reads_test else steps


def _check(study: Study) -> None:
    """In a process of its own: the first training of each config, on the columns of each dataset, and of some rows of a
    world, since the worlds have the same."""
    from meseta.train.quality.fitting import PROBE_ROWS, check_fits
    from meseta.train.quality.worlds import ROWS, make_world

    suite, probe = study.suite, study.out / "probe"
    try:
        for entry in suite.datasets:
            check_fits(study.first_runs(entry), entry.dir)
        for number, world in enumerate(suite.worlds):
            if number == 0:
                make_world(world.model_copy(update={"rows": PROBE_ROWS}), suite.first_seed, probe)
            check_fits(study.first_runs(world), probe / ROWS)
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _figures(run: SuiteRun, choose_by: str) -> str:
    """What a run has come to, in words."""
    from meseta.report.quality.outcome import QUALITY
    from meseta.telemetry.shown import fixed
    from meseta.train.sweep.sweep import Result

    score = run.score() if run.reads_test else None
    if score is None:
        return f"{choose_by} {fixed(Result(run.trial, run.trial.summary()).figure(choose_by), 5)} of valid"
    shown = ((metric, score.figure(metric)) for metric in QUALITY)
    return "  ".join(f"{metric.name} {fixed(value, 5)}" for metric, value in shown if value is not None)


def _outcome(study: Study, problems: Sequence[str]) -> QualityOutcome:
    """All that is known now, written as tables, a page and JSON."""
    from meseta.report.quality.page import write_outcome
    from meseta.train.quality.outcome import outcome_of

    outcome = outcome_of(study, problems)
    write_outcome(outcome, study.out)
    return outcome


def _show(outcome: QualityOutcome, out: Path) -> None:
    from meseta.report.quality.page import JSON_NAME, PAGE_NAME, TEXT_NAME
    from meseta.report.quality.tables import as_text

    print(as_text(outcome))
    print(f"tables: {out / TEXT_NAME}, {out / JSON_NAME}")
    print(f"report: {out / PAGE_NAME}")
