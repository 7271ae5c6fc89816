"""Trials of a search, with their results and costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.load import get_value, with_values
from meseta.data.dataset.dataset import Dataset
from meseta.telemetry.formatting import format_decimal
from meseta.telemetry.metrics import METRICS
from meseta.telemetry.metrics_file import EvalLine, TrialProgress
from meseta.telemetry.summary import TrialEntry
from meseta.train.search.candidates import INTERVAL, Settings
from meseta.train.search.choice import noise_margin, score, select_best, trial_entry
from meseta.train.search.cost import sample_operations
from meseta.train.search.trial_runs import TrialRuns

PREDICTION_COST = 1 / 3
"""Operations of a prediction in those of training on a sample, whose backward pass takes two thirds of all."""


@dataclass
class SearchTrial:
    """Trial of a search."""

    name: str
    settings: Settings
    operations: float
    """Predicted operations per sample."""
    result: TrialProgress


class Trials:
    """Trials within `train.search_budget`, in units of the first one. All methods that train are collective."""

    def __init__(self, config: RunConfig, dataset: Dataset, world: World) -> None:
        self._config, self._dataset = config, dataset
        self.runs = TrialRuns(config, world)
        self._trials: list[SearchTrial] = []
        self.metric, self._task = config.train.early_stopping.metric, config.train.early_stopping.task
        metric = next((one for one in METRICS if one.key == self.metric), None)
        self._metric_name, self.decimals = (metric.name, metric.decimals + 1) if metric else (self.metric, 5)
        self.evidence_cost = 0.0
        """Cost of predictions outside of training."""

    def __len__(self) -> int:
        return len(self._trials)

    def index(self, trial: SearchTrial) -> int:
        return self._trials.index(trial)

    @property
    def first(self) -> SearchTrial:
        return self._trials[0]

    def find(self, settings: Settings) -> SearchTrial | None:
        return next((trial for trial in self._trials if trial.settings == settings), None)

    def train(self, settings: Settings, num_evaluations: int | None) -> SearchTrial:
        """Start or continue the trial of `settings`. `num_evaluations` are those of the first trial's interval."""
        trial = self.find(settings)
        if trial is None:
            trial = SearchTrial(f"trial-{len(self._trials):02d}", settings, self._operations(settings), TrialProgress())
            self._trials.append(trial)
        limit = None if num_evaluations is None else round(num_evaluations * self._evaluations_ratio(settings))
        self._continue(trial, limit)
        return trial

    def train_to_end(self, trial: SearchTrial, num_predictions: int) -> None:
        """Continue a trial to its end, or until the budget is spent except for `num_predictions` predictions."""
        if trial.result.is_finished:
            return
        cost = self.estimate_cost(trial.settings, 1, num_samples=0) / self._evaluations_ratio(trial.settings)
        budget_left = self.budget_left - self._prediction_cost(trial, num_predictions)
        limit = len(trial.result.evaluations) + max(int(budget_left / cost), 0)
        if limit > len(trial.result.evaluations):
            self._continue(trial, limit)

    def _continue(self, trial: SearchTrial, num_evaluations: int | None) -> None:
        if not trial.result.is_finished:
            is_first = not trial.settings
            trial.result = self.runs.train(trial.name, trial.settings, num_evaluations, may_fail=not is_first)

    def collect_evidence(self, name: str, trial: SearchTrial, compute: Callable[[Path], tuple[Any, int]]) -> Any:
        """Return the plain data that `compute` returns for the folder of a trial, with its number of predictions, which
        counts in the budget."""
        evidence, num_predictions = self.runs.remember(name, lambda: compute(self.runs.path(trial.name)))
        self.evidence_cost += self._prediction_cost(trial, num_predictions)
        return evidence

    def _prediction_cost(self, trial: SearchTrial, num_predictions: int) -> float:
        return num_predictions * PREDICTION_COST * trial.operations / self._unit

    def _operations(self, settings: Settings) -> float:
        return sample_operations(with_values(self._config, settings), self._dataset)

    def _evaluations_ratio(self, settings: Settings) -> float:
        """Return the number of evaluations of a trial for each of the first trial."""
        interval = settings.get(INTERVAL)
        return 1.0 if interval is None else float(self._config.train.eval_every_epochs or interval) / float(interval)

    @property
    def _unit(self) -> float:
        return max(self.first.result.num_samples * self.first.operations, 1.0)

    def cost(self, trial: SearchTrial) -> float:
        return trial.result.num_samples * trial.operations / self._unit

    @property
    def spent(self) -> float:
        return sum(map(self.cost, self._trials)) + self.evidence_cost

    @property
    def budget_left(self) -> float:
        return self._config.train.search_budget - self.spent

    def can_spend(self, cost: float) -> bool:
        return cost <= self.budget_left + 1e-9

    def estimate_cost(self, settings: Settings, num_evaluations: int, num_samples: int | None = None) -> float:
        """Return the cost of training until an evaluation, after `num_samples` samples or those of the trial so far."""
        trial = self.find(settings)
        operations = self._operations(settings) if trial is None else trial.operations
        if num_samples is None:
            num_samples = 0 if trial is None else trial.result.num_samples
        return max(self.rung_samples(num_evaluations) - num_samples, 0) * operations / self._unit

    def rung_samples(self, num_evaluations: int) -> int:
        """Return the number of training samples until an evaluation of the first trial."""
        lines = self.first.result.evaluations
        return lines[min(num_evaluations, len(lines)) - 1].num_samples_trained or 0

    def _values(self, trial: SearchTrial, num_samples: int | None = None) -> list[float | None]:
        """Return the metric of the evaluations until `num_samples` training samples."""
        lines = [
            line
            for line in trial.result.evaluations
            if num_samples is None or (line.num_samples_trained or 0) <= num_samples
        ]
        return [trial_entry({}, line, self.metric, self._task).value for line in lines]

    def best_evaluation(self, trial: SearchTrial) -> int | None:
        return select_best(self._values(trial), self.metric)

    def value(self, trial: SearchTrial, num_samples: int | None = None) -> float | None:
        """Return the metric of the weights with which the trial would end after `num_samples` training samples."""
        values = self._values(trial, num_samples)
        if self._config.train.finish != "best":
            return values[-1] if values else None
        best = select_best(values, self.metric)
        return None if best is None else values[best]

    def score(self, trial: SearchTrial, num_samples: int | None = None) -> float:
        return score(self.value(trial, num_samples), self.metric)

    def margin(self) -> float:
        """Return the gain over the first trial below which two trials count as equal."""
        return noise_margin(self.first.result.evaluations[0], self.value(self.first), self.metric)

    def describe(self, trial: SearchTrial) -> str:
        if trial.result.problem:
            return f"failed: {trial.result.problem}"
        best, value = self.best_evaluation(trial), format_decimal(self.value(trial), self.decimals)
        at = "" if best is None else f", best after {trial.result.evaluations[best].num_samples_trained or 0:,}"
        return f"validation {self._metric_name} {value} in {trial.result.num_samples:,} samples{at}"

    def entries(self) -> list[TrialEntry]:
        keys = list(dict.fromkeys(key for trial in self._trials for key in trial.settings))
        entries = []
        for trial in self._trials:
            best = self.best_evaluation(trial)
            document = with_values(self._config, trial.settings).model_dump(mode="json")
            settings = {key: get_value(document, key) for key in keys}
            line = EvalLine() if best is None else trial.result.evaluations[best]
            entry = trial_entry(settings, line, self.metric, self._task)
            extra = {"num_samples": trial.result.num_samples, "cost": round(self.cost(trial), 4)}
            entries.append(entry.model_copy(update={**extra, "problem": trial.result.problem}))
        return entries
