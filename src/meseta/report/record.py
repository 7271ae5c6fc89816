"""Typed records of the files in a run folder. Missing and invalid files are recorded as problems."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from meseta.config import former_keys
from meseta.config.load import get_value
from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.spec import MesetaError, Plan
from meseta.spec.plan import PLAN_FILE, read_explicit_plan
from meseta.system.files import parse_json, read_bounded
from meseta.system.yaml_text import parse_yaml
from meseta.telemetry.continued import HistoryLine
from meseta.telemetry.history import HISTORY_FILE, read_history
from meseta.telemetry.metrics_file import METRICS_FILE, EvalLine, TrainLine, corrupt_lines_message, read_metrics_lines
from meseta.telemetry.summary import (
    ENVIRONMENT_FILE,
    SUMMARY_FILE,
    TRIALS_FILE,
    BestEvaluation,
    RunEnvironment,
    RunSummary,
    TrialsRecord,
)
from meseta.telemetry.timeline import TIMELINE_FILE, Timeline, TraceDocument

RUN_FILES = ("config.yaml", DATASET_FILE, PLAN_FILE, ENVIRONMENT_FILE, METRICS_FILE, SUMMARY_FILE)
# A prepared dataset has none of these files, so one of them identifies a run folder.
_RUN_MARKER_FILES = ("config.yaml", PLAN_FILE, METRICS_FILE, SUMMARY_FILE)


@dataclass(frozen=True)
class FileProblem:
    """Reason why a file of a run, or a part of it, is not shown."""

    kind: Literal["missing", "unreadable", "invalid"]
    """`unreadable` if reading the file failed, `invalid` if its content is wrong."""
    text: str
    """Description that follows the name of the file. It starts in lower case and has no full stop."""


Problems = dict[str, FileProblem]
"""Name of a file -> its problem."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of the files of a run. The field of a missing or invalid file is `None` or empty."""

    name: str
    """Name of the run folder."""
    config_text: str | None
    """Text of config.yaml."""
    config: dict[str, Any]
    """Parsed content of config.yaml. Empty if the file is missing or invalid."""
    dataset: Dataset | None
    plan: Plan | None
    environment: RunEnvironment | None
    summary: RunSummary | None
    train_lines: tuple[TrainLine, ...]
    """Lines about training, one per step, in the order of steps."""
    eval_lines: tuple[EvalLine, ...]
    """Lines about evaluations, one per step and split, in the order of steps."""
    timeline: Timeline | None
    """Timeline of profiled steps. `None` if no step was profiled."""
    trials: TrialsRecord | None
    """Trials before the run. `None` if there were none."""
    history: tuple[HistoryLine, ...]
    """Runs of the chain, the oldest first. Empty if the run does not continue from another one."""
    problems: Problems

    @property
    def is_unfinished(self) -> bool:
        """Whether the run has not ended. A run writes summary.json at its end."""
        problem = self.problems.get(SUMMARY_FILE)
        return problem is not None and problem.kind == "missing"

    def is_best(self, line: EvalLine) -> bool:
        """Whether an evaluation is the best one according to the summary. `False` if the run has not ended."""
        best = self.summary.best if self.summary else BestEvaluation()
        return (line.step, line.split) == (best.step, best.split)

    def config_value(self, path: str) -> Any:
        """Return the value at a dotted path of the config, or `None` if it is not set."""
        return get_value(self.config, path)


def read_run(run_dir: Path) -> RunRecord:
    """Read the files of a run folder. Raises MesetaError if the folder contains no run."""
    if not run_dir.is_dir():
        raise MesetaError(f"report: {str(run_dir)!r} is not a folder; pass the run_dir of a training run")
    if not any((run_dir / name).is_file() for name in _RUN_MARKER_FILES):
        raise MesetaError(
            f"report: folder {str(run_dir)!r} contains no run, because it has none of the files "
            f"{', '.join(_RUN_MARKER_FILES)}; pass the run_dir of a training run"
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
        trials=_read_optional(run_dir, TRIALS_FILE, TrialsRecord, problems),
        history=_read_history(run_dir, problems),
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
        return FileProblem("missing", "not in the run folder")
    return FileProblem("unreadable", f"cannot be read: {error.strerror}")


def _invalid(text: str) -> FileProblem:
    return FileProblem("invalid", text)


def _read_json(run_dir: Path, name: str, problems: Problems) -> Any:
    content = _read_file(run_dir, name, problems)
    if content is None:
        return None
    try:
        return parse_json(content, finite=False)
    except ValueError as error:
        problems[name] = _invalid(f"not valid JSON: {error}")
        return None


T = TypeVar("T", bound=BaseModel)


def _read_record(run_dir: Path, name: str, kind: type[T], problems: Problems) -> T | None:
    document = _read_json(run_dir, name, problems)
    if document is None:
        # The file contains null, unless reading it has already recorded a problem.
        problems.setdefault(name, _invalid("contains no values"))
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
    problems.setdefault(PLAN_FILE, _invalid("not a mapping"))
    return None


def _read_timeline(run_dir: Path, problems: Problems) -> Timeline | None:
    document = _read_optional(run_dir, TIMELINE_FILE, TraceDocument, problems)
    return None if document is None else document.to_timeline()


def _read_history(run_dir: Path, problems: Problems) -> tuple[HistoryLine, ...]:
    try:
        return read_history(run_dir)
    except MesetaError as error:
        problems[HISTORY_FILE] = _invalid(str(error))
        return ()


def _read_optional(run_dir: Path, name: str, kind: type[T], problems: Problems) -> T | None:
    # A missing file is not a problem, because most runs profile no step and have no trials.
    return _read_record(run_dir, name, kind, problems) if os.path.lexists(run_dir / name) else None


def _validation_message(error: ValidationError) -> str:
    # One of several errors is enough to explain why the file is not shown.
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
    """Return the lines about training and those about evaluations, sorted by step."""
    # A killed run may leave a partial line. A resumed run repeats steps, and its lines replace the earlier ones.
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
    """Return (key, value) pairs of nested mappings. Nested keys are joined by dots."""
    pairs: list[tuple[str, Any]] = []
    for key, item in value.items():
        if isinstance(item, dict):
            pairs += flatten(item, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", item))
    return pairs


def format_value(value: Any) -> str:
    """Format a YAML or JSON value on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value)
    return re.sub(r"\s+", " ", str(value))
