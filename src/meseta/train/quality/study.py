"""Folder of a suite, with the runs that it has and those that are done. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meseta.config import read_config_document, set_default, validate_document
from meseta.data.dataset.dataset import Dataset
from meseta.report.quality.suite_result import ConfigScores, EvalDataset, SeedScore
from meseta.spec import MesetaError
from meseta.system.files import parse_json, path_exists, read_bounded, read_if_exists, to_json_types, write_atomic
from meseta.system.user_code import log_user_code
from meseta.telemetry.metrics import TEST, VALID
from meseta.train.quality.suite import QualitySuite, SuiteDataset, SuiteEntry, SuiteWorld, folder_name
from meseta.train.quality.worlds import BEST_FILE, ROWS_FOLDER
from meseta.train.sweep import Trial, TrialResult, find_custom_code, rank_trials

_FORMAT = "meseta.quality/1"


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """One training run of a suite."""

    eval_dataset: EvalDataset
    name: str
    """Name of the config."""
    config: Path
    """Config file with the settings that all runs of this config share."""
    trial: Trial
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
        return [*self.trial.overrides, f"data.dir={json.dumps(str(self.data))}", f"seed={self.seed}"]

    @property
    def log(self) -> Path:
        """File with the output of the run."""
        return self.trial.run_dir.with_suffix(".log")

    @property
    def score_file(self) -> Path:
        """File with the score on the test split."""
        return self.trial.run_dir.with_suffix(".json")

    @property
    def logits_file(self) -> Path:
        """File with the predictions of the test split, for resampling."""
        return self.trial.run_dir.with_suffix(".npz")

    @property
    def title(self) -> str:
        """One-line description of the run."""
        what = f"seed {self.seed}" if self.reads_test else f"trial {self.trial.number + 1} ({self.trial.title})"
        return f"{self.eval_dataset.name}, {self.name}, {what}"

    def check_settings(self) -> None:
        """Raise MesetaError if the run folder was trained with other settings. Writes the settings if there are none
        yet."""
        write_or_verify(
            self.trial.run_dir.with_suffix(".settings.json"), {"settings": self.trial.settings, "seed": self.seed}
        )

    def is_trained(self) -> bool:
        """Whether training has completed."""
        return self.trial.summary() is not None

    def is_done(self) -> bool:
        """Whether the run is complete: scored if it reads the test split, else trained."""
        return self.score() is not None if self.reads_test else self.is_trained()

    def score(self) -> SeedScore | None:
        """Return the score, or `None` if there is none yet. Raises StorageError if reading fails."""
        content = read_if_exists(self.score_file)
        try:
            return None if content is None else SeedScore.model_validate(parse_json(content))
        except ValueError:
            return None

    def delete_checkpoints(self) -> None:
        """Delete the checkpoints of the run, which are no longer needed."""
        shutil.rmtree(self.trial.run_dir / "checkpoints", ignore_errors=True)


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
        custom_code: dict[str, str] = {}
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
            folder = self._dataset_folder(entry.eval_dataset)
            write_or_verify(folder / "ground.json", _describe_rows(entry))
            for name in self.suite.config_names(entry):
                document = documents[name]
                config = folder / folder_name(name) / "config.yaml"
                write_or_verify(config.with_name("document.json"), document)
                write_atomic(config, yaml.safe_dump(document, sort_keys=False))
        for path, what in custom_code.items():
            log_user_code(what, path.partition(":")[0])

    def _config_document(self, name: str, own_code: dict[str, str]) -> dict[str, Any]:
        """Return the settings shared by all runs of a config. All trials are validated.

        Import paths of the user's code are added to `own_code`. Raises MesetaError with the name of the config.
        """
        base = self.suite.configs[name].base
        assert base is not None  # Validated by QualitySuite.
        fixed = [f"{key}={json.dumps(value, default=str)}" for key, value in self.suite.fixed_settings(name).items()]
        for number, settings in enumerate(self.suite.trial_settings(name) or [{}]):
            trial = Trial(number, settings, self.out / "run")
            where = f"quality: config {name!r}{f' ({trial.title})' if settings else ''}"
            try:
                config = validate_document(read_config_document(base, [*fixed, *trial.overrides, "data.dir=data"]))
                own_code |= find_custom_code(config)
            except MesetaError as error:
                raise MesetaError(f"{where}: {error}") from None
        document = read_config_document(base, fixed)
        for section, key in ((document, "run_dir"), (document, "seed"), (document.get("data"), "dir")):
            if isinstance(section, dict):
                section.pop(key, None)
        set_default(document, "num_threads", 1)
        return dict(to_json_types(document))

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
        return (
            entry.dir if isinstance(entry, SuiteDataset) else self._dataset_folder(entry.eval_dataset) / f"world-{seed}"
        )

    def _dataset_folder(self, ground: EvalDataset) -> Path:
        return self.out / folder_name(ground.name)

    def _make_run(
        self,
        entry: SuiteEntry,
        name: str,
        settings: Mapping[str, Any],
        number: int,
        *,
        reads_test: bool = False,
    ) -> SuiteRun:
        """Create a run. `number` is the index of a trial, or the seed of a run that reads the test split."""
        folder = self._dataset_folder(entry.eval_dataset) / folder_name(name)
        seed = number if reads_test else self.suite.first_seed
        rows = self._rows_folder(entry, seed)
        is_world = isinstance(entry, SuiteWorld)
        run_dir = folder / (f"seed-{seed}" if reads_test else f"trial-{number:03d}")
        return SuiteRun(
            eval_dataset=entry.eval_dataset,
            name=name,
            config=folder / "config.yaml",
            trial=Trial(number, settings, run_dir),
            seed=seed,
            data=rows / ROWS_FOLDER if is_world else rows,
            truth=rows if is_world else None,
            reads_test=reads_test,
        )

    def best_settings(self, entry: SuiteEntry, name: str) -> dict[str, Any] | None:
        """Return the settings of the trial with the best validation metric, or `None` if no trial has one."""
        if not self.suite.trials:
            return {}
        results = [TrialResult(run.trial, run.trial.summary()) for run in self._trials(entry, name)]
        best = rank_trials(results, self.suite.choose_by)[0]
        return None if best.metric(self.suite.choose_by) is None else dict(best.trial.settings)

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
        results = []
        for entry in self.suite.entries:
            configs = []
            for name in self.suite.config_names(entry):
                runs = self.scored_runs(entry, name)
                scores = {seed: score for seed, run in runs.items() if (score := run.score()) is not None}
                chosen = self.best_settings(entry, name) or {}
                configs.append(ConfigScores(name=name, scores=scores, chosen_settings=chosen))
            results.append((self._with_best_reachable(entry.eval_dataset), configs))
        return results

    def save_best_reachable(self, one: SuiteRound) -> None:
        """Save the metrics of a world's true probabilities outside of the world's folder, which is deleted later."""
        if one.world is not None:
            write_atomic(self._best_file(one.world.eval_dataset, one.seed), (one.folder / BEST_FILE).read_text())

    def _with_best_reachable(self, ground: EvalDataset) -> EvalDataset:
        # Metrics of the true probabilities, averaged over the fresh seeds.
        files = [self._best_file(ground, seed) for seed in self.suite.fresh_seeds]
        reached = [parse_json(read_bounded(file)) for file in files if file.exists()]
        means = {name: sum(one[name] for one in reached) / len(reached) for name in (reached[0] if reached else ())}
        return EvalDataset(**{**vars(ground), "best_reachable": means})

    def _best_file(self, ground: EvalDataset, seed: int) -> Path:
        return self._dataset_folder(ground) / f"world-{seed}-{BEST_FILE}"


def write_or_verify(file: Path, document: Mapping[str, Any]) -> None:
    """Write `document` to `file`, or check that an existing file has the same content. Raises MesetaError if it
    differs."""
    document = to_json_types({"format": _FORMAT, **document})
    if not path_exists(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(document, indent=1) + "\n")
        return
    content = read_if_exists(file)
    with suppress(ValueError):
        if content is not None and parse_json(content) == document:
            return
    raise MesetaError(
        f"quality: folder {str(file.parent)!r} has results of other settings; delete it, or choose another --out"
    )


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
    for split in (VALID, TEST):
        if split not in dataset.splits or not dataset.splits[split].num_rows:
            raise MesetaError(
                f"quality: dataset {str(folder)!r} must have rows in the split {split}; prepare it "
                f"with --{split}-fraction 0.1"
            )
