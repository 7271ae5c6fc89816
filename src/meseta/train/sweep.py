"""Sweeps: one run per combination of settings, ranked by a metric."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from meseta.config import RunConfig, read_config_document, validate_document
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.encoding import DatasetEncoding, encoding_difference, row_difference
from meseta.spec import MesetaError
from meseta.system.files import parse_json, path_exists, read_if_exists, to_json_types, write_atomic
from meseta.system.user_code import log_user_code
from meseta.system.yaml_text import parse_yaml
from meseta.telemetry.detail import CurrentDetail
from meseta.telemetry.metrics import HIGHER_IS_BETTER, TEST, VALID, validation_split
from meseta.telemetry.summary import RunSummary, TrialEntry, TrialsRecord, read_summary
from meseta.train.setup.source import make_row_source

_FORMAT = "meseta.sweep/1"
RANKING_METRICS = ("ne", "auc", "logloss", "pr_auc")
"""Metrics that trials can be ranked by."""
DISTRIBUTIONS = ("uniform", "loguniform", "randint")
_DISTRIBUTION_PATTERN = re.compile(rf"({'|'.join(DISTRIBUTIONS)})\(([^,()]+),([^,()]+)\)")
MAX_COMPARED = 8
"""Number of best trials on the comparison page."""


@dataclass(frozen=True)
class Choices:
    """List of values to choose from."""

    values: tuple[Any, ...]

    def sample(self, source: random.Random) -> Any:
        """Draw one of the values, all with equal probability."""
        return self.values[source.randrange(len(self.values))]


@dataclass(frozen=True)
class Range:
    """Interval of numbers, including both bounds."""

    kind: str
    """'uniform', 'loguniform' (uniform in the logarithm) or 'randint' (integers)."""
    low: float
    high: float

    def sample(self, source: random.Random) -> Any:
        """Draw a number. It is rounded to six significant digits, so that tables can show it completely."""
        if self.kind == "randint":
            return source.randint(int(self.low), int(self.high))
        if self.kind == "loguniform":
            return float(f"{math.exp(source.uniform(math.log(self.low), math.log(self.high))):.6g}")
        return float(f"{source.uniform(self.low, self.high):.6g}")


SearchSpace = Mapping[str, Choices | Range]


def parse_space(settings: Sequence[str]) -> tuple[dict[str, Choices | Range], list[str]]:
    """Split settings into (searched keys with their values, fixed settings).

    `key=[a, b]` lists choices, and `key=loguniform(1e-4, 0.1)` defines a range. All others are fixed.
    Raises MesetaError if a list is empty, bounds are invalid, a key occurs twice, or no key is searched.
    """
    space: dict[str, Choices | Range] = {}
    fixed = []
    for setting in settings:
        key, entry = parse_setting(setting)
        if entry is None:
            fixed.append(setting)
        elif key in space:
            raise MesetaError(f"sweep: setting {key!r} occurs twice; put all of its values into one list")
        else:
            space[key] = entry
    if not space:
        raise MesetaError(
            "sweep: no setting is searched; add choices such as 'dense.optimizer.lr=[0.001,0.01]', or with --random a "
            "range such as 'dense.optimizer.lr=loguniform(1e-4,1e-1)'"
        )
    return space, fixed


def parse_setting(setting: str) -> tuple[str, Choices | Range | None]:
    """Parse `key=[a, b]` or `key=loguniform(a, b)` to (key, values), with `None` for other settings. Raises MesetaError
    for an empty list or invalid bounds."""
    key, equals, text = (part.strip() for part in setting.partition("="))
    drawn = _DISTRIBUTION_PATTERN.fullmatch(text)
    if equals and drawn:
        return key, _parse_range(setting, *drawn.groups())
    if not equals or not text.startswith("["):
        return key, None
    try:
        values = parse_yaml(text)
        json.dumps(values)
    except (MesetaError, TypeError):  # YAML has dates, which are not valid in JSON.
        raise MesetaError(f"sweep: {setting!r} is not a list; write it as '{key}=[a, b, c]'") from None
    if not isinstance(values, list) or not values:
        raise MesetaError(f"sweep: {setting!r} has no values; write it as '{key}=[a, b, c]'")
    return key, Choices(tuple(values))


def _parse_range(setting: str, kind: str, low: str, high: str) -> Range:
    try:
        bounds = Range(kind, float(low), float(high))
    except ValueError:
        raise MesetaError(f"sweep: {setting!r} must have two numbers as bounds") from None
    finite = math.isfinite(bounds.low) and math.isfinite(bounds.high)
    if not finite or bounds.low > bounds.high or (kind == "loguniform" and bounds.low <= 0):
        least = ", and it must be above 0" if kind == "loguniform" else ""
        raise MesetaError(f"sweep: {setting!r} must have its lower bound first{least}")
    if kind == "randint" and not (bounds.low.is_integer() and bounds.high.is_integer()):
        raise MesetaError(f"sweep: {setting!r} must have integers as bounds")
    return bounds


def grid_settings(space: SearchSpace) -> list[dict[str, Any]]:
    """Return all combinations of `space`, the last key changing fastest. Raises MesetaError if a key has a range."""
    values = []
    for key, entry in space.items():
        if not isinstance(entry, Choices):
            raise MesetaError(f"sweep: {key!r} has a range, which a grid cannot go through; add --random --trials N")
        values.append(entry.values)
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


def random_settings(space: SearchSpace, num_trials: int, seed: int) -> list[dict[str, Any]]:
    """Return `num_trials` samples of `space`. More trials extend the list, as seed, key and index determine a value."""
    return [
        {key: entry.sample(random.Random(f"{seed}/{number}/{key}")) for key, entry in space.items()}
        for number in range(num_trials)
    ]


@dataclass(frozen=True)
class SweepTrial:
    """One run of a sweep."""

    number: int
    settings: Mapping[str, Any]
    """Values of the searched keys."""
    run_dir: Path

    @property
    def overrides(self) -> list[str]:
        """Arguments of `meseta train`."""
        settings = [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]
        return [*settings, f"run_dir={json.dumps(str(self.run_dir))}"]

    @property
    def title(self) -> str:
        """Settings of the trial in one line."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    def summary(self) -> RunSummary | None:
        """Return the content of summary.json, or `None` if the run is not finished."""
        summary = read_summary(self.run_dir)
        return summary if summary is not None and summary.evaluated_splits else None


