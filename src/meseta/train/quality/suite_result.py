"""Collect the results in the folder of a suite."""

from __future__ import annotations

from collections.abc import Sequence

from meseta.report.quality.statistics import ConfidenceInterval
from meseta.report.quality.suite_result import RowIntervals, SuiteResult, compare_configs
from meseta.train.quality.resampling import bootstrap_rows
from meseta.train.quality.study import Study


def build_suite_result(study: Study, problems: Sequence[str]) -> SuiteResult:
    """Return the result of all runs that are done. `problems` describe the runs that failed.

    Raises MesetaError if saved predictions cannot be read.
    """
    suite = study.suite
    return SuiteResult(
        name=study.name,
        reference=suite.reference or next(iter(suite.configs)),
        num_trials=suite.trials,
        num_seeds=suite.seeds,
        eval_datasets=tuple(compare_configs(study.scores(), _row_intervals(study))),
        problems=tuple(problems),
    )


def _row_intervals(study: Study) -> RowIntervals:
    intervals: dict[tuple[str, str, str, str], ConfidenceInterval] = {}
    for entry in study.suite.datasets:
        runs = {name: study.scored_runs(entry, name) for name in study.suite.config_names(entry)}
        intervals |= bootstrap_rows(entry.eval_dataset.name, runs, study.suite.resamples, study.suite.first_seed)
    return intervals
