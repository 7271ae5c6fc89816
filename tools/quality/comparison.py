"""Result of a suite: scores of each config, and paired differences between configs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from tools.quality.intervals import CONFIDENCE_LEVEL, ConfidenceInterval, holm_adjust, t_interval


@dataclass(frozen=True)
class Metric:
    """Metric by which configs are compared."""

    key: str
    name: str
    is_higher_better: bool = False

    def to_loss(self, value: float) -> float:
        """Convert a value to a number that is smaller for better values."""
        return -value if self.is_higher_better else value


REGRET = Metric("regret", "regret")
COMPARED_METRICS = (REGRET, Metric("ne", "NE"), Metric("auc", "AUC", is_higher_better=True))
"""Metrics by which configs are compared, the most sensitive one first."""


class SeedScore(BaseModel):
    """Metrics on the test split, size and speed of one run with the selected settings."""

    model_config = ConfigDict(extra="allow", frozen=True)

    auc: float | None = None
    ne: float | None = None
    regret: float | None = None
    """Regret in nats. `None` if the true probabilities are unknown."""
    num_dense_parameters: int = 0
    num_table_parameters: int = 0
    flops_per_sample: float = 0.0
    """Floating-point operations of the dense part per sample of a training step, as the planner counts them."""
    samples_per_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return self.model_dump(exclude_unset=True)

    def metric_value(self, metric: Metric) -> float | None:
        """Return one of `COMPARED_METRICS`, or `None` if it is undefined on the test rows."""
        value: float | None = getattr(self, metric.key)
        return value


@dataclass(frozen=True, kw_only=True)
class ConfigScores:
    """Scores of one config on one world or dataset."""

    name: str
    scores: Mapping[int, SeedScore]
    """Seed -> score of its run. Failed runs are left out."""
    chosen_settings: Mapping[str, Any] = field(default_factory=dict)
    """Config key -> value that the trials selected."""

    def values_by_seed(self, metric: Metric) -> dict[int, float]:
        """Return a metric by seed. Seeds without a value are left out."""
        values = {seed: score.metric_value(metric) for seed, score in self.scores.items()}
        return {seed: value for seed, value in values.items() if value is not None}

    def mean(self, metric: Metric) -> float | None:
        """Return the mean of a metric over seeds, or `None` without values."""
        values = self.values_by_seed(metric).values()
        return statistics.fmean(values) if values else None

    @property
    def samples_per_s(self) -> float | None:
        """Median training speed over seeds."""
        speeds = [score.samples_per_s for score in self.scores.values() if score.samples_per_s is not None]
        return statistics.median(speeds) if speeds else None

    @property
    def any_score(self) -> SeedScore | None:
        """Score of one run, or `None` if all runs failed. Parameters and operations are equal in all runs."""
        return next(iter(self.scores.values()), None)


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Difference between a metric of two configs, paired by seed. Runs with the same seed use the same rows."""

    first: str
    """Config whose metric is the minuend."""
    second: str
    """Config whose metric is subtracted."""
    metric: Metric
    by_seed: Mapping[int, float]
    """Seed -> difference."""
    seed_interval: ConfidenceInterval
    """Confidence interval of the mean difference over seeds."""
    row_interval: ConfidenceInterval | None
    """Confidence interval over test rows, which are resampled identically for both configs. `None` if the true
    probabilities are known."""
    p_holm: float = 1.0
    """p-value with Holm's adjustment over all comparisons of the suite."""

    @property
    def p_value(self) -> float:
        """Unadjusted p-value over seeds, or over test rows if that is larger."""
        return max(self.seed_interval.p, 0.0 if self.row_interval is None else self.row_interval.p)

    @property
    def better_config(self) -> str | None:
        """Name of the significantly better config, or `None`."""
        if self.p_holm >= 1 - CONFIDENCE_LEVEL:
            return None
        return self.first if self.metric.to_loss(self.seed_interval.mean) < self.metric.to_loss(0.0) else self.second


@dataclass(frozen=True, kw_only=True)
class EvalDataset:
    """World or dataset on which configs are compared."""

    name: str
    world: str | None = None
    """Name of the world without its strength. `None` for a dataset."""
    strength: float | None = None
    """Factor on the effects planted in the world. `None` for a dataset."""
    facts: str = ""
    """Description, such as the number of rows."""
    best_reachable: Mapping[str, float] = field(default_factory=dict)
    """Metric key -> value of the true probabilities on the test rows, as mean over seeds. Empty for a dataset."""