@dataclass(frozen=True)
class Sweep:
    """Folder with trials of one config."""

    out: Path
    config: Path
    """Config file with the settings that all trials share, in `out`."""
    trials: tuple[SweepTrial, ...]

    def log(self, trial: SweepTrial) -> Path:
        """Return the file with the output of a trial."""
        return self.out / f"{trial.run_dir.name}.log"


def open_sweep(
    out: Path, config: Path, fixed: Sequence[str], settings: Sequence[Mapping[str, Any]], *, allow_growth: bool
) -> Sweep:
    """Create the folder of a sweep, or continue with an existing one. Nothing is created if a trial's config is
    invalid.

    With `allow_growth`, the folder may have more or fewer trials if the common ones agree.
    Raises MesetaError, with the name of the trial, if a config is invalid, or the folder belongs to another sweep.
    """
    document = read_config_document(config, fixed)
    document.pop("run_dir", None)
    common = out / "config.yaml"
    trials = tuple(SweepTrial(n, all_settings, out / f"trial-{n:03d}") for n, all_settings in enumerate(settings))
    custom_code: dict[str, str] = {}
    for trial in trials:
        try:
            chosen = validate_document(read_config_document(config, [*fixed, *trial.overrides]), config)
            _check_same_data(trial, chosen)
            for key in ("dir", "mirror"):
                if getattr(chosen.checkpoint, key) is not None:
                    raise MesetaError(f"checkpoint.{key} would be shared by all trials; remove it")
            custom_code |= find_custom_code(chosen)
        except MesetaError as error:
            raise MesetaError(f"sweep: trial {trial.number} ({trial.title}): {error}") from None
    record = {"format": _FORMAT, "config": to_json_types(document)}
    all_settings = [dict(trial.settings) for trial in trials]
    before = _read_sweep(out)
    if before is not None:
        num_common = (
            min(len(all_settings), len(before["trials"]))
            if allow_growth
            else max(len(all_settings), len(before["trials"]))
        )
        for name, same in (
            ("config", before.get("config") == record["config"]),
            ("trials", before["trials"][:num_common] == to_json_types(all_settings)[:num_common]),
        ):
            if not same:
                raise MesetaError(
                    f"sweep: folder {str(out)!r} has a sweep with different {name}; choose another --out, or delete it"
                )
        all_settings += before["trials"][len(all_settings) :]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MesetaError(
            f"sweep: folder {str(out)!r} cannot be created: {error.strerror}; choose another --out"
        ) from None
    write_atomic(common, yaml.safe_dump(document, sort_keys=False))
    write_atomic(out / "sweep.json", json.dumps({**record, "trials": all_settings}, indent=1) + "\n")
    for path, what in custom_code.items():
        log_user_code(what, path.partition(":")[0])
    return Sweep(out=out, config=common, trials=trials)


