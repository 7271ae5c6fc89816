"""metrics.jsonl: a line per log and evaluation of a run, as typed records; a spoiled line is named and left alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from meseta.machine.files import MAX_DOCUMENT_BYTES, file_too_long_error, open_regular, parse_json
from meseta.spec.documents import rename_keys
from meseta.spec.stages import FORMER_STAGES
from meseta.spec.transfer import FORMER_TRANSFERS
from meseta.telemetry import row_traffic, row_waits, transfers
from meseta.telemetry.row_traffic import RowTraffic
from meseta.telemetry.row_waits import RowWait
from meseta.telemetry.transfers import TransferMeans

METRICS_FILE = "metrics.jsonl"
MAX_METRICS_BYTES = 1 << 30
"""The longest file that is read: a million lines of a kilobyte."""
_MAX_LISTED_LINES = 5
"""Numbers of lines that a message lists."""

Count = Annotated[int, Field(ge=0, le=10**18)]


def renames(former: Mapping[str, str]) -> BeforeValidator:
    """Return a validator that gives keys that earlier versions wrote their current names."""

    def rename(value: Any) -> Any:
        return rename_keys("metrics", value, former) if isinstance(value, Mapping) else value

    return BeforeValidator(rename)


StageSeconds = Annotated[dict[str, float], renames(FORMER_STAGES)]
"""Seconds per step of each stage."""
Transfers = Annotated[dict[str, Annotated[TransferMeans, renames(transfers.FORMER_KEYS)]], renames(FORMER_TRANSFERS)]
"""Means of each transfer, by name."""
RowWaits = dict[str, Annotated[RowWait, renames(row_waits.FORMER_KEYS)]]
"""Seconds per step that a rank waited for each reader."""


class Entry(BaseModel):
    """Part of a file of a run, its keys in their order there. Keys that another version has written stay."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, of what was given alone: what a run does not have, its file has no key for."""
        return self.model_dump(exclude_unset=True)


class LifetimeEntry(Entry):
    """Figures over the whole run so far."""

    logloss: float | None = None
    ne: float | None = None
    auc_binned: float | None = None
    auc_error_bound: float | None = None
    calibration: float | None = None


class TaskProgress(Entry):
    """Figures of one label since the line before, each sample measured before the model learned from it."""

    logloss: float | None = None
    ne: float | None = None
    auc: float | None = None
    lifetime: LifetimeEntry = LifetimeEntry()


class TrainLine(Entry):
    """What happened since the line before."""

    kind: Literal["train"] = "train"
    step: Count
    num_samples: Count
    time_s: float | None = None
    loss: float | None = None
    loss_terms: dict[str, float] = {}
    """Means of what the model adds to the loss, by its names; `loss` is without them."""
    logloss: float | None = None
    """Of the first label; None where it is the only one, and this the loss."""
    ne: float | None = None
    auc: float | None = None
    lifetime: LifetimeEntry = LifetimeEntry()
    tasks: dict[str, TaskProgress] = {}
    """By label, where there are several."""
    samples_per_s: float | None = None
    seconds_per_step: float | None = None
    lr_dense: float | None = None
    lr_sparse: float | None = None
    stages_s: StageSeconds = {}
    transfers: Transfers = {}
    """What rank 0 sent, by the name of the transfer; nothing where there is one rank."""
    ids_outside: dict[str, Count] = {}
    """Ids outside their table in the run so far, by feature."""
    row_traffic: dict[str, Annotated[RowTraffic, renames(row_traffic.FORMER_KEYS)]] = {}
    """Per step, of tables whose rows lie far, over all ranks."""
    row_waits: RowWaits = {}
    """Per step of rank 0, by reader that was waited for; nothing where this process decodes."""

    @property
    def label_loss(self) -> float | None:
        """Log loss of the first label, as evaluations and the whole run's figures have it."""
        return self.loss if self.logloss is None else self.logloss


class ReliabilityPoint(Entry):
    """One bin of a reliability curve."""

    mean_prediction: float
    mean_label: float
    num_samples: Count


