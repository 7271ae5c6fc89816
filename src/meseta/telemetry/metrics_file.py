"""Typed records of metrics.jsonl, which has a line per log and evaluation of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from meseta.spec.documents import rename_keys
from meseta.spec.stages import FORMER_STAGES
from meseta.spec.transfer import FORMER_TRANSFERS
from meseta.system.files import MAX_DOCUMENT_BYTES, file_too_long_error, open_regular, parse_json
from meseta.telemetry import row_traffic, span
from meseta.telemetry.row_traffic import RowTraffic
from meseta.telemetry.span import RowWait, TransferMeans

METRICS_FILE = "metrics.jsonl"
# A million lines of a kilobyte.
MAX_METRICS_BYTES = 1 << 30
_MAX_LISTED_LINES = 5

Count = Annotated[int, Field(ge=0, le=10**18)]


def renames(former: Mapping[str, str]) -> BeforeValidator:
    """Return a validator that gives keys that earlier versions wrote their current names."""

    def rename(value: Any) -> Any:
        return rename_keys("metrics", value, former) if isinstance(value, Mapping) else value

    return BeforeValidator(rename)


StageSeconds = Annotated[dict[str, float], renames(FORMER_STAGES)]
"""Seconds per step of each stage."""
Transfers = Annotated[dict[str, Annotated[TransferMeans, renames(span.FORMER_KEYS)]], renames(FORMER_TRANSFERS)]
"""Means of each transfer, by name."""
RowWaits = dict[str, Annotated[RowWait, renames(span.FORMER_ROW_WAIT_KEYS)]]
"""Seconds per step that a rank waited for each reader."""
TableTraffic = dict[str, Annotated[RowTraffic, renames(row_traffic.FORMER_KEYS)]]
"""Row traffic of each offloaded table."""


class Entry(BaseModel):
    """Base class of records in files of a run. Field order is that of the file, and unknown keys are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON. Fields that were not set are omitted."""
        return self.model_dump(exclude_unset=True)


class LifetimeEntry(Entry):
    """Metrics over all training samples of the run so far."""

    logloss: float | None = None
    ne: float | None = None
    auc_binned: float | None = None
    auc_error_bound: float | None = None
    calibration: float | None = None


class TaskProgress(Entry):
    """Training metrics of one label since the previous line. Predictions are made before the update."""

    logloss: float | None = None
    ne: float | None = None
    auc: float | None = None
    lifetime: LifetimeEntry = LifetimeEntry()


class TrainLine(Entry):
    """Training metrics and measurements since the previous line."""

    kind: Literal["train"] = "train"
    step: Count
    num_samples: Count
    time_s: float | None = None
    loss: float | None = None
    loss_terms: dict[str, float] = {}
    """Mean of each loss term of the model, by name. `loss` does not include them."""
    logloss: float | None = None
    """Log loss of the first label. `None` if there is a single label, whose log loss is `loss`."""
    ne: float | None = None
    auc: float | None = None
    lifetime: LifetimeEntry = LifetimeEntry()
    tasks: dict[str, TaskProgress] = {}
    """Metrics by label, if there are several."""
    samples_per_s: float | None = None
    seconds_per_step: float | None = None
    lr_dense: float | None = None
    lr_sparse: float | None = None
    stages_s: StageSeconds = {}
    """Seconds per step of each stage."""
    transfers: Transfers = {}
    """Transfers of rank 0 by name. Empty with a single rank."""
    ids_outside: dict[str, Count] = {}
    """Number of out-of-range ids in the run so far, by feature."""
    row_traffic: TableTraffic = {}
    """Cache traffic per step over all ranks, by offloaded table."""
    row_waits: RowWaits = {}
    """Waits per step of rank 0, by reader. Empty if this process decodes rows itself."""

    @property
    def label_loss(self) -> float | None:
        """Log loss of the first label, which corresponds to `logloss` of evaluations."""
        return self.loss if self.logloss is None else self.logloss


class ReliabilityPoint(Entry):
    """Bin of a reliability curve."""

    mean_prediction: float
    mean_label: float
    num_samples: Count


class GroupMean(Entry):
    """Mean of a metric over groups of samples."""

    value: float | None = None
    num_groups: Count | None = None
    num_skipped_groups: Annotated[
        Count | None, Field(validation_alias=AliasChoices("num_skipped_groups", "num_left_out"))
    ] = None


class EvalMetrics(Entry):
    """Metrics over a set of samples."""

    num_samples: Count | None = None
    num_positives: Count | None = None
    weight: float | None = None
    logloss: float | None = None
    logloss_clamped: float | None = None
    """Log loss with probabilities clipped to 1e-7."""
    ne: float | None = None
    auc: float | None = None
    pr_auc: float | None = None
    calibration: float | None = None
    gauc: GroupMean | None = None
    ndcg: GroupMean | None = None
    reliability: list[ReliabilityPoint] = []

    def metric(self, name: str) -> float | None:
        """Return a metric by name, or `None` if it is undefined or missing. For groups it is the mean."""
        value = getattr(self, name, None)
        return value.value if isinstance(value, GroupMean) else value


class FeatureValue(Entry):
    """Feature value that defines a segment."""

    value: int | None = None
    """Id of the feature. `None` means all values that are not listed."""


# Pydantic places the fields of the last base class first, which is the order in the file.
class SegmentMetrics(EvalMetrics, FeatureValue):
    """Metrics over the samples of a segment, which share a feature value."""

    tasks: dict[str, EvalMetrics] = {}


class EvalContext(Entry):
    """Step and split of an evaluation."""

    kind: Literal["eval"] = "eval"
    step: Count = 0
    split: str = "test"


class EvalLine(EvalMetrics, EvalContext):
    """Metrics over a whole split."""

    tasks: dict[str, EvalMetrics] = {}
    """Metrics by label, if there are several."""
    segments: dict[str, list[SegmentMetrics]] = {}
    ids_outside: dict[str, Count] = {}
    time_s: float | None = None
    num_samples_trained: Count | None = None


class TrialProgress(Entry):
    """Evaluations of a trial on the validation split."""

    evaluations: tuple[EvalLine, ...] = ()
    num_samples: Count = 0
    is_finished: bool = False
    """Whether training has ended. A paused trial can continue."""
    problem: str = ""


Line = TrainLine | EvalLine
_LINE_CLASSES: dict[str, type[Line]] = {"train": TrainLine, "eval": EvalLine}


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """Line of metrics.jsonl."""

    number: int
    """Line number, counted from 1."""
    content: bytes
    """Raw content without the newline."""
    is_complete: bool
    """Whether the line ends in a newline. A killed process may leave an incomplete last line."""
    is_corrupt: bool
    record: Line | None
    """Parsed line. `None` if it is corrupt, or of a kind that only another version knows."""


def read_metrics_lines(path: Path) -> Iterator[MetricsLine]:
    """Yield the nonblank lines of metrics.jsonl, corrupt ones marked. Raises OSError if the file is missing, not
    regular, or it or a line is too long."""
    with open(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_METRICS_BYTES:
            raise file_too_long_error(str(path), MAX_METRICS_BYTES)
        number = 0
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                raise file_too_long_error(f"line {number} of {path}", MAX_DOCUMENT_BYTES)
            if line.strip():
                content, is_corrupt, record = line.removesuffix(b"\n"), False, None
                try:
                    record = _parse_line(line)
                except (ValueError, KeyError, TypeError):  # Pydantic's ValidationError is a ValueError.
                    is_corrupt = True
                yield MetricsLine(
                    number=number, content=content, is_complete=content != line, is_corrupt=is_corrupt, record=record
                )


def _parse_line(line: bytes) -> Line | None:
    document = parse_json(line, finite=False)
    kind = document["kind"]
    return _LINE_CLASSES[kind].model_validate(document) if kind in _LINE_CLASSES else None


def corrupt_lines_message(numbers: Sequence[int]) -> str:
    """Return the first words of a sentence about corrupt lines, up to "and are"."""
    shown = ", ".join(map(str, numbers[:_MAX_LISTED_LINES])) + (" ..." if len(numbers) > _MAX_LISTED_LINES else "")
    return f"{len(numbers)} of its lines cannot be read (line {shown}) and are"