def find_custom_code(config: RunConfig) -> dict[str, str]:
    """Return the import paths of a config, each with the setting that names it."""
    embedding = config.embedding
    optimizers = [embedding.optimizer, *(table.optimizer for table in embedding.tables.values())]
    names = {optimizer.name for optimizer in optimizers if optimizer is not None}
    settings = {config.model.name: f"model.name {config.model.name!r}"}
    settings |= {name: f"row optimizer {name!r}" for name in sorted(names)}
    return {path: what for path, what in settings.items() if ":" in path}


def _check_same_data(trial: SweepTrial, config: RunConfig) -> None:
    if trial.summary() is None:
        return
    try:
        before = Dataset.load(trial.run_dir)
        now = make_row_source(config.data).dataset().select(config.data.labels, config.data.without)
    except MesetaError:
        return  # Results of a finished sweep can be shown without the data.
    differs = encoding_difference(
        DatasetEncoding.from_dataset(before), DatasetEncoding.from_dataset(now)
    ) or row_difference(before, now)
    if differs is not None:
        raise MesetaError(
            f"the finished trial was trained on other data than {str(now.dir)!r}: {differs}; choose another --out, or "
            "delete it"
        )


def _read_sweep(out: Path) -> dict[str, Any] | None:
    file = out / "sweep.json"
    if not path_exists(file):
        return None
    content = read_if_exists(file)
    with suppress(ValueError, TypeError, KeyError):
        document = parse_json(content or b"")
        if document["format"] == _FORMAT and isinstance(document["trials"], list):
            return dict(document)
    raise MesetaError(f"sweep: file {str(file)!r} cannot be read; choose another --out, or delete it")


_SHOWN_METRICS = ("ne", "auc", "logloss")


@dataclass(frozen=True)
class TrialColumn:
    """Column of the tables of a sweep."""

    name: str
    kind: Literal["text", "metric", "speed", "value"] = "value"


PROBLEM = TrialColumn("problem", "text")


def metric_column(metric: str, split: str | None = None) -> TrialColumn:
    """Return the column of a metric of `split`. By default it is the split by which trials are ranked."""
    return TrialColumn(metric if split is None else f"{split} {metric}", "metric")


@dataclass(frozen=True)
class TrialResult:
    """Trial with its outcome."""

    trial: SweepTrial
    summary: RunSummary | None
    """Summary of the run, or `None` if it is not finished."""
    problem: str = ""
    """Reason why the trial is not finished."""

    @property
    def split(self) -> str:
        """Split by which the trial is ranked."""
        return validation_split(self.summary.evaluated_splits if self.summary else ())

    def metric(self, name: str, split: str | None = None) -> float | None:
        """Return a final metric of `split`, or `None` if it is undefined. By default it is the split by which trials
        are ranked."""
        line = self.summary and self.summary.evaluation(split or self.split)
        return line.metric(name) if line else None

    def cells(self) -> dict[TrialColumn, Any]:
        """Return the cells of a table row by column. Missing values are `None`."""
        return {
            TrialColumn("trial", "text"): self.trial.run_dir.name,
            **{TrialColumn(key): value for key, value in self.trial.settings.items()},
            **{metric_column(name): self.metric(name) for name in _SHOWN_METRICS},
            TrialColumn("steps"): self.summary and self.summary.num_steps,
            TrialColumn("samples_per_s", "speed"): self.summary and self.summary.samples_per_s,
            PROBLEM: self.problem,
        }


