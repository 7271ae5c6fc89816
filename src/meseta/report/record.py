"""The files of a run directory as typed records. A file that is absent or broken is named and does without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from meseta.config.load import value_at
from meseta.spec import MesetaError
from meseta.spec.documents import parse_yaml
from meseta.spec.files import parse_json, read_bounded
from meseta.telemetry.lines import METRICS_NAME, Count, EvalLine, MetricsEntry, TrainLine, read_lines, told_spoiled

RUN_FILES = ("config.yaml", "dataset.json", "plan.json", "environment.json", METRICS_NAME, "summary.json")
_OWN_FILES = ("config.yaml", "plan.json", METRICS_NAME, "summary.json")  # no prepared dataset has these


class Reuse(MetricsEntry):
    """Shares of rows and of lookups by uses of a row in a window: bin i is (edges[i], edges[i + 1]], the last open."""

    window_samples: Count
    edges: list[Count]
    rows: list[float]
    lookups: list[float]


class Statistics(MetricsEntry):
    """What `meseta prepare` counted for one sparse feature."""

    num_rows: Count | None = None
    num_lookups: Count | None = None
    num_uniques: Count | None = None
    mean_pooling_factor: float | None = None
    reuse: Reuse | None = None


class SparseFeature(MetricsEntry):
    """One sparse feature of the dataset."""

    name: str
    num_embeddings: Count
    encoding: str = ""
    multi_valued: bool = False
    weighted: bool = False
    hash_seed: str | None = None
    vocabulary_digest: str | None = None
    boundaries: list[float] | None = None
    made_of: tuple[str, ...] = ()
    statistics: Statistics | None = None


class DenseFeature(MetricsEntry):
    """One dense feature and how it was filled and standardised."""

    name: str
    fill: float | None = None
    mean: float | None = None
    std: float | None = None


class Split(MetricsEntry):
    """Rows and labels of one split."""

    num_rows: Count
    num_positives: float | None = None


class Dataset(MetricsEntry):
    """The part of dataset.json that the page shows."""

    labels: list[str] = Field(default=["label"])
    weight: str | None = None
    group: str | None = None
    time: str | None = None
    dense: list[DenseFeature] = Field(default=[])
    sparse: list[SparseFeature] = Field(default=[])
    splits: dict[str, Split] = Field(default={})


class PlanShard(MetricsEntry):
    """One placed piece of a table, rows and columns as [first, after the last)."""

    rows: tuple[Count, Count]
    columns: tuple[Count, Count]
    ranks: list[Count]

    @property
    def num_rows(self) -> int:
        return max(self.rows[1] - self.rows[0], 0)

    @property
    def num_columns(self) -> int:
        return max(self.columns[1] - self.columns[0], 0)


class PlanTable(MetricsEntry):
    """The pieces of one table."""

    sharding: str
    cost: float = 0.0
    shards: list[PlanShard] = Field(default=[])


class PlanRecord(MetricsEntry):
    """plan.json, read leniently: a plan that is wrong is drawn, not refused."""

    num_ranks: Count
    tables: dict[str, PlanTable]


class Teacher(MetricsEntry):
    """The best figures that synthetic data allows."""

    auc: float | None = None
    ne: float | None = None


class Predicted(MetricsEntry):
    """What the cost model said of a step."""

    step_s: float
    seconds: dict[str, list[float]]
    """Of each component on every rank."""
    constants: str
    """Where they are from."""


class Best(MetricsEntry):
    """The best evaluation."""

    step: Count | None = None
    split: str = "test"


class Chosen(MetricsEntry):
    """What evaluations decided."""

    split: str
    what: list[str]


class Summary(MetricsEntry):
    """What a run leaves when it has ended."""

    test: EvalLine | None = None
    valid: EvalLine | None = None
    """Of the same weights, where the data have that split."""
    best: Best = Best()
    chosen: Chosen | None = None
    teacher: Teacher | None = None
    num_steps: Count | None = None
    num_samples: Count | None = None
    train_s: float | None = None
    samples_per_s: float | None = None
    num_ranks: Count | None = None
    stages_s_by_rank: list[dict[str, float]] = Field(default=[])
    predicted: Predicted | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything that is known about a run."""

    name: str
    """Name of the run directory."""
    config_text: str | None
    """config.yaml as written."""
    config: dict[str, Any]
    """config.yaml parsed; empty where that fails."""
    dataset: Dataset | None
    plan: PlanRecord | None
    environment: dict[str, Any] | None
    summary: Summary | None
    train: tuple[TrainLine, ...]
    """By step; where a resumed run repeated a step, its later line."""
    evals: tuple[EvalLine, ...]
    """As `train`, one per step and split."""
    problems: dict[str, str]
    """File name -> why the page does without it, or without a part of it."""

    def is_best(self, line: EvalLine) -> bool:
        """Whether an evaluation is the best of those that chose; known when a run has ended."""
        best = self.summary.best if self.summary else Best()
        return (line.step, line.split) == (best.step, best.split)

    def setting(self, path: str) -> Any:
        """A value of the config by its dotted path; None where it is absent."""
        return value_at(self.config, path)