class GroupMean(Entry):
    """Mean of a figure over groups of samples."""

    value: float | None = None
    num_groups: Count | None = None
    num_skipped_groups: Annotated[
        Count | None, Field(validation_alias=AliasChoices("num_skipped_groups", "num_left_out"))
    ] = None


class EvalMetrics(Entry):
    """Figures over a set of samples."""

    num_samples: Count | None = None
    num_positives: Count | None = None
    weight: float | None = None
    logloss: float | None = None
    ne: float | None = None
    auc: float | None = None
    pr_auc: float | None = None
    calibration: float | None = None
    gauc: GroupMean | None = None
    ndcg: GroupMean | None = None
    reliability: list[ReliabilityPoint] = []

    def metric(self, name: str) -> float | None:
        """One of them by its name, of groups their mean; None where it is not defined, or not there."""
        value = getattr(self, name, None)
        return value.value if isinstance(value, GroupMean) else value


class FeatureValue(Entry):
    """What the samples of a segment share."""

    value: int | None = None
    """Id of the value's row; None for all values that are not listed."""


class SegmentMetrics(EvalMetrics, FeatureValue):
    """Figures over the samples that share a value of a feature; fields of the last base come first."""

    tasks: dict[str, EvalMetrics] = {}


class EvalContext(Entry):
    """What an evaluation is of."""

    kind: Literal["eval"] = "eval"
    step: Count = 0
    split: str = "test"


class EvalLine(EvalMetrics, EvalContext):
    """Figures over a whole split; fields of the last base come first."""

    tasks: dict[str, EvalMetrics] = {}
    """By label, where there are several."""
    segments: dict[str, list[SegmentMetrics]] = {}
    """By feature."""
    ids_outside: dict[str, Count] = {}
    """Ids outside their table, by feature."""
    time_s: float | None = None
    num_samples_trained: Count | None = None


Line = TrainLine | EvalLine
_LINE_CLASSES: dict[str, type[Line]] = {"train": TrainLine, "eval": EvalLine}


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """One line of the file."""

    number: int
    """From 1."""
    content: bytes
    """As the file has it, without its end."""
    is_complete: bool
    """Whether it has an end; a kill may have cut off the last one."""
    is_corrupt: bool
    """Whether nobody can tell what it says."""
    record: Line | None
    """None where it is spoiled, or of a kind that another version writes."""


def read_metrics_lines(path: Path) -> Iterator[MetricsLine]:
    """The lines of metrics.jsonl that are not blank, in their order.

    Raises OSError where there is none, for what is no regular file, and for one that is longer than MAX_METRICS_BYTES
    or has a line longer than a document.
    """
    with open(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_METRICS_BYTES:
            raise file_too_long_error(str(path), MAX_METRICS_BYTES)
        number = 0
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                raise file_too_long_error(f"line {number} of {path}", MAX_DOCUMENT_BYTES)
            if line.strip():
                content, is_spoiled, record = line.removesuffix(b"\n"), False, None
                try:
                    record = _parse_line(line)
                except (ValueError, KeyError, TypeError):  # pydantic's ValidationError is a ValueError
                    is_spoiled = True
                yield MetricsLine(
                    number=number, content=content, is_complete=content != line, is_corrupt=is_spoiled, record=record
                )


def format_line(line: Line) -> str:
    """A line as the file has it."""
    return json.dumps(line.to_dict()) + "\n"


def _parse_line(line: bytes) -> Line | None:
    """None for a kind that this version does not know."""
    document = parse_json(line, finite=False)
    kind = document["kind"]
    return _LINE_CLASSES[kind].model_validate(document) if kind in _LINE_CLASSES else None


def corrupt_lines_message(numbers: Sequence[int]) -> str:
    """The subject and verb of a sentence about spoiled lines."""
    shown = ", ".join(map(str, numbers[:_MAX_LISTED_LINES])) + (" ..." if len(numbers) > _MAX_LISTED_LINES else "")
    return f"{len(numbers)} of its lines cannot be read (line {shown}) and are"
