"""What the trainings of a suite have shown: figures of each config, and the paired difference of each two."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meseta.report.quality.statistics import CONFIDENCE_LEVEL, ConfidenceInterval, holm_adjust, t_interval
from meseta.telemetry.metrics import METRICS, Metric
from meseta.telemetry.metrics_file import Count, Entry

REGRET = Metric(key="regret", name="regret", better_direction="lower", decimals=5)
COMPARED_METRICS = (REGRET, *(metric for key in ("ne", "auc") for metric in METRICS if metric.key == key))
"""Figures that configs are compared by, that which tells most first."""


class SeedScore(Entry):
    """What one training, of the settings chosen, has come to on the test split."""

    auc: float | None = None
    ne: float | None = None
    regret: float | None = None
    """None where the true probabilities are not known."""
    num_dense_parameters: Count = 0
    num_table_parameters: Count = 0
    flops_per_sample: float = 0.0
    """Of a training step's dense part, as the planner counts them."""
    samples_per_s: float | None = None

    def metric_value(self, metric: Metric) -> float | None:
        """One of QUALITY; None where the rows do not define it."""
        value: float | None = getattr(self, metric.key)
        return value


@dataclass(frozen=True, kw_only=True)
class ConfigScores:
    """One config on one ground, over seeds."""

    name: str
    scores: Mapping[int, SeedScore]
    """By seed; those that have failed are not there."""
    chosen_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that its trials have chosen, by key."""

    def values_by_seed(self, metric: Metric) -> dict[int, float]:
        """By seed, where there is one."""
        found = {seed: score.metric_value(metric) for seed, score in self.scores.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, metric: Metric) -> float | None:
        """Over seeds; None without any."""
        values = self.values_by_seed(metric).values()
        return statistics.fmean(values) if values else None

    @property
    def samples_per_s(self) -> float | None:
        """The median over seeds."""
        speeds = [score.samples_per_s for score in self.scores.values() if score.samples_per_s is not None]
        return statistics.median(speeds) if speeds else None

    @property
    def any_score(self) -> SeedScore | None:
        """One of them: parameters and operations are the same in all."""
        return next(iter(self.scores.values()), None)


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """A figure of one config less that of another on the same seeds, hence the same rows."""

    first: str
    second: str
    metric: Metric
    by_seed: Mapping[int, float]
    seed_interval: ConfidenceInterval
    row_interval: ConfidenceInterval | None
    """Of the test rows drawn anew, the same for both; None where true probabilities are known."""
    p_holm: float = 1.0
    """Adjusted over all comparisons of the suite."""

    @property
    def p_value(self) -> float:
        """Of chance in training, and, where labels are all that is known, of chance in the rows: the larger of both."""
        return max(self.seed_interval.p, 0.0 if self.row_interval is None else self.row_interval.p)

    @property
    def better_config(self) -> str | None:
        """The config that is better; None where that is not shown."""
        if self.p_holm >= 1 - CONFIDENCE_LEVEL:
            return None
        return self.first if self.metric.to_loss(self.seed_interval.mean) < self.metric.to_loss(0.0) else self.second


@dataclass(frozen=True, kw_only=True)
class EvalDataset:
    """What configs were compared on: a world, or a dataset."""

    name: str
    world: str | None = None
    """Its name without strength; None of a dataset."""
    strength: float | None = None
    facts: str = ""
    """Rows and the like, for people."""
    best_reachable: Mapping[str, float] = field(default_factory=dict)
    """Mean over seeds of the true probabilities' own figures on the test rows, by metric; empty of a dataset."""


