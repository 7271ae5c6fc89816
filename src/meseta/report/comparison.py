"""Runs side by side, as plain figures; pages and terminals show them."""

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
    """Samples and labels of an evaluation that metrics are computed on."""

    kind: Literal["all", "label", "segment"]
    name: str = ""
    """Name of the label, or feature and value of the segment with the label if there are several."""

    @property
    def text(self) -> str:
        """The part as a person reads it, and its key in JSON."""
        return f"label {self.name}" if self.kind == "label" else self.name


OVERALL = EvaluationPart("all")


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoint:
    """The newest checkpoint of a run."""

    path: str
    step: int
    checksum: str | None
    """Names the model: equal where two runs ended with the same bits; None of a delta."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of the runs."""

    label: str
    """Its directory's name, or its path where two runs share a name."""
    path: Path
    record: RunRecord
    headline: Headline
    newest_checkpoint: NewestCheckpoint | None
    stages_s: dict[str, float]
    """Seconds per step of each stage on rank 0."""

    @property
    def curve_split(self) -> str:
        """The split that was evaluated on the way."""
        return validation_split({line.split for line in self.record.eval_lines})

    @property
    def metrics_by_part(self) -> dict[EvaluationPart, EvalMetrics]:
        """The figures of the last evaluation: of WHOLE, and of its labels and segments where it has those."""
        line = self.headline.evaluation
        if line is None:
            return {}
        parts: dict[EvaluationPart, EvalMetrics] = {OVERALL: line}
        parts |= {EvaluationPart("label", name): figures for name, figures in line.tasks.items()}
        for feature, segments in line.segments.items():
            for segment in segments:
                name = f"{feature} {'others' if segment.value is None else segment.value}"
                tasks = {f"{name}, {task}": figures for task, figures in segment.tasks.items()} or {name: segment}
                parts |= {EvaluationPart("segment", text): figures for text, figures in tasks.items()}
        return parts

    @property
    def stages_ms_per_1000_samples(self) -> dict[str, float]:
        """The stages in a unit that does not depend on the batch size; empty where the run's size is not known."""
        if not self.headline.num_samples or not self.headline.num_steps:
            return {}
        per_step = self.headline.num_samples / self.headline.num_steps
        return {name: seconds * 1e6 / per_step for name, seconds in self.stages_s.items()}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs, and what differs between them; differences of metrics are to the first run."""

    runs: tuple[ComparedRun, ...]
    split: str
    """Of the figures: test, or valid where not all runs have been evaluated on test, but all on valid."""
    metrics: tuple[Metric, ...]
    """Those that at least one run has, and the main ones."""
    config: tuple[FactDifference, ...]
    data: tuple[FactDifference, ...]
    plan: tuple[FactDifference, ...]
    environment: tuple[FactDifference, ...]
    notes: tuple[str, ...]
    """What a reader must know before believing a difference."""

    @property
    def part_names(self) -> list[EvaluationPart]:
        """All parts that at least one run was evaluated on, WHOLE apart."""
        return [
            part for part in dict.fromkeys(part for run in self.runs for part in run.metrics_by_part) if part != OVERALL
        ]

    def value(self, metric: Metric, run: ComparedRun, part: EvaluationPart = OVERALL) -> float | None:
        """A metric of a run's last evaluation, or of a part of it."""
        return metric.value_in(run.metrics_by_part.get(part))

    def difference(self, metric: Metric, run: ComparedRun, part: EvaluationPart = OVERALL) -> float | None:
        """`value` less that of the first run; None where one is missing."""
        mine, first = self.value(metric, run, part), self.value(metric, self.runs[0], part)
        return None if mine is None or first is None else mine - first

    def is_comparable(self, run: ComparedRun) -> bool:
        """Whether a run was evaluated on the same rows as the first one, as far as is known."""
        return not find_differences([self.runs[0].record, run.record], partial(split_facts, split=self.split))

    def best_value(self, metric: Metric, part: EvaluationPart = OVERALL) -> float | None:
        """The best value among runs that were evaluated on the same rows as the first; None where all have the same."""
        values = [
            v for run in self.runs if self.is_comparable(run) and (v := self.value(metric, run, part)) is not None
        ]
        return min(values, key=metric.to_loss) if len(set(values)) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: one entry per run, and one list of values per difference, in the order of the runs."""
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
    """Read runs, finished or not, of whatever data; what makes their figures unlike is among the notes.

    Raises MesetaError for a directory that is not a run's, and one that is given twice.
    """
    paths = [Path(path) for path in run_dirs]
    records = [read_run(path) for path in paths]
    split = next((s for s in EVALUATED_SPLITS if all(final_evaluation(record, [s]) for record in records)), TEST)
    splits = EVALUATED_SPLITS if split == TEST else [split]
    runs = tuple(_compared_run(*one, splits) for one in zip(paths, _run_labels(paths), records, strict=True))
    return Comparison(
        runs=runs,
        split=split,
        metrics=tuple(metrics_in(figures for run in runs for figures in run.metrics_by_part.values())),
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
            raise MesetaError(f"report: run {str(path)!r} is given twice; name it once")
    names = [place.name for place in resolved]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]


def _find_newest_checkpoint(run_dir: Path) -> NewestCheckpoint | None:
    """The newest checkpoint that is whole; one that is damaged is `meseta checkpoint`'s to tell. Raises StorageError if
    one cannot be read, which may be the newest."""
    try:
        found = list_checkpoints(checkpoint_location(run_dir))
    except StorageError:
        raise
    except MesetaError:
        return None
    for listed in reversed(found):
        if not listed.is_readable:
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
                f"its figures are those of step {record.train_lines[-1].step:,}"
                if record.train_lines
                else "no step is logged"
            )
            notes.append(f"{run.label} has not ended, or was interrupted: {at}.")
        if run.headline.evaluation is None:
            notes.append(f"{run.label} has no evaluation yet, so it has no metrics here.")
        missing = [name for name in RUN_FILES if name in record.problems]
        if record.is_unfinished:
            missing.remove(SUMMARY_FILE)
        notes += [f"{run.label}, {name}: {record.problems[name].text}." for name in missing]
    return notes


def _test_split_notes(runs: Sequence[ComparedRun], split: str) -> list[str]:
    """Where runs compare on valid, the figures of test that some of them have."""
    notes = [f"Figures are those of the split {VALID}, which chose."] if split == VALID else []
    for run in runs if notes else ():
        if line := final_evaluation(run.record, [TEST]):
            figures = ", ".join(
                f"{m.name} {format_decimal(m.value_in(line), m.decimals)}" for m in METRICS if m.is_main
            )
            notes.append(f"{run.label} on {TEST}, at step {line.step:,}: {figures}.")
    return notes


def _comparability_notes(runs: Sequence[ComparedRun], split: str) -> list[str]:
    """Why a difference between runs may not be one between models."""
    first, notes = runs[0], []
    evaluated = partial(split_facts, split=split)
    others = [run for run in runs[1:] if find_differences([first.record, run.record], evaluated)]
    if others:
        notes.append(
            f"{_join_labels(others)} {_was_or_were(others)} evaluated on other rows than {first.label}: their metrics "
            f"do not compare."
        )
    others = [run for run in runs[1:] if run not in others and find_differences([first.record, run.record], data_facts)]
    if others:
        notes.append(
            f"{_join_labels(others)} {_was_or_were(others)} trained on other data than {first.label}: see Data."
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
            f"than {first.label}: their speeds do not compare."
        )
    return notes


def _join_labels(runs: Sequence[ComparedRun]) -> str:
    names = [run.label for run in runs]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _was_or_were(runs: Sequence[ComparedRun]) -> str:
    return "was" if len(runs) == 1 else "were"


def speed_ratio(run: ComparedRun, first: ComparedRun) -> float | None:
    """Samples/s of a run over those of another; None where one is not known."""
    mine, theirs = run.headline.samples_per_s, first.headline.samples_per_s
    return mine / theirs if mine is not None and theirs and is_drawable(mine) and is_drawable(theirs) else None