def read_run(run_dir: Path) -> RunRecord:
    """Read whatever is there; raises MesetaError for a directory that is not a run's."""
    if not run_dir.is_dir():
        raise MesetaError(f"report: {str(run_dir)!r} is not a directory; give the run_dir of a training run")
    if not any((run_dir / name).is_file() for name in _OWN_FILES):
        raise MesetaError(
            f"report: {str(run_dir)!r} holds no run: none of {', '.join(_OWN_FILES)} is there; "
            "give the run_dir of a training run"
        )
    problems: dict[str, str] = {}
    config = _read(run_dir, "config.yaml", problems)
    config_text = None if config is None else config.decode(errors="replace")
    environment = _document(run_dir, "environment.json", problems)
    if not isinstance(environment, dict):
        problems.setdefault("environment.json", "it does not hold a mapping")
    train, evals = _read_metrics(run_dir, problems)
    return RunRecord(
        name=run_dir.resolve().name,
        config_text=config_text,
        config=_parse_config(config_text, problems),
        dataset=_entry(run_dir, "dataset.json", Dataset, problems),
        plan=_entry(run_dir, "plan.json", PlanRecord, problems),
        environment=environment if isinstance(environment, dict) else None,
        summary=_entry(run_dir, "summary.json", Summary, problems),
        train=train,
        evals=evals,
        problems=problems,
    )


def _read(run_dir: Path, name: str, problems: dict[str, str]) -> bytes | None:
    try:
        return read_bounded(run_dir / name)
    except OSError as error:
        problems[name] = _unreadable(error)
    return None


def _unreadable(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is not in the run directory"
    return f"it cannot be read: {error.strerror}"


def _document(run_dir: Path, name: str, problems: dict[str, str]) -> Any:
    content = _read(run_dir, name, problems)
    if content is None:
        return None
    try:
        return parse_json(content, finite=False)
    except ValueError as error:
        problems[name] = f"it is not valid JSON: {error}"
        return None


T = TypeVar("T", bound=MetricsEntry)


def _entry(run_dir: Path, name: str, kind: type[T], problems: dict[str, str]) -> T | None:
    document = _document(run_dir, name, problems)
    if document is None:
        problems.setdefault(name, "it holds nothing")
        return None
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        problems[name] = _explain(error)
        return None


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return f"key {key!r}: {first['msg'].lower()}" if key else first["msg"].lower()


def _parse_config(content: str | None, problems: dict[str, str]) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        document = parse_yaml(content)
    except MesetaError as error:
        problems["config.yaml"] = str(error)
        return {}
    return document if isinstance(document, dict) else {}


def _read_metrics(run_dir: Path, problems: dict[str, str]) -> tuple[tuple[TrainLine, ...], tuple[EvalLine, ...]]:
    """Lines by step. A killed run may leave half a line, and a resumed one repeats steps: the later line wins."""
    train: dict[int, TrainLine] = {}
    evals: dict[tuple[int, str], EvalLine] = {}
    spoiled = []
    try:
        for line in read_lines(run_dir / METRICS_NAME):
            if isinstance(line.record, TrainLine):
                train[line.record.step] = line.record
            elif isinstance(line.record, EvalLine):
                evals[line.record.step, line.record.split] = line.record
            elif line.is_spoiled:
                spoiled.append(line.number)
    except OSError as error:
        problems[METRICS_NAME] = _unreadable(error)
    if spoiled:
        problems[METRICS_NAME] = f"{told_spoiled(spoiled)} left out"
    return tuple(train[step] for step in sorted(train)), tuple(evals[key] for key in sorted(evals))


def flatten(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested keys with dots between them."""
    pairs: list[tuple[str, Any]] = []
    for key, item in value.items():
        if isinstance(item, dict):
            pairs += flatten(item, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", ", ".join(map(str, item)) if isinstance(item, list) else item))
    return pairs
