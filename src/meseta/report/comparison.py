"""Differences between runs, as properties with one value per run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meseta.checkpoint import list_checkpoints
from meseta.config.load import checkpoint_location
from meseta.errors import StorageError, join_names
from meseta.report.evaluation import Headline, final_evaluation, headline
from meseta.report.record import RUN_FILES, RunRecord, flatten, format_value, read_run
from meseta.report.step_tables import mean_stages_s
from meseta.spec import MesetaError
from meseta.telemetry.formatting import NO_VALUE, format_count, format_decimal, is_drawable
from meseta.telemetry.metrics import EVALUATED_SPLITS, METRICS, TEST, VALID, Metric, metrics_in, validation_split
from meseta.telemetry.metrics_file import EvalMetrics
from meseta.telemetry.summary import SUMMARY_FILE


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Property of a run, or of a split, a table or a sparse feature of it."""

    kind: Literal["run", "split", "table", "sparse"] = "run"
    subject: str = ""
    """Name of the split, the table or the sparse feature. Empty for a property of the run."""
    property_name: str = ""
    """Name of the property. Empty for tables and sparse features, which have one property each."""

    @property
    def name(self) -> str:
        """Display name of the property and its subject."""
        return " ".join(filter(None, (self.kind if self.is_grouped else "", self.subject, self.property_name)))

    @property
    def is_grouped(self) -> bool:
        """Whether subjects with equal values are shown in one row."""
        return self.kind in ("table", "sparse")


LABELS = Fact(property_name="labels")


@dataclass(frozen=True, kw_only=True)
class FactDifference:
    """Fact that differs between runs."""

    fact: Fact
    values: tuple[str, ...]
    """Formatted values, one per run. `NO_VALUE` for runs without this fact."""

    @property
    def name(self) -> str:
        """Display name of the fact."""
        return self.fact.name


def find_differences(
    records: Sequence[RunRecord], facts: Callable[[RunRecord], Mapping[Fact, str]]
) -> list[FactDifference]:
    """Return the facts that differ between runs, in the order in which they first occur.

    A run for which `facts` returns an empty mapping is unknown. It has the value `NO_VALUE`, but does not count as
    different.
    """
    facts_by_run = [facts(record) for record in records]
    rows = []
    for fact in dict.fromkeys(fact for one in facts_by_run for fact in one):
        values = tuple(one.get(fact, NO_VALUE) for one in facts_by_run)
        # Exclude runs without any fact, because their dataset, plan or environment is unknown.
        if len({value for value, one in zip(values, facts_by_run, strict=True) if one}) > 1:
            rows.append(FactDifference(fact=fact, values=values))
    return rows


def config_facts(record: RunRecord) -> dict[Fact, str]:
    """Return the values of all config keys except `run_dir`."""
    # Each run has another run_dir.
    return {Fact(property_name=key): format_value(value) for key, value in flatten(record.config) if key != "run_dir"}


def data_facts(record: RunRecord) -> dict[Fact, str]:
    """Return facts about splits, columns and features of a run's dataset. Empty if the dataset is unknown."""
    data = record.dataset
    if data is None:
        return {}
    facts = {}
    for name, split in data.splits.items():
        facts[Fact(kind="split", subject=name, property_name="rows")] = f"{split.num_rows:,}"
        positives = split.num_positives
        shown = f"{positives:,.6g}" if positives % 1 else format_count(positives)
        facts[Fact(kind="split", subject=name, property_name="positives")] = shown
    facts[LABELS] = ", ".join(data.labels)
    for role in ("weight", "group", "time"):
        facts[Fact(property_name=role)] = format_value(getattr(data, role))
    facts[Fact(property_name="dense features")] = str(len(data.dense))
    # A digest shows a difference without a row for each constant.
    scales = repr([(dense.name, dense.fill, dense.mean, dense.std) for dense in data.dense])
    facts[Fact(property_name="standardisation of dense features")] = f"digest {sha256(scales.encode()).hexdigest()[:8]}"
    facts[Fact(property_name="sparse features")] = str(len(data.sparse))
    values = repr([(s.name, s.hash_seed, s.vocabulary_digest, s.boundaries, s.made_of) for s in data.sparse])
    facts[Fact(property_name="encoding of sparse features")] = f"digest {sha256(values.encode()).hexdigest()[:8]}"
    for sparse in data.sparse:
        kind = " weighted" * sparse.weighted + " lists" * sparse.multi_valued
        shown = f"{sparse.num_embeddings:,} rows, {sparse.encoding}{kind}"
        facts[Fact(kind="sparse", subject=sparse.name)] = shown
    return facts


def split_facts(record: RunRecord, split: str) -> dict[Fact, str]:
    """Return the facts that are equal if two runs were evaluated on the same rows of a split."""
    facts = data_facts(record).items()
    return {fact: value for fact, value in facts if (fact.kind, fact.subject) == ("split", split) or fact == LABELS}


def plan_facts(record: RunRecord) -> dict[Fact, str]:
    """Return the number of ranks, and the sharding type and ranks of each table. Empty if the plan is unknown."""
    plan = record.plan
    if plan is None:
        return {}
    facts = {Fact(property_name="ranks"): str(plan.num_ranks)}
    for entry in plan.tables:
        ranks = sorted({rank for shard in entry.shards for rank in shard.ranks})
        facts[Fact(kind="table", subject=entry.table)] = f"{entry.sharding} on {', '.join(map(str, ranks))}"
    return facts


def environment_facts(record: RunRecord) -> dict[Fact, str]:
    """Return facts about machine, versions and commit. Empty if the environment is unknown."""
    # The number of ranks is one of the facts of the plan.
    environment = record.environment.to_dict() if record.environment else {}
    return {Fact(property_name=key): format_value(value) for key, value in flatten(environment) if key != "num_ranks"}


def group_differences(rows: Sequence[FactDifference]) -> list[FactDifference]:
    """Merge the rows of tables, or of sparse features, that have equal values."""
    # For example, 26 tables that are sharded identically become one row.
    subjects: dict[tuple[Fact, tuple[str, ...]], list[str]] = {}
    for row in rows:
        fact = replace(row.fact, subject="") if row.fact.is_grouped else row.fact
        subjects.setdefault((fact, row.values), []).append(row.fact.subject)
    return [
        FactDifference(fact=replace(fact, subject=join_names(names, 4)), values=values)
        for (fact, values), names in subjects.items()
    ]


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
