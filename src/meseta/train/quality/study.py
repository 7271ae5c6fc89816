"""The folder of a suite: which trainings there are, which are done, and what they need. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meseta.config import check_document, read_document, set_default
from meseta.data.dataset.dataset import Dataset
from meseta.machine.files import is_there, parse_json, plain_data, read_bounded, read_if_there, write_whole
from meseta.machine.own_code import say_own
from meseta.report.quality.outcome import ConfigScores, Ground, SeedScore
from meseta.spec import MesetaError
from meseta.telemetry.splits import TEST, VALID
from meseta.train.quality.suite import Suite, SuiteDataset, SuiteEntry, SuiteWorld, folder_of
from meseta.train.quality.worlds import BEST, ROWS
from meseta.train.sweep.sweep import Result, Trial, own_code_of, rank

FORMAT = "meseta.quality/1"


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """One training of a suite."""

    ground: Ground
    name: str
    """Of the config."""
    config: Path
    """What all trainings of it have in common."""
    trial: Trial
    seed: int
    data: Path
    """The dataset."""
    truth: Path | None
    """Folder of the world; None where nobody knows the truth."""
    reads_test: bool
    """Whether its settings are those chosen; else it is a trial."""

    @property
    def overrides(self) -> list[str]:
        """As arguments of `meseta train`."""
        return [*self.trial.overrides, f"data.dir={json.dumps(str(self.data))}", f"seed={self.seed}"]

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.trial.run_dir.with_suffix(".log")

    @property
    def score_file(self) -> Path:
        """What it came to on test."""
        return self.trial.run_dir.with_suffix(".json")

    @property
    def logits_file(self) -> Path:
        """Its predictions of test, kept where rows are drawn anew."""
        return self.trial.run_dir.with_suffix(".npz")

    @property
    def title(self) -> str:
        """In a line."""
        what = f"seed {self.seed}" if self.reads_test else f"trial {self.trial.number + 1} ({self.trial.title})"
        return f"{self.ground.name}, {self.name}, {what}"

    def claim(self) -> None:
        """Make sure that what lies under its name was trained with its settings. Raises MesetaError."""
        claim(self.trial.run_dir.with_suffix(".settings.json"), {"settings": self.trial.settings, "seed": self.seed})

    def is_trained(self) -> bool:
        """Whether it has reached its end."""
        return self.trial.summary() is not None

    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.score() is not None if self.reads_test else self.is_trained()

    def score(self) -> SeedScore | None:
        """None where it has none yet. Raises StorageError if reading failed."""
        content = read_if_there(self.score_file)
        try:
            return None if content is None else SeedScore.model_validate(parse_json(content))
        except ValueError:
            return None

    def forget_weights(self) -> None:
        """Drop its checkpoints, which nobody needs any more."""
        shutil.rmtree(self.trial.run_dir / "checkpoints", ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Round:
    """The trainings that read the same rows."""

    world: SuiteWorld | None
    """None where the rows are a dataset's."""
    seed: int
    folder: Path
    """Of the world, or of the dataset."""
    runs: tuple[SuiteRun, ...]

    def missing(self) -> list[SuiteRun]:
        """What is not done yet. Raises MesetaError where something was done otherwise."""
        for run in self.runs:
            run.claim()
        return [run for run in self.runs if not run.is_done()]

    @property
    def needs_rows(self) -> bool:
        """Whether the rows have to be made first."""
        return self.world is not None and not self.folder.is_dir()

    def drop_rows_and_weights(self) -> None:
        """Rows of a world, which can be made again; weights that a run has left which ended when it had its figures."""
        for run in self.runs:
            if run.is_done():
                run.forget_weights()
        if self.world is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class Study:
    """A suite and its folder."""

    def __init__(self, suite: Suite, name: str, out: Path) -> None:
        self.suite, self.name, self.out = suite, name, out

    def open(self) -> None:
        """Make the folder, or take it up again; nothing is made where a config is wrong.

        Raises MesetaError for a config that is not valid, data without the splits that are needed, and a folder in
        which something of the same name was trained otherwise.
        """
        own_code: dict[str, str] = {}
        documents = {name: self._document(name, own_code) for name in self.suite.configs}
        for dataset in self.suite.datasets:
            _check_splits(dataset.dir)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MesetaError(
                f"quality: {str(self.out)!r} cannot be made: {error.strerror}; choose another --out"
            ) from None
        for entry in self.suite.entries:
            folder = self._folder(entry.ground)
            claim(folder / "ground.json", _identity(entry))
            for name in self.suite.names_on(entry):
                document = documents[name]
                config = folder / folder_of(name) / "config.yaml"
                claim(config.with_name("document.json"), document)
                write_whole(config, yaml.safe_dump(document, sort_keys=False))
        for path, what in own_code.items():
            say_own(what, path.partition(":")[0])

    def _document(self, name: str, own_code: dict[str, str]) -> dict[str, Any]:
        """What all trainings of a config have in common; each of them was checked, and the code of the user's own that
        it runs is added to `own_code`. Raises MesetaError, naming the config of the suite."""
        base = self.suite.configs[name].base
        assert base is not None  # or the suite was refused
        fixed = [f"{key}={json.dumps(value, default=str)}" for key, value in self.suite.set_of(name).items()]
        for number, settings in enumerate(self.suite.settings(name) or [{}]):
            trial = Trial(number, settings, self.out / "run")
            where = f"quality: config {name!r}{f' ({trial.title})' if settings else ''}"
            try:
                config = check_document(read_document(base, [*fixed, *trial.overrides, "data.dir=data"]))
                own_code |= own_code_of(config)
            except MesetaError as error:
                raise MesetaError(f"{where}: {error}") from None
        document = read_document(base, fixed)
        for section, key in ((document, "run_dir"), (document, "seed"), (document.get("data"), "dir")):
            if isinstance(section, dict):
                section.pop(key, None)
        set_default(document, "num_threads", 1)
        return dict(plain_data(document))

    @property
    def num_runs(self) -> int:
        """Trainings in all."""
        num_configs = sum(len(self.suite.names_on(entry)) for entry in self.suite.entries)
        return num_configs * (self.suite.trials + self.suite.seeds)

    def rounds(self) -> Iterator[Round]:
        """All of them in order: of each ground the trials, then a fresh seed after the other. Those after the trials
        are asked for when the trials are done, since they take what those have chosen."""
        for entry in self.suite.entries:
            if self.suite.trials:
                yield self.tuning(entry)
            for seed in self.suite.fresh_seeds:
                yield self.fresh(entry, seed)

    def tuning(self, entry: SuiteEntry) -> Round:
        """The trials of all configs, in turns, so that none is ahead of the others."""
        of_configs = [self._trials(entry, name) for name in self.suite.names_on(entry)]
        runs = [run for of_number in zip(*of_configs, strict=True) for run in of_number]
        return self._round(entry, self.suite.first_seed, runs)

    def _trials(self, entry: SuiteEntry, name: str) -> list[SuiteRun]:
        """Of one config."""
        settings = self.suite.settings(name)
        return [self._run(entry, name, own, number) for number, own in enumerate(settings)]

    def fresh(self, entry: SuiteEntry, seed: int) -> Round:
        """Each config with the settings that its trials have chosen; without those whose trials have all failed."""
        runs = []
        for name in self.suite.names_on(entry):
            chosen = self.chosen(entry, name)
            if chosen is not None:
                runs.append(self._run(entry, name, chosen, seed, reads_test=True))
        return self._round(entry, seed, runs)

    def _round(self, entry: SuiteEntry, seed: int, runs: Sequence[SuiteRun]) -> Round:
        world = entry if isinstance(entry, SuiteWorld) else None
        return Round(world=world, seed=seed, folder=self._rows(entry, seed), runs=tuple(runs))

    def _rows(self, entry: SuiteEntry, seed: int) -> Path:
        """Of the rows."""
        return entry.dir if isinstance(entry, SuiteDataset) else self._folder(entry.ground) / f"world-{seed}"

    def _folder(self, ground: Ground) -> Path:
        """Of all that was trained there."""
        return self.out / folder_of(ground.name)

    def _run(
        self,
        entry: SuiteEntry,
        name: str,
        settings: Mapping[str, Any],
        number: int,
        *,
        reads_test: bool = False,
    ) -> SuiteRun:
        """`number`: of the trial, or the seed of one that reads test."""
        folder = self._folder(entry.ground) / folder_of(name)
        seed = number if reads_test else self.suite.first_seed
        rows = self._rows(entry, seed)
        is_world = isinstance(entry, SuiteWorld)
        run_dir = folder / (f"seed-{seed}" if reads_test else f"trial-{number:03d}")
        return SuiteRun(
            ground=entry.ground,
            name=name,
            config=folder / "config.yaml",
            trial=Trial(number, settings, run_dir),
            seed=seed,
            data=rows / ROWS if is_world else rows,
            truth=rows if is_world else None,
            reads_test=reads_test,
        )

    def chosen(self, entry: SuiteEntry, name: str) -> dict[str, Any] | None:
        """The settings of the best trial by the valid split; None where none has ended."""
        if not self.suite.trials:
            return {}
        results = [Result(run.trial, run.trial.summary()) for run in self._trials(entry, name)]
        best = rank(results, self.suite.choose_by)[0]
        return None if best.figure(self.suite.choose_by) is None else dict(best.trial.settings)

    def first_runs(self, entry: SuiteEntry) -> list[SuiteRun]:
        """One training of each config on a ground."""
        settings = {name: (self.suite.settings(name) or [{}])[0] for name in self.suite.names_on(entry)}
        return [self._run(entry, name, own, 0) for name, own in settings.items()]

    def scored(self, entry: SuiteEntry, name: str) -> dict[int, SuiteRun]:
        """Trainings of a config that were scored, by seed."""
        chosen = self.chosen(entry, name)
        if chosen is None:
            return {}
        runs = {seed: self._run(entry, name, chosen, seed, reads_test=True) for seed in self.suite.fresh_seeds}
        return {seed: run for seed, run in runs.items() if run.is_done()}

    def scores(self) -> list[tuple[Ground, list[ConfigScores]]]:
        """What is done so far, in the order of the suite."""
        found = []
        for entry in self.suite.entries:
            configs = []
            for name in self.suite.names_on(entry):
                runs = self.scored(entry, name)
                scores = {seed: score for seed, run in runs.items() if (score := run.score()) is not None}
                chosen = self.chosen(entry, name) or {}
                configs.append(ConfigScores(name=name, scores=scores, chosen=chosen))
            found.append((self._with_best(entry.ground), configs))
        return found

    def keep_best(self, one: Round) -> None:
        """What the truth of a world reaches itself, which stays when the rows go."""
        if one.world is not None:
            write_whole(self._best_file(one.world.ground, one.seed), (one.folder / BEST).read_text())

    def _with_best(self, ground: Ground) -> Ground:
        """With what the true probabilities reach themselves, in the mean over the fresh seeds."""
        files = [self._best_file(ground, seed) for seed in self.suite.fresh_seeds]
        reached = [parse_json(read_bounded(file)) for file in files if file.exists()]
        means = {name: sum(one[name] for one in reached) / len(reached) for name in (reached[0] if reached else ())}
        return Ground(**{**vars(ground), "best_reachable": means})

    def _best_file(self, ground: Ground, seed: int) -> Path:
        return self._folder(ground) / f"world-{seed}-{BEST}"


def claim(file: Path, document: Mapping[str, Any]) -> None:
    """Write what something is made of, or make sure that it was made of the same. Raises MesetaError where it was
    not."""
    document = plain_data({"format": FORMAT, **document})
    if not is_there(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(document, indent=1) + "\n")
        return
    content = read_if_there(file)
    with suppress(ValueError):
        if content is not None and parse_json(content) == document:
            return
    raise MesetaError(
        f"quality: {str(file.parent)!r} holds what was trained otherwise; delete it, or choose another --out"
    )


def _identity(entry: SuiteEntry) -> dict[str, Any]:
    """What the rows of a ground are a function of."""
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
                f"quality: dataset {str(folder)!r} has no rows in the split {split}, which a suite needs; prepare it "
                f"with --{split}-fraction 0.1"
            )
