"""Search of settings within a budget, by successive halving of trials on the validation split.

The first trial, with default settings, trains to its end. Its cost is the unit of the budget. Columns are left out if
permuting them does not increase its validation loss beyond noise, and they do not explain residuals of a trial without
them. Trials with one change train for a quarter (Jamieson and Talwalkar, AISTATS 2016), the best of them and all
improvements together for a half, and the best of these to its end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.load import get_value
from meseta.data.dataset.dataset import Dataset
from meseta.data.schema.layout import NO_CATEGORY
from meseta.system.environment_variables import environ
from meseta.telemetry.detail import CurrentDetail
from meseta.telemetry.formatting import format_decimal
from meseta.telemetry.metrics import HIGHER_IS_BETTER, METRICS, VALID
from meseta.telemetry.metrics_file import EvalLine, TrialProgress
from meseta.telemetry.run_events import CALLBACKS_VARIABLE
from meseta.telemetry.summary import TRIALS_FILE, TrialsRecord
from meseta.train.importance import PairedDifference
from meseta.train.run_dir import RunDir
from meseta.train.search.candidates import (
    INTERVAL,
    INTERVALS_PER_EPOCH,
    MAX_RATE_EXTENSIONS,
    WITHOUT,
    Settings,
    merge,
    rate_key,
    scaled_rate,
    single_changes,
)
from meseta.train.search.choice import describe_trade_off, is_better, select_best, trial_entry
from meseta.train.search.columns import associate_columns, compare_runs, find_unhelpful_columns
from meseta.train.search.cost import sample_operations
from meseta.train.search.trial_runs import TrialRuns, with_settings

MIN_VALID_ROWS = 200
"""Minimum number of validation rows of a search. With fewer rows the best trial would be chosen by chance."""
_NUM_FINALISTS = 2
# Share of the evaluations of the first trial after which trials are compared first.
_FIRST_RUNG_SHARE = 0.25
# Part of the budget that is kept for trials with all improvements, and to their end.
_RESERVED_COST = 1.0
# Part of the standard error of a metric by which a trial must be better. The trials share rows, so that most of the
# error is common to them.
_MARGIN = 0.1
MAX_ASSOCIATION = 2.5
"""Association with residuals, in standard deviations, above which a column stays. Noise exceeds it in 0.6 %."""


def search_settings(
    config: RunConfig, dataset: Dataset, free: Collection[str], world: World, *, continues: bool = True
) -> RunConfig:
    """Return `config` with the best values of its `free` keys in trials, by `train.early_stopping.metric`. Collective.

    The best trial becomes the run in run_dir, which resumes from it, unless `continues` is false. If the run has begun,
    its values are kept. Finished trials are not repeated. There is no search without budget, or with fewer than
    `MIN_VALID_ROWS` validation rows.
    """
    decided = world.broadcast_from_rank_0(lambda: _load_decisions(config, free))
    if decided is not None:
        return with_settings(config, decided)
    num_valid = dataset.splits[VALID].num_rows if VALID in dataset.splits else 0
    if num_valid < MIN_VALID_ROWS or not config.train.search_budget or not config.train.evaluates_during_training:
        if num_valid < MIN_VALID_ROWS and config.train.search_budget:
            _print(world, f"no search of settings: {num_valid} validation rows are fewer than {MIN_VALID_ROWS}")
        return config
    return _Search(config, dataset, free, world, continues=continues).run()


def _load_decisions(config: RunConfig, free: Collection[str]) -> dict[str, Any] | None:
    run = RunDir(config.run_dir)
    if not run.has_begun:
        return None
    document, now = run.load_config().model_dump(mode="json"), config.model_dump(mode="json")
    values = {key: get_value(document, key) for key in free}
    return {key: value for key, value in values.items() if value is not None and get_value(now, key) is not None}


def _print(world: World, text: str) -> None:
    if world.rank == 0 and not CurrentDetail.is_quiet():
        print(text, flush=True)


@dataclass
class _Trial:
    name: str
    settings: Settings
    operations: float
    """Predicted operations per sample."""
    result: TrialProgress


class _Search:
    def __init__(
        self, config: RunConfig, dataset: Dataset, free: Collection[str], world: World, *, continues: bool
    ) -> None:
        self._config, self._world = config, world
        self._dataset = dataset.select(config.data.labels, config.data.without)
        self._free = frozenset(free)
        # Checkpoints elsewhere, and loggers and callbacks, which see all steps, need a run from its first step.
        elsewhere = config.checkpoint.dir is not None or config.checkpoint.mirror is not None
        self._continues = continues and not (elsewhere or config.train.loggers or environ.get(CALLBACKS_VARIABLE))
        self._runs = TrialRuns(config, world)
        self._trials: list[_Trial] = []
        self._decisions: list[str] = []
        self._metric, self._task = config.train.early_stopping.metric, config.train.early_stopping.task
        metric = next((one for one in METRICS if one.key == self._metric), None)
        self._metric_name, self._decimals = (metric.name, metric.decimals + 1) if metric else (self._metric, 5)
        self._unit, self._rung, self._overfits = 1.0, 1, False
        self._has_tables = any(feature.name != NO_CATEGORY.name for feature in dataset.sparse)

    def run(self) -> RunConfig:
        first = self._train({}, None)
        self._unit = max(first.result.num_samples * first.operations, 1.0)
        num_evaluations, best = len(first.result.evaluations), self._best_evaluation(first)
        budget = f"the budget is {self._config.train.search_budget:g} times its cost"
        self._decide(f"first trial, with the settings above: {self._describe(first)}; {budget}")
        if best is None:
            return self._finish(first)
        self._rung = max(1, math.ceil(num_evaluations * _FIRST_RUNG_SHARE))
        self._overfits = best == 0
        base = {**self._find_columns(first), **self._refine_evaluations()}
        control = self._train(base, self._rung) if self._can_spend(_FIRST_RUNG_SHARE) else first
        if control.result.problem:
            control = first
        if control is not first:
            self._decide(f"trial with these decisions: {self._describe(control)}")
        return self._finish(self._select(first, self._halve(first, control, self._try_changes(control))))

    def _train(self, settings: Settings, num_evaluations: int | None) -> _Trial:
        """Start or continue the trial of `settings`. `num_evaluations` are those of the first trial's interval."""
        trial = next((one for one in self._trials if one.settings == settings), None)
        if trial is None:
            config = with_settings(self._config, settings)
            operations = sample_operations(config, self._dataset)
            trial = _Trial(f"trial-{len(self._trials):02d}", settings, operations, TrialProgress())
            self._trials.append(trial)
        if not trial.result.is_finished:
            limit = None if num_evaluations is None else round(num_evaluations * self._evaluations_ratio(settings))
            trial.result = self._runs.train(trial.name, settings, limit, may_fail=bool(settings))
        return trial

    def _evaluations_ratio(self, settings: Settings) -> float:
        """Return the number of evaluations of a trial for each of the first trial."""
        interval = settings.get(INTERVAL)
        return 1.0 if interval is None else float(self._config.train.eval_every_epochs or interval) / float(interval)

    def _values(self, trial: _Trial, num_samples: int | None = None) -> list[float | None]:
        """Return the metric of the evaluations until `num_samples` training samples."""
        lines = [
            line
            for line in trial.result.evaluations
            if num_samples is None or (line.num_samples_trained or 0) <= num_samples
        ]
        return [trial_entry({}, line, self._metric, self._task).value for line in lines]

    def _best_evaluation(self, trial: _Trial) -> int | None:
        return select_best(self._values(trial), self._metric)

    def _value(self, trial: _Trial, num_samples: int | None = None) -> float | None:
        """Return the metric of the weights with which the trial would end after `num_samples` training samples."""
        values = self._values(trial, num_samples)
        if self._config.train.finish != "best":
            return values[-1] if values else None
        best = select_best(values, self._metric)
        return None if best is None else values[best]

    def _cost(self, trial: _Trial) -> float:
        return trial.result.num_samples * trial.operations / self._unit

    def _can_spend(self, cost: float) -> bool:
        return sum(self._cost(trial) for trial in self._trials) + cost <= self._config.train.search_budget + 1e-9

    def _describe(self, trial: _Trial) -> str:
        if trial.result.problem:
            return f"failed: {trial.result.problem}"
        best, value = self._best_evaluation(trial), format_decimal(self._value(trial), self._decimals)
        at = "" if best is None else f", best after {trial.result.evaluations[best].num_samples_trained or 0:,}"
        return f"validation {self._metric_name} {value} in {trial.result.num_samples:,} samples{at}"

    def _decide(self, text: str) -> None:
        self._decisions.append(text)
        _print(self._world, f"search: {text}")

    def _find_columns(self, first: _Trial) -> Settings:
        """Return the setting that leaves out columns that do not help, or no setting."""
        if WITHOUT not in self._free or not self._can_spend(2 * _FIRST_RUNG_SHARE):
            return {}
        path = self._runs.path(first.name)
        arguments = self._config, self._dataset, self._world
        unhelpful = self._runs.remember("columns", lambda: find_unhelpful_columns(path, *arguments))
        if not unhelpful:
            self._decide("all columns are kept: permuting any of them increases the validation loss beyond noise")
            return {}
        intervals = ", ".join(f"{one['name']} {one['low']:+.5f} to {one['high']:+.5f}" for one in unhelpful)
        self._decide("permuting these columns does not increase the validation log loss beyond noise "
                     f"(95 % intervals): {intervals}")  # fmt: skip
        names = self._keep_associated([one["name"] for one in unhelpful], self._rung)
        return self._settings_without(names) if names else {}

    def _keep_associated(self, names: Sequence[str], num_evaluations: int) -> list[str]:
        """Return the `names` that are not associated with the residuals of a trial without them."""
        trial = self._train(self._settings_without(names), num_evaluations)
        if trial.result.problem:
            return []
        path = self._runs.path(trial.name)
        arguments = self._config, self._dataset, names, self._world
        scores = self._runs.remember("association", lambda: associate_columns(path, *arguments))
        kept = [name for name in names if scores[name] > MAX_ASSOCIATION]
        self._decide("a model without them leaves residuals that the columns explain by (standard deviations) "
                     + ", ".join(f"{name} {scores[name]:+.2f}" for name in names)
                     + (f"; above {MAX_ASSOCIATION:g}: {', '.join(kept)} stay" if kept else ""))  # fmt: skip
        return [name for name in names if name not in kept]

    def _settings_without(self, names: Sequence[str]) -> Settings:
        return {WITHOUT: [*self._config.data.without, *names]}

    def _refine_evaluations(self) -> Settings:
        """Return the setting that evaluates within epochs if the first evaluation was the best, or no setting."""
        interval = self._config.train.eval_every_epochs
        if not self._overfits or INTERVAL not in self._free or interval is None:
            return {}
        self._decide("the first evaluation is the best, so trials have more regularization, and evaluate "
                     f"{INTERVALS_PER_EPOCH} times as often")  # fmt: skip
        return {INTERVAL: interval / INTERVALS_PER_EPOCH}

    def _try_changes(self, control: _Trial) -> list[_Trial]:
        """Train one trial per change until the first rung. Return the best one, and one with all improvements."""
        base = control.settings
        key = rate_key(self._free, has_tables=self._has_tables)
        changes = [] if key is None else self._search_rate(key, control)
        config, num_rows = with_settings(self._config, base), self._dataset.splits["train"].num_rows
        changes += single_changes(
            config, self._free, has_tables=self._has_tables, overfits=self._overfits, num_rows=num_rows
        )
        limit = self._rung_samples(self._rung)
        scored = []
        for change in changes:
            if (trial := self._try(control, change)) is not None:
                scored.append((self._score(self._value(trial, limit)), change, trial))
        scored.sort(key=lambda entry: -entry[0])
        reference = self._score(self._value(control, limit))
        better = [change for score, change, _ in scored if score > reference]
        finalists = [trial for _, _, trial in scored[:1]]
        merged = {**base, **merge(better)}
        if len(better) > 1 and merged != finalists[0].settings and self._can_spend(3 * _FIRST_RUNG_SHARE):
            finalists.append(self._train(merged, self._rung))
            self._decide(f"all improvements together: {self._describe(finalists[-1])}")
        return finalists

    def _search_rate(self, key: str, control: _Trial) -> list[Settings]:
        """Try both neighbours of the rate, and continue in the better direction while its edge wins. Return the changes
        that were tried."""
        rate = float(get_value(self._config.model_dump(mode="json"), key))
        limit = self._rung_samples(self._rung)
        changes: list[Settings] = []
        values = {0: self._value(control, limit)}

        def visit(place: int) -> bool:
            change = {key: scaled_rate(rate, place)}
            trial = self._try(control, change)
            if trial is None:
                return False
            changes.append(change)
            values[place] = self._value(trial, limit)
            return True

        if not (visit(-1) and visit(1)):
            return changes
        best = select_best([values[-1], values[0], values[1]], self._metric)
        direction = 0 if best is None else best - 1
        edge = direction
        while direction and abs(edge) <= MAX_RATE_EXTENSIONS and visit(edge + direction):
            if not is_better(values[edge + direction], values[edge], self._metric):
                break
            edge += direction
        self._decide(f"learning rate: {key}={scaled_rate(rate, edge):g} is the best of "
                     f"{', '.join(f'{scaled_rate(rate, place):g}' for place in sorted(values))}")  # fmt: skip
        return changes

    def _try(self, control: _Trial, change: Settings) -> _Trial | None:
        """Train the trial of `control` with a change until the first rung, and print it. Return `None` if the budget is
        spent."""
        settings = {**control.settings, **change}
        if (trial := self._find(settings)) is not None:
            return trial
        if not self._can_spend(_FIRST_RUNG_SHARE + (3 * _FIRST_RUNG_SHARE if self._overfits else _RESERVED_COST)):
            return None
        trial = self._train(settings, self._rung)
        limit = self._rung_samples(self._rung)
        text = " ".join(f"{key}={value}" for key, value in change.items())
        value, before = self._value(trial, limit), self._value(control, limit)
        gain = "" if value is None or before is None else f" ({value - before:+.{self._decimals}f})"
        result = self._describe(trial) if trial.result.problem else format_decimal(value, self._decimals) + gain
        self._decide(f"{text}: {result} after {limit:,} samples")
        return trial

    def _halve(self, first: _Trial, control: _Trial, finalists: list[_Trial]) -> _Trial:
        """Train the finalists and the control until the second rung. Train the best one to its end, and return it."""
        candidates = [*([] if control is first else [control]), *finalists]
        for trial in candidates:
            if self._can_spend(_FIRST_RUNG_SHARE):
                self._train(trial.settings, 2 * self._rung)
        limit = self._rung_samples(2 * self._rung)
        best = select_best([self._value(trial, limit) for trial in candidates], self._metric)
        if best is None:
            return first
        gain = self._score(self._value(candidates[best], limit)) - self._score(self._value(candidates[0], limit))
        # A change must be better than the control by more than a part of the noise.
        winner = candidates[best] if control is first or gain > self._margin(first) else control
        self._decide(f"best after {limit:,} samples: {self._change_text(winner)}")
        return self._train(winner.settings, None)

    def _select(self, first: _Trial, challenger: _Trial) -> _Trial:
        """Return the challenger if it is better than the first trial. If it leaves out columns, it only must not be
        worse beyond noise."""
        if challenger is first:
            return first
        value, before = self._value(challenger), self._value(first)
        gain, margin = self._score(value) - self._score(before), self._margin(first)
        evidence = f"a gain of {gain:+.{self._decimals}f}, of which {margin:.{self._decimals}f} may be noise"
        is_chosen = gain > margin
        if WITHOUT in challenger.settings:
            paths = self._runs.path(first.name), self._runs.path(challenger.name)
            compare = lambda: compare_runs(*paths, self._config, self._world).to_dict()  # noqa: E731
            change = PairedDifference(**self._runs.remember("winner", compare))
            is_chosen = is_chosen or (change.low <= 0 and gain > -margin)
            evidence += f"; the validation log loss changes by {change}"
        self._decide(f"{'chosen' if is_chosen else 'not chosen'}: {self._change_text(challenger)}, "
                     f"{self._describe(challenger)}, {evidence}")  # fmt: skip
        return challenger if is_chosen else first

    def _change_text(self, trial: _Trial) -> str:
        return " ".join(f"{key}={value}" for key, value in trial.settings.items()) or "the settings above"

    def _margin(self, trial: _Trial) -> float:
        """Return the gain below which two trials count as equal."""
        line, value = trial.result.evaluations[0], self._value(trial)
        num_rows, num_positives = line.num_samples or 1, line.num_positives or 0
        if value is None:
            return 0.0
        if self._metric in HIGHER_IS_BETTER:
            rarer = max(min(num_positives, num_rows - num_positives), 1)
            return _MARGIN * math.sqrt(max(value * (1 - value), 0.0) / rarer)
        return _MARGIN * value / math.sqrt(num_rows)

    def _score(self, value: float | None) -> float:
        """Return a number that is larger for better values, and the smallest one for undefined values."""
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if self._metric in HIGHER_IS_BETTER else -value

    def _rung_samples(self, num_evaluations: int) -> int:
        """Return the number of training samples until an evaluation of the first trial."""
        lines = self._trials[0].result.evaluations
        return lines[min(num_evaluations, len(lines)) - 1].num_samples_trained or 0

    def _find(self, settings: Settings) -> _Trial | None:
        return next((trial for trial in self._trials if trial.settings == settings), None)

    def _finish(self, winner: _Trial) -> RunConfig:
        keys = list(dict.fromkeys(key for trial in self._trials for key in trial.settings))
        entries = []
        for trial in self._trials:
            best = self._best_evaluation(trial)
            document = with_settings(self._config, trial.settings).model_dump(mode="json")
            settings = {key: get_value(document, key) for key in keys}
            line = EvalLine() if best is None else trial.result.evaluations[best]
            entry = trial_entry(settings, line, self._metric, self._task)
            extra = {"num_samples": trial.result.num_samples, "cost": round(self._cost(trial), 4)}
            entries.append(entry.model_copy(update={**extra, "problem": trial.result.problem}))
        selected = self._trials.index(winner)
        spent, verb = sum(map(self._cost, self._trials)), "continues as" if self._continues else "becomes"
        self._decide(f"spent {spent:.2f} of {self._config.train.search_budget:g} trainings; trial {selected + 1} of "
                     f"{len(self._trials)} {verb} the run")  # fmt: skip
        if note := describe_trade_off(entries, selected, self._metric):
            self._decide(note)
        record = TrialsRecord(
            metric=self._metric,
            split=VALID,
            selected=selected if len(entries) > 1 else None,
            trials=entries,
            decisions=tuple(self._decisions),
        )
        self._world.run_on_rank_0(lambda: RunDir(self._config.run_dir).write_json(TRIALS_FILE, record.to_dict()))
        self._runs.adopt(winner.name if self._continues else None)
        return with_settings(self._config, winner.settings)
