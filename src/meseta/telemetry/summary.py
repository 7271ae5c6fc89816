"""Typed records of summary.json and environment.json, which a run writes at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from meseta.spec.documents import rename_value
from meseta.spec.stages import FORMER_COMPONENTS, FORMER_OVERLAPS
from meseta.system.files import parse_json, read_if_exists
from meseta.telemetry.continued import ContinuedSummary
from meseta.telemetry.metrics import EVALUATED_SPLITS, TEST, VALID
from meseta.telemetry.metrics_file import (
    Count,
    Entry,
    EvalLine,
    EvalMetrics,
    RowWaits,
    StageSeconds,
    Transfers,
    renames,
)

SUMMARY_FILE = "summary.json"
TRIALS_FILE = "trials.json"
ENVIRONMENT_FILE = "environment.json"

OverlapName = Annotated[str, BeforeValidator(lambda name: rename_value(name, FORMER_OVERLAPS))]
"""Transfer that overlaps with computation."""


class BestEvaluation(Entry):
    """Best evaluation by `train.early_stopping`."""

    metric: str | None = None
    task: str | None = None
    """Label for which the metric was computed, if the config sets one."""
    split: str = "test"
    step: Count | None = None
    value: float | None = None


class SelectionRecord(Entry):
    """Decisions that were based on evaluations."""

    split: str
    what: list[str]


class TeacherSummary(Entry):
    """Best metrics that are possible on synthetic data."""

    auc: float | None = None
    ne: float | None = None


class PredictedStep(Entry):
    """Step time predicted by the cost model."""

    step_s: float
    seconds: Annotated[dict[str, list[float]], renames(FORMER_COMPONENTS)]
    """Predicted seconds of each component on every rank."""
    constants: str
    """Origin of the constants of the cost model."""
    transfers_by_rank: list[Transfers] = Field(default=[])
    """Predicted transfers per step of each rank, by name."""
    misses: dict[str, float] = Field(default={})
    """Predicted cache misses per step, by offloaded table."""
    overlap: list[OverlapName] | None = None
    """Exchanges that are predicted to overlap with computation. `None` in summaries of earlier versions, which had no
    overlap and predicted no waits."""


class OverlapSummary(Entry):
    """Overlap of exchanges with computation, by their names in meseta.spec.stages."""

    hidden: list[OverlapName] = Field(default=[])
    """Exchanges that overlap with computation."""
    excluded: Annotated[dict[str, str], renames(FORMER_OVERLAPS)] = Field(
        default={}, validation_alias=AliasChoices("excluded", "left_out")
    )
    """Exchanges that 'auto' does not overlap, each with the reason."""


class GraphSummary(Entry):
    """Steps of the last start of a run that were replayed from CUDA graphs."""

    num_graphs: Count | None = None
    num_replayed_steps: Count | None = None
    eager_steps: dict[str, Count] = Field(default={})
    """Number of steps that ran eagerly, by reason."""


FeatureKind = Literal["dense", "sparse"]


class FeatureImportance(Entry):
    """Permutation importance of a feature."""

    name: str
    kind: FeatureKind
    logloss: float
    """Increase of the log loss, in nats."""
    low: float
    high: float
    """Bounds of the 95% interval of `logloss`."""


class ImportanceSummary(Entry):
    """Permutation importances for one label, and baselines."""

    split: str
    label: str
    num_rows: Count
    num_permutations: Count
    logloss: float
    constant_logloss: float
    """Log loss of the rate of positives, the divisor of NE."""
    logistic_logloss: float | None = None
    """`None` in summaries of earlier versions."""
    auc: float | None = None
    logistic_auc: float | None = None
    num_logistic_rows: Count | None = None
    features: list[FeatureImportance]


class BaselineSummary(Entry):
    """Metrics of another learner that was fitted to the training rows, for the first label."""

    name: str
    version: str
    num_rows: Count
    """Number of training rows that were fitted."""
    splits: dict[str, EvalMetrics]


class RunSummary(Entry):
    """Summary of a completed run."""

    valid: EvalLine | None = None
    """Evaluation of the split valid, if it exists, with the same weights as `test`."""
    test: EvalLine | None = None
    best: BestEvaluation = BestEvaluation()
    selected: SelectionRecord | None = Field(default=None, validation_alias=AliasChoices("selected", "chosen"))
    teacher: TeacherSummary | None = None
    num_steps: Count | None = None
    num_samples: Count | None = None
    train_s: float | None = None
    samples_per_s: float | None = None
    num_ranks: Count | None = None
    unknown_collectives: Count | None = Field(
        default=None, validation_alias=AliasChoices("unknown_collectives", "unlisted")
    )
    """Number of collectives that are not listed as transfers."""
    num_clamped: Count | None = Field(default=None, validation_alias=AliasChoices("num_clamped", "clamped"))
    """Number of values that exceeded the range of fp16 in transfers, over all ranks. `None` if none were sent in
    fp16."""
    ids_outside: dict[str, Count] = Field(default={})
    """Number of out-of-range ids in training, by feature."""
    excluded_rows: dict[str, Count] = Field(default={}, validation_alias=AliasChoices("excluded_rows", "rows_left_out"))
    """Number of excluded rows, by reason."""
    checkpoint: str | None = None
    """Checkpoint with the final weights of the run."""
    stages_s_by_rank: list[StageSeconds] = Field(default=[])
    """Seconds per step of each stage, for each rank."""
    transfers_by_rank: list[Transfers] = Field(default=[])
    """Transfers per step of each rank, by name."""
    row_waits_by_rank: list[RowWaits] = Field(default=[])
    """Waits per step of each rank, by reader."""
    overlap: OverlapSummary | None = None
    """Overlap with computation. `None` for a single rank."""
    predicted: PredictedStep | None = None
    graphs: GraphSummary | None = None
    """CUDA graphs. `None` on a CPU, and for `pipeline.graph: off`."""
    peak_memory_bytes_by_rank: list[Count] = Field(default=[])
    """Peak memory of the GPU, or else of the process."""
    importance: ImportanceSummary | None = None
    """Importance of features. `None` without evaluated rows, and for `report.importance: false`."""
    baseline: BaselineSummary | None = None
    """Baseline of `report.baseline`. `None` without that key, evaluated rows or inputs."""
    continued: ContinuedSummary | None = None
    """Parent and metrics on the new rows. `None` unless the run continues from another one."""

    @property
    def timings(self) -> dict[str, Any]:
        """Measured and predicted times of steps, by field name."""
        names = {"stages_s_by_rank", "transfers_by_rank", "row_waits_by_rank", "predicted"} & self.model_fields_set
        return {name: getattr(self, name) for name in names}

    def evaluation(self, split: str) -> EvalLine | None:
        """Return the final evaluation of a split, or `None` if it was not evaluated."""
        return {VALID: self.valid, TEST: self.test}.get(split)

    @property
    def evaluated_splits(self) -> tuple[str, ...]:
        return tuple(split for split in EVALUATED_SPLITS if self.evaluation(split))


class TrialEntry(Entry):
    """Settings and result of a trial."""

    settings: dict[str, Any]
    """Varied config keys and values."""
    value: float | None = None
    auc: float | None = None
    logloss: float | None = None
    num_samples: Count | None = None
    cost: float | None = None
    """Cost in units of the first trial."""
    name: str = ""
    problem: str = ""
    """Reason of a failure."""


class TrialsRecord(Entry):
    """Trials before a run, or of a sweep."""

    metric: str
    split: str
    selected: Count | None = None
    """Index of the best trial."""
    trials: list[TrialEntry]
    decisions: tuple[str, ...] = ()
    """Decisions of a search, with evidence."""


class PackageVersions(Entry):
    """Versions of Python, Meseta and the packages that results depend on."""

    python: str | None = None
    meseta: str | None = None
    torch: str | None = None
    numpy: str | None = None
    pyarrow: str | None = None


class RunEnvironment(Entry):
    """Software and hardware of a run."""

    versions: PackageVersions = PackageVersions()
    num_cores: Count | None = None
    num_threads: Count | None = None
    """Number of threads of each rank."""
    processor: str | None = None
    instructions: str | None = None
    device: str | None = None
    num_ranks: Count | None = None
    commit: str | None = None
    """Commit of the source tree. `None` outside a git checkout."""
    row_files: str | None = None
    """Description of the I/O engine for row files. `None` if no table is in tier 'disk'."""


def read_summary(run_dir: Path) -> RunSummary | None:
    """Read the summary of a run. Returns `None` if it is missing or invalid. Raises StorageError if reading fails."""
    content = read_if_exists(run_dir / SUMMARY_FILE)
    try:
        return None if content is None else RunSummary.model_validate(parse_json(content, finite=False))
    except ValueError:
        return None
