"""Folder of a suite, with the runs that it has and those that are done."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from meseta.config import RunConfig, read_config_document, set_default, validate_document
from meseta.data import Dataset
from meseta.spec import MesetaError
from meseta.system import write_atomic
from tools.quality.comparison import ConfigScores, EvalDataset, SeedScore
from tools.quality.suite import QualitySuite, SuiteDataset, SuiteEntry, SuiteWorld, folder_name
from tools.quality.worlds import BEST_FILE, ROWS_FOLDER

_FORMAT = "meseta.quality/1"
FORMER_FORMULA, FORMULA = "meseta.train.quality.formula:LearnedFormula", "tools.quality.formula:LearnedFormula"
"""Former and current import path of the model that knows the formula of a world."""


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """One training run of a suite."""

    eval_dataset: EvalDataset
    name: str
    """Name of the config."""
    config: Path
    """Config file with the settings that all runs of this config share."""
    number: int
    """Index of a trial, or the seed of a run that reads the test split."""
    settings: Mapping[str, Any]
    """Values of the tuned keys."""
    run_dir: Path
    seed: int
    data: Path
    """Dataset folder."""
    truth: Path | None
    """World folder with the true probabilities. `None` for a dataset, for which they are unknown."""
    reads_test: bool
    """Whether the run has the selected settings and is scored on the test split. Otherwise it is a trial."""

    @property
    def overrides(self) -> list[str]:
        """Arguments of `meseta train`."""
        folders = {"run_dir": str(self.run_dir), "data.dir": str(self.data)}
        return [*to_overrides({**self.settings, **folders}), f"seed={self.seed}"]

    @property
    def log(self) -> Path:
        """File with the output of the run."""
        return self.run_dir.with_suffix(".log")

    @property
    def score_file(self) -> Path:
        """File with the score on the test split."""
        return self.run_dir.with_suffix(".json")

    @property
    def logits_file(self) -> Path:
        """File with the predictions of the test split, for resampling."""
        return self.run_dir.with_suffix(".npz")

    @property
    def title(self) -> str:
        """One-line description of the run."""
        what = f"seed {self.seed}" if self.reads_test else f"trial {self.number + 1} ({format_settings(self.settings)})"
        return f"{self.eval_dataset.name}, {self.name}, {what}"

    def check_settings(self) -> None:
        """Raise MesetaError if the run folder was trained with other settings. Writes the settings if there are none
        yet."""
        write_or_verify(self.run_dir.with_suffix(".settings.json"), {"settings": self.settings, "seed": self.seed})

    def read_summary(self) -> dict[str, Any] | None:
        """Return the summary of the training run, or `None` if it is not complete."""
        with suppress(FileNotFoundError, NotADirectoryError, ValueError):
            summary = json.loads((self.run_dir / "summary.json").read_bytes())
            if isinstance(summary, dict) and (summary.get("valid") or summary.get("test")):
                return summary
        return None

    def valid_metric(self, name: str) -> float | None:
        """Return a metric on the validation split, or `None` if it is undefined or the run is not complete."""
        value = ((self.read_summary() or {}).get("valid") or {}).get(name)
        return value if isinstance(value, int | float) and not math.isnan(value) else None

    def is_done(self) -> bool:
        """Whether the run is complete: scored if it reads the test split, else trained."""
        return (self.score() if self.reads_test else self.read_summary()) is not None

    def score(self) -> SeedScore | None:
        """Return the score, or `None` if there is none yet."""
        with suppress(FileNotFoundError, ValidationError):
            return SeedScore.model_validate_json(self.score_file.read_bytes())
        return None

    def delete_checkpoints(self) -> None:
        """Delete the checkpoints of the run, which are no longer needed."""
        shutil.rmtree(self.run_dir / "checkpoints", ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class SuiteRound:
    """Runs of a suite that read the same rows."""

    world: SuiteWorld | None
    """World that the rows are drawn from, or `None` for a dataset."""
    seed: int
    folder: Path
    """Folder of the world or dataset."""
    runs: tuple[SuiteRun, ...]

    def pending_runs(self) -> list[SuiteRun]:
        """Return the runs that are not done. Raises MesetaError if a run was trained with other settings."""
        for run in self.runs:
            run.check_settings()
        return [run for run in self.runs if not run.is_done()]

    @property
    def needs_rows(self) -> bool:
        """Whether the rows of the world have to be made first."""
        return self.world is not None and not self.folder.is_dir()

    def delete_rows_and_weights(self) -> None:
        """Delete the rows of a world, and the checkpoints of the runs that are done."""
        for run in self.runs:
            if run.is_done():
                run.delete_checkpoints()
        if self.world is not None:  # The rows of a world can be made again.
            shutil.rmtree(self.folder, ignore_errors=True)


class Study:
    """Suite and the folder with its results."""

    def __init__(self, suite: QualitySuite, name: str, out: Path) -> None:
        self.suite, self.name, self.out = suite, name, out

    def open(self) -> None:
        """Create the folder, or continue with an existing one. Nothing is created if a config is invalid.

        Raises MesetaError if a config is invalid, a dataset lacks a split, or the folder has runs of other settings.
        """
        custom_code = set[str]()
        documents = {name: self._config_document(name, custom_code) for name in self.suite.configs}
        for dataset in self.suite.datasets:
            _check_splits(dataset.dir)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MesetaError(
                f"quality: folder {str(self.out)!r} cannot be created: {error.strerror}; choose another --out"
            ) from None
        for entry in self.suite.entries:
            folder = self._entry_folder(entry)
            write_or_verify(folder / "ground.json", _describe_rows(entry))
            for name in self.suite.config_names(entry):
                document = documents[name]
                config = folder / folder_name(name) / "config.yaml"
                write_or_verify(config.with_name("document.json"), document)
                write_atomic(config, yaml.safe_dump(document, sort_keys=False))
        for path in sorted(custom_code):
            print(f"note: {path!r} runs the code of module {path.partition(':')[0]!r}", file=sys.stderr)

    def _config_document(self, name: str, custom_code: set[str]) -> dict[str, Any]:
        """Return the settings shared by all runs of a config. All trials are validated.

        Import paths of custom models and optimizers are added to `custom_code`. Raises MesetaError with the name of the
        config.
        """
        base = self.suite.configs[name].base
        assert base is not None  # Validated by QualitySuite.
        fixed = to_overrides(self.suite.fixed_settings(name))
        for settings in self.suite.trial_settings(name) or [{}]:
            where = f"quality: config {name!r}{f' ({format_settings(settings)})' if settings else ''}"
            overrides = to_overrides({**settings, "run_dir": "run", "data.dir": "data"})
            try:
                config = validate_document(read_config_document(base, [*fixed, *overrides]))
            except MesetaError as error:
                raise MesetaError(f"{where}: {error}") from None
            custom_code |= _custom_names(config)
        document = read_config_document(base, fixed)
        for section, key in ((document, "run_dir"), (document, "seed"), (document.get("data"), "dir")):
            if isinstance(section, dict):
                section.pop(key, None)
        set_default(document, "num_threads", 1)
        return _to_json_types(document)

    @property
    def num_runs(self) -> int:
        """Total number of runs."""
        num_configs = sum(len(self.suite.config_names(entry)) for entry in self.suite.entries)
        return num_configs * (self.suite.trials + self.suite.seeds)

    def rounds(self) -> Iterator[SuiteRound]:
        """Yield all rounds: for each world or dataset, first the trials, then one round per fresh seed.

        Request a round only after the previous rounds are done, because fresh rounds use the settings that the trials
        selected.
        """
        for entry in self.suite.entries:
            if self.suite.trials:
                yield self.tuning_round(entry)
            for seed in self.suite.fresh_seeds:
                yield self.fresh_round(entry, seed)

    def tuning_round(self, entry: SuiteEntry) -> SuiteRound:
        """Return the trials of all configs, interleaved so that all configs progress equally."""
        of_configs = [self._trials(entry, name) for name in self.suite.config_names(entry)]
        runs = [run for of_number in zip(*of_configs, strict=True) for run in of_number]
        return self._make_round(entry, self.suite.first_seed, runs)

    def _trials(self, entry: SuiteEntry, name: str) -> list[SuiteRun]:
        settings = self.suite.trial_settings(name)
        return [self._make_run(entry, name, trial_settings, number) for number, trial_settings in enumerate(settings)]

    def fresh_round(self, entry: SuiteEntry, seed: int) -> SuiteRound:
        """Return one run per config with its selected settings. Configs without a finished trial are omitted."""
        runs = []
        for name in self.suite.config_names(entry):
            chosen = self.best_settings(entry, name)
            if chosen is not None:
                runs.append(self._make_run(entry, name, chosen, seed, reads_test=True))
        return self._make_round(entry, seed, runs)

    def _make_round(self, entry: SuiteEntry, seed: int, runs: Sequence[SuiteRun]) -> SuiteRound:
        world = entry if isinstance(entry, SuiteWorld) else None
        return SuiteRound(world=world, seed=seed, folder=self._rows_folder(entry, seed), runs=tuple(runs))

    def _rows_folder(self, entry: SuiteEntry, seed: int) -> Path:
        return entry.dir if isinstance(entry, SuiteDataset) else self._entry_folder(entry) / f"world-{seed}"

    def _entry_folder(self, entry: SuiteEntry) -> Path:
        return self.out / folder_name(entry.eval_dataset.name)

    def _make_run(
        self, entry: SuiteEntry, name: str, settings: Mapping[str, Any], number: int, *, reads_test: bool = False
    ) -> SuiteRun:
        """Create a run. `number` is the index of a trial, or the seed of a run that reads the test split."""
        folder = self._entry_folder(entry) / folder_name(name)
        seed = number if reads_test else self.suite.first_seed
        rows = self._rows_folder(entry, seed)
        is_world = isinstance(entry, SuiteWorld)
        return SuiteRun(
            eval_dataset=entry.eval_dataset,
            name=name,
            config=folder / "config.yaml",
            number=number,
            settings=settings,
            run_dir=folder / (f"seed-{seed}" if reads_test else f"trial-{number:03d}"),
            seed=seed,
            data=rows / ROWS_FOLDER if is_world else rows,
            truth=rows if is_world else None,
            reads_test=reads_test,
        )

    def best_settings(self, entry: SuiteEntry, name: str) -> dict[str, Any] | None:
        """Return the settings of the trial with the best validation metric, or `None` if no trial has one."""
        if not self.suite.trials:
            return {}
        metric = self.suite.choose_by
        sign = -1.0 if metric in ("auc", "pr_auc") else 1.0
        trials = [(sign * value, run) for run in self._trials(entry, name)
                  if (value := run.valid_metric(metric)) is not None]  # fmt: skip
        return dict(min(trials, key=lambda trial: (trial[0], trial[1].number))[1].settings) if trials else None

    def first_runs(self, entry: SuiteEntry) -> list[SuiteRun]:
        """Return one run of each config on a world or dataset."""
        settings = {name: (self.suite.trial_settings(name) or [{}])[0] for name in self.suite.config_names(entry)}
        return [self._make_run(entry, name, first_settings, 0) for name, first_settings in settings.items()]

    def scored_runs(self, entry: SuiteEntry, name: str) -> dict[int, SuiteRun]:
        """Return the scored runs of a config by seed."""
        chosen = self.best_settings(entry, name)
        if chosen is None:
            return {}
        runs = {seed: self._make_run(entry, name, chosen, seed, reads_test=True) for seed in self.suite.fresh_seeds}
        return {seed: run for seed, run in runs.items() if run.is_done()}

    def scores(self) -> list[tuple[EvalDataset, list[ConfigScores]]]:
        """Return (dataset, scores of its configs) for all runs that are done, in the order of the suite."""
        return [
            (
                self._with_best_reachable(entry),
                [self._config_scores(entry, name) for name in self.suite.config_names(entry)],
            )
            for entry in self.suite.entries
        ]

    def _config_scores(self, entry: SuiteEntry, name: str) -> ConfigScores:
        runs = self.scored_runs(entry, name)
        scores = {seed: score for seed, run in runs.items() if (score := run.score()) is not None}
        return ConfigScores(name=name, scores=scores, chosen_settings=self.best_settings(entry, name) or {})

    def save_best_reachable(self, one: SuiteRound) -> None:
        """Save the metrics of a world's true probabilities outside of the world's folder, which is deleted later."""
        if one.world is not None:
            write_atomic(self._best_file(one.world, one.seed), (one.folder / BEST_FILE).read_text())

    def _with_best_reachable(self, entry: SuiteEntry) -> EvalDataset:
        # Metrics of the true probabilities, averaged over the fresh seeds.
        files = [self._best_file(entry, seed) for seed in self.suite.fresh_seeds]
        reached = [json.loads(file.read_bytes()) for file in files if file.exists()]
        means = {name: sum(one[name] for one in reached) / len(reached) for name in (reached[0] if reached else ())}
        return replace(entry.eval_dataset, best_reachable=means)

    def _best_file(self, entry: SuiteEntry, seed: int) -> Path:
        return self._entry_folder(entry) / f"world-{seed}-{BEST_FILE}"


def to_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return config keys and values as arguments of `meseta train`."""
    return [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]


