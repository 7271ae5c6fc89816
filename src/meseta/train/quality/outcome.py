"""From the folder of a suite to what it has shown."""

from __future__ import annotations

from collections.abc import Sequence

from meseta.report.quality.outcome import QualityOutcome, Resampled, compare
from meseta.report.quality.statistics import Interval
from meseta.train.quality.resampling import over_rows
from meseta.train.quality.study import Study


def outcome_of(study: Study, problems: Sequence[str]) -> QualityOutcome:
    """Of all trainings that are done; `problems` tell of those that are not. Raises MesetaError where predictions that
    were kept cannot be read."""
    suite = study.suite
    return QualityOutcome(
        name=study.name,
        reference=suite.reference or next(iter(suite.configs)),
        num_trials=suite.trials,
        num_seeds=suite.seeds,
        grounds=tuple(compare(study.scores(), _resampled(study))),
        problems=tuple(problems),
    )


def _resampled(study: Study) -> Resampled:
    """Of the datasets, whose truth is not known."""
    found: dict[tuple[str, str, str, str], Interval] = {}
    for entry in study.suite.datasets:
        runs = {name: study.scored(entry, name) for name in study.suite.names_on(entry)}
        found |= over_rows(entry.ground.name, runs, study.suite.resamples, study.suite.first_seed)
    return found