@dataclass(frozen=True, kw_only=True)
class EvalDatasetResult:
    """Scores and differences on one world or dataset."""

    eval_dataset: EvalDataset
    configs: tuple[ConfigScores, ...]
    """Scores of all configs, in the order of the suite."""
    differences: tuple[PairedDifference, ...]

    @property
    def metrics(self) -> list[Metric]:
        """Metrics that at least one config has."""
        return [metric for metric in COMPARED_METRICS if any(config.values_by_seed(metric) for config in self.configs)]

    def paired_difference(self, name: str, other: str, metric: Metric) -> PairedDifference | None:
        """Return the metric of config `name` minus that of config `other`, or `None` if they were not compared."""
        for one in self.differences:
            if one.metric is metric and {one.first, one.second} == {name, other}:
                return one if one.first == name else reverse_difference(one)
        return None


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """Result of all runs of a suite."""

    name: str
    reference: str
    """Config with which charts and ratios compare the others."""
    num_trials: int
    """Number of trials per config."""
    num_seeds: int
    eval_datasets: tuple[EvalDatasetResult, ...]
    problems: tuple[str, ...]
    """Descriptions of the failed runs."""

    @property
    def num_comparisons(self) -> int:
        """Number of comparisons over which Holm's adjustment is computed."""
        return sum(len(one.differences) for one in self.eval_datasets)

    def strength_pairs(self) -> list[tuple[EvalDatasetResult, EvalDatasetResult]]:
        """Return pairs of results on the same world with different strengths. The weaker one is first in each pair."""
        pairs = []
        for one, other in itertools.combinations(self.eval_datasets, 2):
            if one.eval_dataset.world is not None and one.eval_dataset.world == other.eval_dataset.world:
                weaker, stronger = sorted((one, other), key=lambda g: g.eval_dataset.strength or 0.0)
                if weaker.eval_dataset.strength != stronger.eval_dataset.strength:
                    pairs.append((weaker, stronger))
        return pairs

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON. Bounds of intervals over a single seed are `None`."""
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
    """Return the difference with its configs swapped, and all values negated."""
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
"""(world or dataset, first config, second config, metric key) -> confidence interval over test rows."""


def compare_configs(
    grounds: Sequence[tuple[EvalDataset, Sequence[ConfigScores]]], over_rows: RowIntervals
) -> list[EvalDatasetResult]:
    """Compare each pair of configs on each world or dataset, by each metric and on the seeds that both have.

    Args:
        grounds: Each world or dataset with the scores of its configs.
        over_rows: Intervals over test rows, for datasets.

    Returns:
        One result per entry of `grounds`. The p-values are adjusted over all comparisons together.
    """
    compared = [_paired_differences(ground, configs, over_rows) for ground, configs in grounds]
    adjusted = iter(holm_adjust([one.p_value for differences in compared for one in differences]))
    return [
        EvalDatasetResult(
            eval_dataset=ground,
            configs=tuple(configs),
            differences=tuple(replace(one, p_holm=next(adjusted)) for one in differences),
        )
        for (ground, configs), differences in zip(grounds, compared, strict=True)
    ]


def _paired_differences(
    dataset: EvalDataset, configs: Sequence[ConfigScores], over_rows: RowIntervals
) -> list[PairedDifference]:
    differences = []
    for first, second in itertools.combinations(configs, 2):
        for metric in COMPARED_METRICS:
            minuends, subtrahends = first.values_by_seed(metric), second.values_by_seed(metric)
            # A seed for which one run failed cannot be paired.
            by_seed = {
                seed: minuends[seed] - subtrahends[seed] for seed in sorted(minuends.keys() & subtrahends.keys())
            }
            if by_seed:
                differences.append(
                    PairedDifference(
                        first=first.name,
                        second=second.name,
                        metric=metric,
                        by_seed=by_seed,
                        seed_interval=t_interval([*by_seed.values()]),
                        row_interval=over_rows.get((dataset.name, first.name, second.name, metric.key)),
                    )
                )
    return differences


def _eval_dataset_dict(outcome: EvalDatasetResult) -> dict[str, Any]:
    dataset = outcome.eval_dataset
    return {
        "name": dataset.name,
        "world": dataset.world,
        "strength": dataset.strength,
        "best_reachable": dict(dataset.best_reachable),
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