def format_settings(settings: Mapping[str, Any]) -> str:
    """Format config keys and values in one line."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def _custom_names(config: RunConfig) -> set[str]:
    optimizers = [config.embedding.optimizer, *(table.optimizer for table in config.embedding.tables.values())]
    names = {config.model.name, *(optimizer.name for optimizer in optimizers if optimizer is not None)}
    return {name for name in names if ":" in name}


def write_or_verify(file: Path, document: Mapping[str, Any]) -> None:
    """Write `document` to `file`, or check that an existing file has the same content. Raises MesetaError if it
    differs."""
    document = _to_json_types({"format": _FORMAT, **document})
    try:
        text = file.read_text()
    except FileNotFoundError:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(document, indent=1) + "\n")
        return
    with suppress(ValueError):
        if json.loads(text.replace(FORMER_FORMULA, FORMULA)) == document:
            return
    raise MesetaError(
        f"quality: folder {str(file.parent)!r} has results of other settings; delete it, or choose another --out"
    )


def _to_json_types(document: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(document, default=str)))


def _describe_rows(entry: SuiteEntry) -> dict[str, Any]:
    # The document differs if the rows of a world or dataset differ.
    if isinstance(entry, SuiteWorld):
        return entry.model_dump(mode="json")
    dataset = Dataset.load(entry.dir)
    return {
        "rows": {name: [split.num_rows, split.num_positives] for name, split in dataset.splits.items()},
        "dense": [feature.name for feature in dataset.dense],
        "sparse": [feature.name for feature in dataset.sparse],
    }


def _check_splits(folder: Path) -> None:
    dataset = Dataset.load(folder)
    for split in ("valid", "test"):
        if split not in dataset.splits or not dataset.splits[split].num_rows:
            raise MesetaError(
                f"quality: dataset {str(folder)!r} must have rows in the split {split}; prepare it "
                f"with --{split}-fraction 0.1"
            )
