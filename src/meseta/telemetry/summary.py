"""summary.json and environment.json: what a run leaves when it has ended, and what its figures depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from meseta.machine.files import parse_json, read_if_exists
from meseta.spec.documents import rename_value
from meseta.spec.stages import FORMER_COMPONENTS, FORMER_OVERLAPS
from meseta.telemetry.metrics_file import Count, Entry, EvalLine, RowWaits, StageSeconds, Transfers, renames
from meseta.telemetry.splits import EVALUATED_SPLITS, TEST, VALID

SUMMARY_FILE = "summary.json"
ENVIRONMENT_FILE = "environment.json"

OverlapName = Annotated[str, BeforeValidator(lambda name: rename_value(name, FORMER_OVERLAPS))]
"""Transfer that overlaps with computation."""


class BestEvaluation(Entry):
    """The best evaluation."""

    metric: str | None = None
    task: str | None = None
    """Label that the metric is of, where the config names one."""
    split: str = "test"
    step: Count | None = None
    value: float | None = None


class SelectionRecord(Entry):
    """What evaluations decided."""

    split: str
    what: list[str]


class TeacherSummary(Entry):
    """The best figures that synthetic data allows."""

    auc: float | None = None
    ne: float | None = None


class PredictedStep(Entry):
    """What the cost model said of a step."""

    step_s: float
    seconds: Annotated[dict[str, list[float]], renames(FORMER_COMPONENTS)]
    """Of each component on every rank."""
    constants: str
    """Where they are from."""
    transfers_by_rank: list[Transfers] = Field(default=[])
    """What each rank sends per step and waits for, by the name of the transfer."""
    misses: dict[str, float] = Field(default={})
    """Rows of a step that do not lie near, by table with rows that lie far."""
    overlap: list[OverlapName] | None = None
    """What it takes to be hidden behind computation; None in summaries of former versions, which hid nothing and told
    no waiting."""


class OverlapSummary(Entry):
    """What a run lets travel while it computes, by the names of meseta.spec.stages."""

    hidden: list[OverlapName] = Field(default=[])
    excluded: Annotated[dict[str, str], renames(FORMER_OVERLAPS)] = Field(
        default={}, validation_alias=AliasChoices("excluded", "left_out")
    )
    """What 'auto' leaves out, and why."""


class RunSummary(Entry):
    """What a run leaves when it has ended."""

    valid: EvalLine | None = None
    """Of the same weights as `test`, where the data have that split."""
    test: EvalLine | None = None
    best: BestEvaluation = BestEvaluation()
    chosen: SelectionRecord | None = None
    teacher: TeacherSummary | None = None
    num_steps: Count | None = None
    num_samples: Count | None = None
    train_s: float | None = None
    samples_per_s: float | None = None
    num_ranks: Count | None = None
    unknown_collectives: Count | None = Field(
        default=None, validation_alias=AliasChoices("unknown_collectives", "unlisted")
    )
    """Collectives that no list of transfers names."""
    clamped: Count | None = None
    """Numbers that were too large for fp16 on their way between ranks, over all ranks; None where none travelled so."""
    ids_outside: dict[str, Count] = Field(default={})
    """Of training, by feature."""
    excluded_rows: dict[str, Count] = Field(default={}, validation_alias=AliasChoices("excluded_rows", "rows_left_out"))
    """By reason."""
    checkpoint: str | None = None
    """Of the weights that the run has ended with."""
    stages_s_by_rank: list[StageSeconds] = Field(default=[])
    transfers_by_rank: list[Transfers] = Field(default=[])
    """What each rank sent per step, by the name of the transfer."""
    row_waits_by_rank: list[RowWaits] = Field(default=[])
    """What each rank waited for per step, by reader."""
    overlap: OverlapSummary | None = None
    """None where one rank runs alone."""
    predicted: PredictedStep | None = None

    @property
    def timings(self) -> dict[str, Any]:
        """What it says of the steps' time, measured and predicted, by name."""
        names = {"stages_s_by_rank", "transfers_by_rank", "row_waits_by_rank", "predicted"} & self.model_fields_set
        return {name: getattr(self, name) for name in names}

    def evaluation(self, split: str) -> EvalLine | None:
        """Of a split at the end; None where it was not evaluated."""
        return {VALID: self.valid, TEST: self.test}.get(split)

    @property
    def evaluated_splits(self) -> tuple[str, ...]:
        """Those that were evaluated at the end."""
        return tuple(split for split in EVALUATED_SPLITS if self.evaluation(split))


class PackageVersions(Entry):
    """Of this package and those that figures depend on."""

    python: str | None = None
    meseta: str | None = None
    torch: str | None = None
    numpy: str | None = None
    pyarrow: str | None = None


class RunEnvironment(Entry):
    """What a figure of a run depends on."""

    versions: PackageVersions = PackageVersions()
    num_cores: Count | None = None
    processor: str | None = None
    instructions: str | None = None
    device: str | None = None
    num_ranks: Count | None = None
    commit: str | None = None
    """Of the source tree; None outside one."""
    row_files: str | None = None
    """How tables on a disk are read, and why not better; None where none lies there."""


def read_summary(run_dir: Path) -> RunSummary | None:
    """None while the run has not ended, and for a file that is no summary. Raises StorageError if reading failed."""
    content = read_if_exists(run_dir / SUMMARY_FILE)
    try:
        return None if content is None else RunSummary.model_validate(parse_json(content, finite=False))
    except ValueError:
        return None
