"""metrics.jsonl: a line per log and evaluation of a run, as typed records; a spoiled line is named and left alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from meseta.spec.files import DOCUMENT_BYTES, open_regular, parse_json, too_long

METRICS_NAME = "metrics.jsonl"
METRICS_BYTES = 1 << 30
"""The longest file that is read: a million lines of a kilobyte."""
_SHOWN = 5
"""Numbers of lines that a message lists."""

Count = Annotated[int, Field(ge=0, le=10**18)]


class MetricsEntry(BaseModel):
    """Part of a file; keys that the page does not show are left aside, so newer runs can be read."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Lifetime(MetricsEntry):
    """Figures over the whole run so far."""

    logloss: float | None = None
    ne: float | None = None
    auc_binned: float | None = None


class TrainLine(MetricsEntry):
    """Figures since the line before."""

    step: Count
    num_samples: Count
    time_s: float | None = None
    loss: float | None = None
    logloss: float | None = None
    """Of the first label; None where it is the only one, and this the loss."""
    ne: float | None = None
    auc: float | None = None
    lifetime: Lifetime = Lifetime()
    samples_per_s: float | None = None
    lr_dense: float | None = None
    lr_sparse: float | None = None
    stages_s: dict[str, float] = {}

    @property
    def label_loss(self) -> float | None:
        """Log loss of the first label, as evaluations and the whole run's figures have it."""
        return self.loss if self.logloss is None else self.logloss


class ReliabilityPoint(MetricsEntry):
    """One bin of a reliability curve."""

    mean_prediction: float
    mean_label: float
    num_samples: Count


class GroupedFigure(MetricsEntry):
    """Mean of a figure over groups of samples."""

    value: float | None = None


class Figures(MetricsEntry):
    """Figures over a set of samples."""

    num_samples: Count | None = None
    num_positives: Count | None = None
    logloss: float | None = None
    ne: float | None = None
    auc: float | None = None
    pr_auc: float | None = None
    gauc: GroupedFigure | None = None
    ndcg: GroupedFigure | None = None
    calibration: float | None = None


class Segment(Figures):
    """Figures over the samples that share a value of a feature."""

    value: int | None = None
    """Id of the value's row; None for all values that are not listed."""
    tasks: dict[str, Figures] = {}


class EvalLine(Figures):
    """Figures over a whole split."""

    step: Count = 0
    split: str = "test"
    time_s: float | None = None
    reliability: list[ReliabilityPoint] = []
    tasks: dict[str, Figures] = {}
    """By label, where there are several."""
    segments: dict[str, list[Segment]] = {}
    """By feature."""


_KINDS: dict[str, type[TrainLine | EvalLine]] = {"train": TrainLine, "eval": EvalLine}


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """One line of the file."""

    number: int
    """From 1."""
    content: bytes
    """As the file has it, without its end."""
    is_whole: bool
    """Whether it has an end; a kill may have cut off the last one."""
    document: dict[str, Any]
    """Empty where it is spoiled."""
    record: TrainLine | EvalLine | None
    """None where it is spoiled, or of a kind that another version writes."""

    @property
    def is_spoiled(self) -> bool:
        """Whether nobody can tell what it says."""
        return not self.document


def read_lines(path: Path) -> Iterator[MetricsLine]:
    """The lines of metrics.jsonl that are not blank, in their order.

    Raises OSError where there is none, for what is no regular file, and for one that is longer than METRICS_BYTES or
    has a line longer than a document.
    """
    with open(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > METRICS_BYTES:
            raise too_long(str(path), METRICS_BYTES)
        number = 0
        while line := file.readline(DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > DOCUMENT_BYTES:
                raise too_long(f"line {number} of {path}", DOCUMENT_BYTES)
            if line.strip():
                document, record = _parse(line)
                yield MetricsLine(
                    number=number,
                    content=line.removesuffix(b"\n"),
                    is_whole=line.endswith(b"\n"),
                    document=document,
                    record=record,
                )


def _parse(line: bytes) -> tuple[dict[str, Any], TrainLine | EvalLine | None]:
    """Document and record; ({}, None) of a spoiled line."""
    try:
        document = parse_json(line, finite=False)
        kind = document["kind"]
        return document, _KINDS[kind].model_validate(document) if kind in _KINDS else None
    except (ValueError, KeyError, TypeError):  # pydantic's ValidationError is a ValueError
        return {}, None


def told_spoiled(numbers: Sequence[int]) -> str:
    """The subject and verb of a sentence about spoiled lines."""
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (" ..." if len(numbers) > _SHOWN else "")
    return f"{len(numbers)} of its lines cannot be read (line {shown}) and are"
