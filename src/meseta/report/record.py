"""The files of a run directory as typed records. A file that is absent or broken is named and does without."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from meseta.config import former_keys
from meseta.config.load import get_value
from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.machine.files import parse_json, read_bounded
from meseta.machine.yaml_text import parse_yaml
from meseta.spec import MesetaError, Plan
from meseta.spec.plan_document import PLAN_FILE, read_explicit_plan
from meseta.telemetry.metrics_file import METRICS_FILE, EvalLine, TrainLine, corrupt_lines_message, read_metrics_lines
from meseta.telemetry.summary import ENVIRONMENT_FILE, SUMMARY_FILE, BestEvaluation, RunEnvironment, RunSummary
from meseta.telemetry.timeline import TIMELINE_FILE, Timeline
from meseta.telemetry.trace_events import TraceDocument

RUN_FILES = ("config.yaml", DATASET_FILE, PLAN_FILE, ENVIRONMENT_FILE, METRICS_FILE, SUMMARY_FILE)
_RUN_MARKER_FILES = ("config.yaml", PLAN_FILE, METRICS_FILE, SUMMARY_FILE)  # no prepared dataset has these


@dataclass(frozen=True)
class FileProblem:
    """A reason why the page does without a file of a run, or without a part of it."""

    kind: Literal["missing", "unreadable", "invalid"]
    """`unreadable` if the system cannot read the file, `invalid` if its content is wrong."""
    text: str
    """In lower case and without a full stop."""


Problems = dict[str, FileProblem]
"""By file name."""


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
    plan: Plan | None
    environment: RunEnvironment | None
    summary: RunSummary | None
    train_lines: tuple[TrainLine, ...]
    """By step; where a resumed run repeated a step, its later line."""
    eval_lines: tuple[EvalLine, ...]
    """As `train`, one per step and split."""
    timeline: Timeline | None
    """None where no step was profiled."""
    problems: Problems

    @property
    def is_unfinished(self) -> bool:
        """Whether there is no summary.json, which a run writes at its end."""
        problem = self.problems.get(SUMMARY_FILE)
        return problem is not None and problem.kind == "missing"

    def is_best(self, line: EvalLine) -> bool:
        """Whether an evaluation is the best of those that chose; known when a run has ended."""
        best = self.summary.best if self.summary else BestEvaluation()
        return (line.step, line.split) == (best.step, best.split)

    def config_value(self, path: str) -> Any:
        """A value of the config by its dotted path; None where it is absent."""
        return get_value(self.config, path)


def read_run(run_dir: Path) -> RunRecord:
    """Read whatever is there; raises MesetaError for a directory that is not a run's."""
    if not run_dir.is_dir():
        raise MesetaError(f"report: {str(run_dir)!r} is not a directory; give the run_dir of a training run")
    if not any((run_dir / name).is_file() for name in _RUN_MARKER_FILES):
        raise MesetaError(
            f"report: {str(run_dir)!r} holds no run: none of {', '.join(_RUN_MARKER_FILES)} is there; "
            "give the run_dir of a training run"
        )
    problems: Problems = {}
    config = _read_file(run_dir, "config.yaml", problems)
    config_text = None if config is None else config.decode(errors="replace")
    train, evals = _read_metrics(run_dir, problems)
    return RunRecord(
        name=run_dir.resolve().name,
        config_text=config_text,
        config=_parse_config(config_text, problems),
        dataset=_read_record(run_dir, DATASET_FILE, Dataset, problems),
        plan=_read_plan(run_dir, problems),
        environment=_read_record(run_dir, ENVIRONMENT_FILE, RunEnvironment, problems),
        summary=_read_record(run_dir, SUMMARY_FILE, RunSummary, problems),
        train_lines=train,
        eval_lines=evals,
        timeline=_read_timeline(run_dir, problems),
        problems=problems,
    )


def _read_file(run_dir: Path, name: str, problems: Problems) -> bytes | None:
    try:
        return read_bounded(run_dir / name)
    except OSError as error:
        problems[name] = _unreadable_reason(error)
    return None


def _unreadable_reason(error: OSError) -> FileProblem:
    if isinstance(error, FileNotFoundError):
        return FileProblem("missing", "it is not in the run directory")
    return FileProblem("unreadable", f"it cannot be read: {error.strerror}")


def _invalid(text: str) -> FileProblem:
    return FileProblem("invalid", text)


def _read_json(run_dir: Path, name: str, problems: Problems) -> Any:
    content = _read_file(run_dir, name, problems)
    if content is None:
        return None
    try:
        return parse_json(content, finite=False)
    except ValueError as error:
        problems[name] = _invalid(f"it is not valid JSON: {error}")
        return None


T = TypeVar("T", bound=BaseModel)


def _read_record(run_dir: Path, name: str, kind: type[T], problems: Problems) -> T | None:
    document = _read_json(run_dir, name, problems)
    if document is None:
        problems.setdefault(name, _invalid("it holds nothing"))
        return None
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        problems[name] = _invalid(_validation_message(error))
        return None


def _read_plan(run_dir: Path, problems: Problems) -> Plan | None:
    document = _read_json(run_dir, PLAN_FILE, problems)
    if isinstance(document, dict):
        try:
            return read_explicit_plan(document)[0]
        except MesetaError as error:
            problems[PLAN_FILE] = _invalid(str(error))
    problems.setdefault(PLAN_FILE, _invalid("it does not hold a mapping"))
    return None


def _read_timeline(run_dir: Path, problems: Problems) -> Timeline | None:
    """None without a problem where there is no such file: most runs have none."""
    if not os.path.lexists(run_dir / TIMELINE_FILE):
        return None
    document = _read_record(run_dir, TIMELINE_FILE, TraceDocument, problems)
    return None if document is None else document.to_timeline()


def _validation_message(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return f"key {key!r}: {first['msg'].lower()}" if key else first["msg"].lower()


def _parse_config(content: str | None, problems: Problems) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        document = parse_yaml(content)
        if not isinstance(document, dict):
            return {}
        former_keys.rename_keys(document, warns=False)
    except MesetaError as error:
        problems["config.yaml"] = _invalid(str(error))
        return {}
    former_keys.rename_values(document, warns=False)
    return document


def _read_metrics(run_dir: Path, problems: Problems) -> tuple[tuple[TrainLine, ...], tuple[EvalLine, ...]]:
    """Lines by step. A killed run may leave half a line, and a resumed one repeats steps: the later line wins."""
    train: dict[int, TrainLine] = {}
    evals: dict[tuple[int, str], EvalLine] = {}
    spoiled = []
    try:
        for line in read_metrics_lines(run_dir / METRICS_FILE):
            if isinstance(line.record, TrainLine):
                train[line.record.step] = line.record
            elif isinstance(line.record, EvalLine):
                evals[line.record.step, line.record.split] = line.record
            elif line.is_corrupt:
                spoiled.append(line.number)
    except OSError as error:
        problems[METRICS_FILE] = _unreadable_reason(error)
    if spoiled:
        problems[METRICS_FILE] = _invalid(f"{corrupt_lines_message(spoiled)} left out")
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
