"""Search of settings within a budget, by successive halving of trials on the validation split.

The first trial, with default settings, trains to its end. Its cost is the unit of the budget. Columns are left out if
permuting them does not increase its validation loss beyond noise, and they do not explain residuals of a trial without
them. Trials with one change train for a quarter (Jamieson and Talwalkar, AISTATS 2016), the best of them and all
improvements together for a half, and the best of these to its end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.load import get_value, with_values
from meseta.data.dataset.dataset import Dataset
from meseta.data.prepare.survey import MIN_VALID_ROWS
from meseta.data.schema.layout import NO_CATEGORY
from meseta.system.environment_variables import environ
from meseta.telemetry.detail import CurrentDetail
from meseta.telemetry.formatting import format_decimal
from meseta.telemetry.metrics import VALID
from meseta.telemetry.run_events import CALLBACKS_VARIABLE
from meseta.telemetry.summary import TRIALS_FILE, TrialsRecord
from meseta.train.importance import MAX_PREDICTIONS, PairedDifference
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
from meseta.train.search.choice import describe_trade_off, is_better, select_best
from meseta.train.search.columns import associate_columns, compare_runs, find_unhelpful_columns
from meseta.train.search.trials import PREDICTION_COST, SearchTrial, Trials

# Share of the evaluations of the first trial after which trials are compared first.
_FIRST_RUNG_SHARE = 0.25
# Part of the budget that is kept for trials with all improvements, and to their end.
_RESERVED_COST = 1.0
# Largest cost of measuring how much the loss increases if a column is permuted.
_MAX_IMPORTANCE_COST = 0.25
MAX_ASSOCIATION = 2.5
"""Association with residuals, in standard deviations, above which a column stays. It is exceeded by 0.6 % of noise
columns with many ids, and by up to 3 % of those with few."""


def search_settings(
    config: RunConfig, dataset: Dataset, free: Collection[str], world: World, *, continues: bool = True
) -> RunConfig:
    """Return `config` with the best values of its `free` keys in trials, by `train.early_stopping.metric`. Collective.

    The best trial becomes the run in run_dir, which resumes from it, unless `continues` is false. If the run has begun,
    its values are kept. Finished trials are not repeated. There is no search without budget, or with fewer than
    `MIN_VALID_ROWS` validation rows, because the best trial would be chosen by chance.
    """
    decided = world.broadcast_from_rank_0(lambda: _load_decisions(config, free))
    if decided is not None:
        return with_values(config, decided)
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
        self._trials = Trials(config, self._dataset, world)
        self._decisions: list[str] = []
        self._rung, self._overfits = 1, False
        self._has_tables = any(feature.name != NO_CATEGORY.name for feature in dataset.sparse)

    def run(self) -> RunConfig:
        trials = self._trials
        first = trials.train({}, None)
        best = trials.best_evaluation(first)
        budget = f"the budget is {self._config.train.search_budget:g} times its cost"
        self._decide(f"first trial, with the settings above: {trials.describe(first)}; {budget}")
        if best is None:
            return self._finish(first)
        self._rung = max(1, math.ceil(len(first.result.evaluations) * _FIRST_RUNG_SHARE))
        self._overfits = best == 0 and self._config.train.finish == "best"
        plain = self._leave_out_columns(first)
        base, control = {**plain.settings, **self._refine_evaluations()}, plain
        if trials.can_spend(trials.estimate_cost(base, self._rung)):
            control = trials.train(base, self._rung)
        if control.result.problem:
            control = plain
        if control is not first:
            self._decide(f"trial with these decisions: {trials.describe(control)}")
        # If the first evaluation is the best, the first trial and the one without columns have been compared.
        incumbent = plain if self._overfits else first
        finalists = self._try_changes(control)
        return self._finish(self._select(incumbent, self._halve(incumbent, control, finalists)))

    def _decide(self, text: str) -> None:
        self._decisions.append(text)
        _print(self._world, f"search: {text}")

    def _leave_out_columns(self, first: SearchTrial) -> SearchTrial:
        """Return the trial without columns that do not help until the first rung, or the first trial."""
        names = self._find_columns(first)
        if not names:
            return first
        trial = self._trials.train(self._settings_without(names), self._rung)
        if trial.result.problem:
            return first
        if self._overfits:
            change = self._compare(first, trial)
            verb = "stay" if change.low > 0 else "are left out"
            self._decide(f"{', '.join(names)} {verb}: without them the validation log loss changes by {change}")
            return first if change.low > 0 else trial
        return trial

    def _compare(self, trial: SearchTrial, other: SearchTrial) -> PairedDifference:
        path = self._trials.runs.path(trial.name)
        comparison = self._trials.collect_evidence(
            f"{trial.name}-{other.name}", other, lambda other: compare_runs(path, other, self._config, self._world)
        )
        return PairedDifference(**comparison)

    def _find_columns(self, first: SearchTrial) -> list[str]:
        cost = _MAX_IMPORTANCE_COST + 2 * self._trials.estimate_cost({WITHOUT: []}, self._rung)
        if WITHOUT not in self._free or not self._trials.can_spend(cost):
            return []
        max_predictions = min(MAX_PREDICTIONS, int(first.result.num_samples * _MAX_IMPORTANCE_COST / PREDICTION_COST))
        arguments = self._config, self._dataset, self._world, max_predictions
        unhelpful = self._trials.collect_evidence(
            "columns", first, lambda path: find_unhelpful_columns(path, *arguments)
        )
        if not unhelpful:
            self._decide("all columns are kept: permuting any of them increases the validation loss beyond noise")
            return []
        intervals = ", ".join(f"{one['name']} {one['low']:+.5f} to {one['high']:+.5f}" for one in unhelpful)
        self._decide("permuting these columns does not increase the validation log loss beyond noise "
                     f"(95 % intervals): {intervals}")  # fmt: skip
        return self._remove_associated([one["name"] for one in unhelpful])

    def _remove_associated(self, names: Sequence[str]) -> list[str]:
        """Return the `names` that are not associated with the residuals of a trial without them."""
        trial = self._trials.train(self._settings_without(names), self._rung)
        if trial.result.problem:
            return []
        arguments = self._config, self._dataset, names, self._world
        scores = self._trials.collect_evidence("association", trial, lambda path: associate_columns(path, *arguments))
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

    @property
    def _rung_samples(self) -> int:
        return self._trials.rung_samples(self._rung)

    def _try_changes(self, control: SearchTrial) -> list[SearchTrial]:
        """Train one trial per change until the first rung. Return the best one, and one with all improvements."""
        trials, base = self._trials, control.settings
        key = rate_key(self._free, has_tables=self._has_tables)
        changes = [] if key is None else self._search_rate(key, control)
        config, num_rows = with_values(self._config, base), self._dataset.splits["train"].num_rows
        changes += single_changes(
            config, self._free, has_tables=self._has_tables, overfits=self._overfits, num_rows=num_rows
        )
        scored = []
        for change in changes:
            if (trial := self._try(control, change)) is not None:
                scored.append((trials.score(trial, self._rung_samples), change, trial))
        scored.sort(key=lambda entry: -entry[0])
        reference = trials.score(control, self._rung_samples)
        better = [change for score, change, _ in scored if score > reference]
        finalists = [trial for _, _, trial in scored[:1]]
        merged = {**base, **merge(better)}
        cost = trials.estimate_cost(merged, self._rung) + 2 * _FIRST_RUNG_SHARE
        if len(better) > 1 and merged != finalists[0].settings and trials.can_spend(cost):
            finalists.append(trials.train(merged, self._rung))
            self._decide(f"all improvements together: {trials.describe(finalists[-1])}")
        return finalists

    def _search_rate(self, key: str, control: SearchTrial) -> list[Settings]:
        """Try both neighbours of the rate, and continue in the better direction while its edge wins. Return the changes
        that were tried."""
        rate = float(get_value(self._config.model_dump(mode="json"), key))
        metric, changes = self._trials.metric, list[Settings]()
        values = {0: self._trials.value(control, self._rung_samples)}

        def visit(place: int) -> bool:
            change = {key: scaled_rate(rate, place)}
            trial = self._try(control, change)
            if trial is None:
                return False
            changes.append(change)
            values[place] = self._trials.value(trial, self._rung_samples)
            return True

        if not (visit(-1) and visit(1)):
            return changes
        best = select_best([values[-1], values[0], values[1]], metric)
        direction = 0 if best is None else best - 1
        edge = direction
        while direction and abs(edge) <= MAX_RATE_EXTENSIONS and visit(edge + direction):
            if not is_better(values[edge + direction], values[edge], metric):
                break
            edge += direction
        self._decide(f"learning rate: {key}={scaled_rate(rate, edge):g} is the best of "
                     f"{', '.join(f'{scaled_rate(rate, place):g}' for place in sorted(values))}")  # fmt: skip
        return changes

    def _try(self, control: SearchTrial, change: Settings) -> SearchTrial | None:
        """Train the trial of `control` with a change until the first rung, and print it. Return `None` if the budget is
        spent."""
        trials, settings = self._trials, {**control.settings, **change}
        if (trial := trials.find(settings)) is not None:
            return trial
        reserve = 3 * _FIRST_RUNG_SHARE if self._overfits else _RESERVED_COST
        if not trials.can_spend(trials.estimate_cost(settings, self._rung) + reserve):
            return None
        trial = trials.train(settings, self._rung)
        text = " ".join(f"{key}={value}" for key, value in change.items())
        value, before = trials.value(trial, self._rung_samples), trials.value(control, self._rung_samples)
        gain = "" if value is None or before is None else f" ({value - before:+.{trials.decimals}f})"
        result = trials.describe(trial) if trial.result.problem else format_decimal(value, trials.decimals) + gain
        self._decide(f"{text}: {result} after {self._rung_samples:,} samples")
        return trial

    def _halve(self, incumbent: SearchTrial, control: SearchTrial, finalists: list[SearchTrial]) -> SearchTrial:
        """Train the finalists and the control until the second rung. Train the best one to its end, as far as the
        budget allows, and return it."""
        trials = self._trials
        is_new = control is not incumbent
        candidates = [control, *finalists] if is_new else finalists
        for trial in candidates:
            if trials.can_spend(trials.estimate_cost(trial.settings, 2 * self._rung)):
                trials.train(trial.settings, 2 * self._rung)
        num_samples = trials.rung_samples(2 * self._rung)
        best = select_best([trials.value(trial, num_samples) for trial in candidates], trials.metric)
        if best is None:
            return incumbent
        gain = trials.score(candidates[best], num_samples) - trials.score(candidates[0], num_samples)
        # A change must be better than the control by more than a part of the noise.
        winner = candidates[best] if not is_new or gain > trials.margin() else control
        self._decide(f"best after {num_samples:,} samples: {_describe_change(winner)}")
        trials.train_to_end(winner, 2 * self._dataset.splits[VALID].num_rows)  # The predictions of `_compare`.
        return winner

    def _select(self, incumbent: SearchTrial, challenger: SearchTrial) -> SearchTrial:
        """Return the challenger if it is better than the incumbent. If it leaves out more columns, it only must not be
        worse beyond noise."""
        trials = self._trials
        if challenger is incumbent:
            return incumbent
        gain, margin = trials.score(challenger) - trials.score(incumbent), trials.margin()
        evidence = f"a gain of {gain:+.{trials.decimals}f}, of which {margin:.{trials.decimals}f} may be noise"
        is_chosen = gain > margin
        if challenger.settings.get(WITHOUT) != incumbent.settings.get(WITHOUT):
            change = self._compare(incumbent, challenger)
            is_chosen = is_chosen or (change.low <= 0 and gain > -margin)
            evidence += f"; the validation log loss changes by {change}"
        self._decide(f"{'chosen' if is_chosen else 'not chosen'}: {_describe_change(challenger)}, "
                     f"{trials.describe(challenger)}, {evidence}")  # fmt: skip
        return challenger if is_chosen else incumbent

    def _finish(self, winner: SearchTrial) -> RunConfig:
        trials, entries = self._trials, self._trials.entries()
        selected, verb = trials.index(winner), "continues as" if self._continues else "becomes"
        self._decide(f"spent {trials.spent:.2f} of {self._config.train.search_budget:g} trainings, "
                     f"{trials.evidence_cost:.2f} for evidence about columns; trial {selected + 1} of {len(trials)} "
                     f"{verb} the run")  # fmt: skip
        if note := describe_trade_off(entries, selected, trials.metric):
            self._decide(note)
        record = TrialsRecord(
            metric=trials.metric,
            split=VALID,
            selected=selected if len(entries) > 1 else None,
            trials=entries,
            decisions=tuple(self._decisions),
        )
        self._world.run_on_rank_0(lambda: RunDir(self._config.run_dir).write_json(TRIALS_FILE, record.to_dict()))
        trials.runs.adopt(winner.name if self._continues else None)
        return with_values(self._config, winner.settings)


def _describe_change(trial: SearchTrial) -> str:
    return " ".join(f"{key}={value}" for key, value in trial.settings.items()) or "the settings above"
