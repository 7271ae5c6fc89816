"""Comparison of runs: metrics, measurements and differences, for pages and terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meseta.checkpoint import list_checkpoints
from meseta.config.load import checkpoint_location
from meseta.errors import StorageError
from meseta.report.differences import (
    FactDifference,
    config_facts,
    data_facts,
    environment_facts,
    find_differences,
    plan_facts,
    split_facts,
)
from meseta.report.headline import Headline, final_evaluation, headline
from meseta.report.record import RUN_FILES, RunRecord, read_run
from meseta.report.stages import mean_stages_s
from meseta.spec import MesetaError
from meseta.telemetry.formatting import format_decimal, is_drawable
from meseta.telemetry.metrics import METRICS, Metric, metrics_in
from meseta.telemetry.metrics_file import EvalMetrics
from meseta.telemetry.splits import EVALUATED_SPLITS, TEST, VALID, validation_split
from meseta.telemetry.summary import SUMMARY_FILE


class EvaluationPart(NamedTuple):
    """Samples and labels of an evaluation for which metrics are computed."""

    kind: Literal["all", "label", "segment"]
    name: str = ""
    """Name of the label, or feature and value of the segment. The label follows if there are several."""

    @property
    def text(self) -> str:
        """Display name of the part, and its key in JSON."""
        return f"label {self.name}" if self.kind == "label" else self.name


OVERALL = EvaluationPart("all")


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoint:
    """The newest checkpoint of a run."""

    path: str
    step: int
    checksum: str | None
    """Checksum of the model, equal for runs that ended with the same bits. `None` for a delta checkpoint."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """Run of a comparison, with the contents of its run folder."""

    label: str
    """Name of the run folder, or its path if several runs have the same name."""
    path: Path
    record: RunRecord
    headline: Headline
    newest_checkpoint: NewestCheckpoint | None
    stages_s: dict[str, float]
    """Mean seconds per step of each stage on rank 0."""

    @property
    def curve_split(self) -> str:
        """Split that was evaluated during training."""
        return validation_split({line.split for line in self.record.eval_lines})

    @property
    def metrics_by_part(self) -> dict[EvaluationPart, EvalMetrics]:
        """Metrics of the final evaluation, over all samples and by label and segment. Empty without an evaluation."""
        line = self.headline.evaluation
        if line is None:
            return {}
        parts: dict[EvaluationPart, EvalMetrics] = {OVERALL: line}
        parts |= {EvaluationPart("label", name): metrics for name, metrics in line.tasks.items()}
        for feature, segments in line.segments.items():
            for segment in segments:
                name = f"{feature} {'others' if segment.value is None else segment.value}"
                # With several labels, a segment has one part per label.
                tasks = {f"{name}, {task}": metrics for task, metrics in segment.tasks.items()} or {name: segment}
                parts |= {EvaluationPart("segment", text): metrics for text, metrics in tasks.items()}
        return parts

    @property
    def stages_ms_per_1000_samples(self) -> dict[str, float]:
        """Milliseconds per 1,000 samples of each stage. Empty if the numbers of steps and samples are unknown."""
        # Runs with different batch sizes cannot be compared by their times per step.
        if not self.headline.num_samples or not self.headline.num_steps:
            return {}
        per_step = self.headline.num_samples / self.headline.num_steps
        return {name: seconds * 1e6 / per_step for name, seconds in self.stages_s.items()}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs and their differences. Differences of metrics refer to the first run."""

    runs: tuple[ComparedRun, ...]
    split: str
    """Split of the compared metrics: valid if all runs were evaluated on valid but not all on test, otherwise test."""
    metrics: tuple[Metric, ...]
    """The main metrics, and all others that at least one run has."""
    config: tuple[FactDifference, ...]
    data: tuple[FactDifference, ...]
    plan: tuple[FactDifference, ...]
    environment: tuple[FactDifference, ...]
    notes: tuple[str, ...]
    """Notes about unfinished runs, missing files, and values that cannot be compared."""

    @property
    def part_names(self) -> list[EvaluationPart]:
        """Parts that at least one run was evaluated on, except `OVERALL`."""
        return [
            part for part in dict.fromkeys(part for run in self.runs for part in run.metrics_by_part) if part != OVERALL
        ]

    def value(self, metric: Metric, run: ComparedRun, part: EvaluationPart = OVERALL) -> float | None:
        """Return a metric of a run's final evaluation, or `None` if it has no such part or metric."""
        return metric.value_in(run.metrics_by_part.get(part))

    def difference(self, metric: Metric, run: ComparedRun, part: EvaluationPart = OVERALL) -> float | None:
        """Return the metric of `run` minus that of the first run, or `None` if one is missing."""
        value, first = self.value(metric, run, part), self.value(metric, self.runs[0], part)
        return None if value is None or first is None else value - first

    def is_comparable(self, run: ComparedRun) -> bool:
        """Whether a run was evaluated on the same rows as the first run. Unknown datasets count as equal."""
        return not find_differences([self.runs[0].record, run.record], partial(split_facts, split=self.split))

    def best_value(self, metric: Metric, part: EvaluationPart = OVERALL) -> float | None:
        """Return the best value among the comparable runs, or `None` if the values do not differ."""
        values = [
            v for run in self.runs if self.is_comparable(run) and (v := self.value(metric, run, part)) is not None
        ]
        return min(values, key=metric.to_loss) if len(set(values)) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON. Each difference has a list of values in the order of the runs."""
        runs = [
            {
                "name": run.label,
                "path": str(run.path),
                "is_finished": run.headline.is_done,
                "num_steps": run.headline.num_steps,
                "num_samples": run.headline.num_samples,
                "num_ranks": run.headline.num_ranks,
                "train_s": run.headline.train_s,
                "samples_per_s": run.headline.samples_per_s,
                "stages_s": run.stages_s,
                "evaluated_at_step": run.headline.evaluation.step if run.headline.evaluation else None,
                "metrics": {m.key: self.value(m, run) for m in self.metrics},
                "differences": {m.key: self.difference(m, run) for m in self.metrics},
                "parts": {
                    part.text: {m.key: self.value(m, run, part) for m in self.metrics}
                    for part in run.metrics_by_part
                    if part != OVERALL
                },
                "checkpoint": vars(run.newest_checkpoint) if run.newest_checkpoint else None,
            }
            for run in self.runs
        ]
        parts = {"config": self.config, "data": self.data, "plan": self.plan, "environment": self.environment}
        differing = {name: {row.name: list(row.values) for row in rows} for name, rows in parts.items()}
        return {"split": self.split, "runs": runs, "differences": differing, "notes": list(self.notes)}


def compare_runs(run_dirs: Sequence[Path]) -> Comparison:
    """Read run folders and compare the runs. The runs may be unfinished, and may use different data.

    Conditions under which values cannot be compared are added as notes. Raises MesetaError if a folder contains no run
    or is listed twice, or StorageError if a checkpoint cannot be read.
    """
    paths = [Path(path) for path in run_dirs]
    records = [read_run(path) for path in paths]
    # Prefer the first split on which all runs were evaluated. Trials of a sweep, for example, are evaluated on valid.
    split = next((s for s in EVALUATED_SPLITS if all(final_evaluation(record, [s]) for record in records)), TEST)
    splits = EVALUATED_SPLITS if split == TEST else [split]
    runs = tuple(_compared_run(*one, splits) for one in zip(paths, _run_labels(paths), records, strict=True))
    return Comparison(
        runs=runs,
        split=split,
        metrics=tuple(metrics_in(metrics for run in runs for metrics in run.metrics_by_part.values())),
        config=tuple(find_differences(records, config_facts)),
        data=tuple(find_differences(records, data_facts)),
        plan=tuple(find_differences(records, plan_facts)),
        environment=tuple(find_differences(records, environment_facts)),
        notes=(*_run_notes(runs), *_comparability_notes(runs, split), *_test_split_notes(runs, split)),
    )


def _compared_run(path: Path, label: str, record: RunRecord, splits: Sequence[str]) -> ComparedRun:
    head = headline(record, splits)
    return ComparedRun(
        label=label,
        path=path,
        record=record,
        headline=head,
        newest_checkpoint=_find_newest_checkpoint(path),
        stages_s=mean_stages_s(record),
    )


def _run_labels(paths: Sequence[Path]) -> list[str]:
    resolved = [path.resolve() for path in paths]
    for path, place in zip(paths, resolved, strict=True):
        if resolved.count(place) > 1:
            raise MesetaError(f"report: run {str(path)!r} is listed twice; list each run once")
    names = [place.name for place in resolved]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]


def _find_newest_checkpoint(run_dir: Path) -> NewestCheckpoint | None:
    """Return the newest undamaged checkpoint, or `None`. Raises StorageError if a checkpoint cannot be read."""
    try:
        checkpoints = list_checkpoints(checkpoint_location(run_dir))
    except StorageError:
        raise
    except MesetaError:
        return None
    # Damaged checkpoints are skipped, because `meseta checkpoint` reports them.
    for listed in reversed(checkpoints):
        if not listed.is_readable:
            # This checkpoint may be the newest one, so an older one must not be returned.
            raise StorageError(listed.problem)
        if (summary := listed.summary) is not None:
            path, step = str(summary.path), summary.step
            return NewestCheckpoint(path=path, step=step, checksum=summary.checksum, num_bytes=summary.num_bytes)
    return None


def _run_notes(runs: Sequence[ComparedRun]) -> list[str]:
    notes = []
    for run in runs:
        record = run.record
        if record.is_unfinished:
            at = (
                f"its metrics are preliminary, up to step {record.train_lines[-1].step:,}"
                if record.train_lines
                else "it has logged no step"
            )
            notes.append(f"{run.label} has not ended, or was interrupted: {at}.")
        if run.headline.evaluation is None:
            notes.append(f"{run.label} has no evaluation yet, so it has no metrics here.")
        missing = [name for name in RUN_FILES if name in record.problems]
        # The note about the unfinished run already explains the missing summary.
        if record.is_unfinished:
            missing.remove(SUMMARY_FILE)
        notes += [f"{run.label}, {name}: {record.problems[name].text}." for name in missing]
    return notes


def _test_split_notes(runs: Sequence[ComparedRun], split: str) -> list[str]:
    """Return notes about test metrics that only some runs have, if the runs are compared on the validation split."""
    notes = [f"Metrics are computed on the split {VALID}, on which models were selected."] if split == VALID else []
    for run in runs if notes else ():
        if line := final_evaluation(run.record, [TEST]):
            metrics = ", ".join(
                f"{m.name} {format_decimal(m.value_in(line), m.decimals)}" for m in METRICS if m.is_main
            )
            notes.append(f"{run.label} on {TEST}, at step {line.step:,}: {metrics}.")
    return notes


def _comparability_notes(runs: Sequence[ComparedRun], split: str) -> list[str]:
    """Return reasons why differences between runs may not be caused by their configs."""
    first, notes = runs[0], []
    evaluated = partial(split_facts, split=split)
    others = [run for run in runs[1:] if find_differences([first.record, run.record], evaluated)]
    if others:
        notes.append(
            f"{_join_labels(others)} {_was_or_were(others)} evaluated on other rows than {first.label}: their metrics "
            f"cannot be compared."
        )
    # Runs that were evaluated on other rows have already been reported.
    others = [run for run in runs[1:] if run not in others and find_differences([first.record, run.record], data_facts)]
    if others:
        notes.append(
            f"{_join_labels(others)} {_was_or_were(others)} trained on other data than {first.label}: see section Data."
        )
    samples = first.headline.num_samples
    others = [r for r in runs[1:] if samples and r.headline.num_samples and r.headline.num_samples != samples]
    if others:
        notes.append(
            f"{_join_labels(others)} {_was_or_were(others)} trained on another number of samples than {first.label}."
        )
    machines = ("processor", "device", "num_cores")
    others = [
        run
        for run in runs[1:]
        if any(row.name in machines for row in find_differences([first.record, run.record], environment_facts))
    ]
    if others:
        notes.append(
            f"{_join_labels(others)} {_was_or_were(others)} trained with another processor, device or number of cores "
            f"than {first.label}: their speeds cannot be compared."
        )
    return notes


def _join_labels(runs: Sequence[ComparedRun]) -> str:
    names = [run.label for run in runs]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _was_or_were(runs: Sequence[ComparedRun]) -> str:
    return "was" if len(runs) == 1 else "were"


def speed_ratio(run: ComparedRun, first: ComparedRun) -> float | None:
    """Return the samples per second of `run` divided by those of `first`, or `None` if one is unknown."""
    rate, base = run.headline.samples_per_s, first.headline.samples_per_s
    return rate / base if rate is not None and base and is_drawable(rate) and is_drawable(base) else None