class TrialTable:
    """Table of trials on stdout, to which each finished trial adds a row. Prints nothing if the command is quiet."""

    def __init__(self, settings: Sequence[Mapping[str, Any]], metric: str) -> None:
        """Create the table of trials with `settings`, which all have the same keys, and a metric of evaluations."""
        self._cells = [
            [f"{number}/{len(settings)}", *map(str, trial.values())] for number, trial in enumerate(settings, start=1)
        ]
        self._names = ["trial", *settings[0], metric]
        self._widths = [max(map(len, column)) for column in zip(self._names[:-1], *self._cells, strict=True)]
        self._widths.append(max(len(metric), len("0.00000")))
        self.metric = metric
        self._best: float | None = None
        self._has_head = False

    def print_row(self, number: int, value: float | None, *notes: str) -> None:
        """Print a row with `notes` at its end for trial `number`, counted from 0, whose metric is `value`."""
        if CurrentDetail.is_quiet():
            return
        if not self._has_head:
            print(self._format(self._names))
            self._has_head = True
        is_best = self._is_best(value)
        self._best = value if is_best else self._best
        shown = format_cell(metric_column(self.metric), value)
        print(self._format([*self._cells[number], shown, *["best so far"] * is_best, *notes]), flush=True)

    def _is_best(self, value: float | None) -> bool:
        if value is None or math.isnan(value) or self._best is None:
            return value is not None and not math.isnan(value)
        return value > self._best if self.metric in HIGHER_IS_BETTER else value < self._best

    def _format(self, cells: Sequence[str]) -> str:
        in_columns = [f"{cell:>{width}}" for cell, width in zip(cells, self._widths, strict=False)]
        return "  ".join([*in_columns, *cells[len(self._widths) :]]).rstrip()


def rank_trials(results: Sequence[TrialResult], metric: str) -> list[TrialResult]:
    """Sort results by a metric, best first. Trials without the metric follow in their own order."""
    sign = -1.0 if metric in HIGHER_IS_BETTER else 1.0

    def key(result: TrialResult) -> tuple[bool, float, int]:
        value = result.metric(metric)
        missing = value is None or math.isnan(value)
        return missing, 0.0 if value is None or missing else sign * value, result.trial.number

    return sorted(results, key=key)


def table_rows(ranked: Sequence[TrialResult]) -> list[dict[TrialColumn, Any]]:
    """Return a table's rows by column. If ranked on the validation split, only the best trial has test metrics."""
    lines = []
    for place, result in enumerate(ranked, start=1):
        line = {TrialColumn("rank"): place, **result.cells()}
        if any(other.split == VALID for other in ranked):
            # Test metrics of several trials would invite a selection on the test split.
            metrics = {name: result.metric(name, TEST) if place == 1 else None for name in _SHOWN_METRICS}
            line |= {metric_column(name, TEST): value for name, value in metrics.items()}
        lines.append(line)
    return lines


def format_cell(column: TrialColumn, value: Any) -> str:
    """Format a cell for people."""
    if value is None:
        return ""
    if column.kind == "metric":
        return f"{value:.5f}"
    return f"{value:,.0f}" if column.kind == "speed" else str(value)


def write_tables(sweep: Sweep, ranked: Sequence[TrialResult]) -> None:
    """Write sweep.csv with all digits and sweep.md for people, each atomically. The best trial comes first."""
    cells = table_rows(ranked)
    names = [column.name for column in cells[0]]
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(row.values() for row in cells)
    write_atomic(sweep.out / "sweep.csv", table.getvalue())
    lines = [names, ["---"] * len(names)]
    lines += [[format_cell(column, value).replace("|", "\\|") for column, value in row.items()] for row in cells]
    write_atomic(sweep.out / "sweep.md", "".join(f"| {' | '.join(line)} |\n" for line in lines))


def write_page(sweep: Sweep, ranked: Sequence[TrialResult], metric: str) -> Path | None:
    """Write comparison.html with a list of trials ranked by `metric`, and a comparison of the best finished ones.
    Returns `None` if no trial is finished."""
    from meseta.report.comparison import compare_runs
    from meseta.report.comparison_page import write_comparison

    finished = [result.trial.run_dir for result in ranked if result.summary is not None]
    if not finished:
        return None
    trials = [
        TrialEntry(
            name=result.trial.run_dir.name,
            settings=dict(result.trial.settings),
            value=result.metric(metric),
            problem=result.problem,
        )
        for result in ranked
    ]
    has_best = len(ranked) > 1 and trials[0].value is not None
    record = TrialsRecord(metric=metric, split=ranked[0].split, selected=0 if has_best else None, trials=trials)
    return write_comparison(compare_runs(finished[:MAX_COMPARED]), sweep.out / "comparison.html", record)