@dataclass(frozen=True, kw_only=True)
class EvalDatasetResult:
    """All of one ground."""

    eval_dataset: EvalDataset
    configs: tuple[ConfigScores, ...]
    """In the order of the suite."""
    differences: tuple[PairedDifference, ...]

    @property
    def metrics(self) -> list[Metric]:
        """Those that some config has."""
        return [metric for metric in COMPARED_METRICS if any(config.values_by_seed(metric) for config in self.configs)]

    def paired_difference(self, name: str, other: str, metric: Metric) -> PairedDifference | None:
        """The comparison of two configs in this order, turned round where it was made in the other."""
        for one in self.differences:
            if one.metric is metric and {one.first, one.second} == {name, other}:
                return one if one.first == name else reverse_difference(one)
        return None


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """All of a suite."""

    name: str
    reference: str
    """The config that others are drawn beside."""
    num_trials: int
    """Of each config."""
    num_seeds: int
    eval_datasets: tuple[EvalDatasetResult, ...]
    problems: tuple[str, ...]
    """What has failed, in words."""

    @property
    def num_comparisons(self) -> int:
        """The family that Holm's correction is over."""
        return sum(len(one.differences) for one in self.eval_datasets)

    def strength_pairs(self) -> list[tuple[EvalDatasetResult, EvalDatasetResult]]:
        """Grounds of one world, the weaker first."""
        found = []
        for one, other in itertools.combinations(self.eval_datasets, 2):
            if one.eval_dataset.world is not None and one.eval_dataset.world == other.eval_dataset.world:
                weaker, stronger = sorted((one, other), key=lambda g: g.eval_dataset.strength or 0.0)
                if weaker.eval_dataset.strength != stronger.eval_dataset.strength:
                    found.append((weaker, stronger))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what one seed does not bound is None."""
        return {
            "suite": self.name,
            "reference": self.reference,
            "num_trials": self.num_trials,
            "num_seeds": self.num_seeds,
            "num_comparisons": self.num_comparisons,
            "grounds": [_eval_dataset_dict(one) for one in self.eval_datasets],
            "problems": list(self.problems),
        }


def reverse_difference(difference: PairedDifference) -> PairedDifference:
    """The same of the second config less the first."""
    return PairedDifference(
        first=difference.second,
        second=difference.first,
        metric=difference.metric,
        by_seed={seed: -value for seed, value in difference.by_seed.items()},
        seed_interval=difference.seed_interval.negated(),
        row_interval=difference.row_interval and difference.row_interval.negated(),
        p_holm=difference.p_holm,
    )


RowIntervals = Mapping[tuple[str, str, str, str], ConfidenceInterval]
"""(ground, first, second, key of the metric) -> interval over rows."""


def compare_configs(
    grounds: Sequence[tuple[EvalDataset, Sequence[ConfigScores]]], over_rows: RowIntervals
) -> list[EvalDatasetResult]:
    """Every pair of configs of each ground by each figure that both have, on the seeds that both have; adjusted over
    all of them together."""
    found = [_paired_differences(ground, configs, over_rows) for ground, configs in grounds]
    adjusted = iter(holm_adjust([one.p_value for differences in found for one in differences]))
    return [
        EvalDatasetResult(
            eval_dataset=ground,
            configs=tuple(configs),
            differences=tuple(PairedDifference(**{**vars(one), "p_holm": next(adjusted)}) for one in differences),
        )
        for (ground, configs), differences in zip(grounds, found, strict=True)
    ]


def _paired_differences(
    ground: EvalDataset, configs: Sequence[ConfigScores], over_rows: RowIntervals
) -> list[PairedDifference]:
    found = []
    for first, second in itertools.combinations(configs, 2):
        for metric in COMPARED_METRICS:
            mine, theirs = first.values_by_seed(metric), second.values_by_seed(metric)
            by_seed = {seed: mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())}
            if by_seed:
                found.append(
                    PairedDifference(
                        first=first.name,
                        second=second.name,
                        metric=metric,
                        by_seed=by_seed,
                        seed_interval=t_interval([*by_seed.values()]),
                        row_interval=over_rows.get((ground.name, first.name, second.name, metric.key)),
                    )
                )
    return found


def _eval_dataset_dict(outcome: EvalDatasetResult) -> dict[str, Any]:
    ground = outcome.eval_dataset
    return {
        "name": ground.name,
        "world": ground.world,
        "strength": ground.strength,
        "best_reachable": dict(ground.best_reachable),
        "configs": {
            config.name: {
                "chosen": dict(config.chosen_settings),
                **{metric.key: config.mean(metric) for metric in outcome.metrics},
                "samples_per_s": config.samples_per_s,
                "seeds": {str(seed): score.to_dict() for seed, score in config.scores.items()},
            }
            for config in outcome.configs
        },
        "differences": [
            {
                "first": one.first,
                "second": one.second,
                "metric": one.metric.key,
                "by_seed": {str(seed): value for seed, value in one.by_seed.items()},
                "over_seeds": one.seed_interval.to_dict(),
                "over_rows": one.row_interval and one.row_interval.to_dict(),
                "p_holm": one.p_holm,
                "better": one.better_config,
            }
            for one in outcome.differences
        ],
    }
