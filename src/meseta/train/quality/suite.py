"""The file of a suite: what is compared, on what, and how each config is tuned. Imports no torch."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from meseta.config.load import validate_section
from meseta.config.section import NonNegativeInt, PositiveInt, Section
from meseta.data.synth.worlds import WORLDS
from meseta.machine.files import to_file_name
from meseta.report.quality.suite_result import EvalDataset
from meseta.spec import MesetaError, suggest
from meseta.spec.documents import read_mapping
from meseta.train.sweep.sweep import Choices, SearchSpace, grid_settings, parse_setting, random_settings

RESERVED_KEYS = ("run_dir", "data.dir", "data.service", "seed", "checkpoint.dir", "checkpoint.mirror")
"""Keys that a suite sets for each run itself, or that all runs would share."""
NUM_WORLD_FILES = 10
"""Of a world's rows, in files of equal length: the last makes the test split, the one before it the valid split."""
MAX_GRID_SIZE = 100_000
"""Combinations of lists of values that are all written down to be shuffled; of more, trials are drawn by chance."""


class SuiteWorld(Section):
    """A law of synthetic rows: every seed draws another world of this kind, and other rows."""

    world: str
    """Name of the law, see docs/data_synth.md."""
    strength: float = Field(default=1.0, ge=0, le=1)
    """Factor on what it plants."""
    rows: int = Field(default=1_000_000, ge=1000, lt=2**40)
    """In all: eight tenths to train on, one valid, one test."""
    scale: float = Field(default=0.01, gt=0, le=1)
    """Factor on Criteo's cardinalities."""

    @field_validator("world")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in WORLDS:
            raise ValueError(f"no world {name!r}; {suggest(name, WORLDS)}")
        return name

    @property
    def eval_dataset(self) -> EvalDataset:
        """As tables name it."""
        facts = f"{self.rows:,} rows a seed, scale {self.scale:g}"
        return EvalDataset(
            name=f"{self.world} S={self.strength:g}", world=self.world, strength=self.strength, facts=facts
        )


class SuiteDataset(Section):
    """A prepared dataset: its rows are the same for all seeds, which are of training alone."""

    dir: Path
    """As `meseta prepare` wrote it, with a split valid; relative to the file of the suite."""

    @property
    def eval_dataset(self) -> EvalDataset:
        """As tables name it."""
        return EvalDataset(name=self.dir.resolve().name, facts=f"the rows of {str(self.dir)!r}")


SuiteEntry = SuiteWorld | SuiteDataset
"""What configs are compared on."""


class SuiteConfig(Section):
    """One of those that are compared; its keys go before those that the suite has for all."""

    base: Path | None = None
    """Config file of a run, relative to the file of the suite; None: that of the suite."""
    set: dict[str, Any] = Field(default={})
    """Keys of the config, such as model.name, and their values."""
    tune: dict[str, list[Any] | str] = Field(default={})
    """Keys whose values are tried: a list, or a range such as loguniform(1e-3, 1e-1)."""
    only_on: tuple[str, ...] = ()
    """Names of worlds that it is for, as a world's own formula is; empty: all that the suite trains on."""


class QualitySuite(Section):
    """All of the file."""

    worlds: tuple[SuiteWorld, ...] = ()
    """Laws with known probabilities, compared by regret, NE and AUC."""
    datasets: tuple[SuiteDataset, ...] = ()
    """Data whose truth nobody knows, compared by NE and AUC."""
    base: Path | None = None
    """Config file that all start from; None: each has its own."""
    set: dict[str, Any] = Field(default={})
    """Keys of all configs."""
    tune: dict[str, list[Any] | str] = Field(default={})
    """Keys that are tried in all configs."""
    configs: dict[str, SuiteConfig] = Field(min_length=2)
    """What is compared, by a name of yours."""
    reference: str | None = None
    """The config that charts draw the others beside; None: the first."""
    trials: Annotated[int, Field(ge=0, le=10_000)] = 8
    """Trainings of each config, on the valid split of a seed of their own, that choose its settings; the same for all.
    0: none, and nothing is tuned."""
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Trainings of each config with the settings chosen, which read test."""
    first_seed: NonNegativeInt = 0
    """Of the trials; those after it are the fresh ones."""
    choose_by: Literal["ne", "auc", "logloss", "pr_auc"] = "ne"
    """Figure of the valid split that chooses."""
    resamples: PositiveInt = 1000
    """Times that the test rows of a dataset are drawn anew."""

    @property
    def entries(self) -> list[SuiteEntry]:
        """All that configs are compared on."""
        return [*self.worlds, *self.datasets]

    @property
    def fresh_seeds(self) -> range:
        """Of worlds and training."""
        return range(self.first_seed + 1, self.first_seed + 1 + self.seeds)

    @model_validator(mode="after")
    def _check(self) -> QualitySuite:
        if not self.worlds and not self.datasets:
            raise ValueError("there is nothing to train on; name 'worlds' or 'datasets'")
        names = [folder_name(one.eval_dataset.name) for one in self.entries]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is there twice; give each world and strength, and each dataset, once")
        if self.reference is not None and self.reference not in self.configs:
            raise ValueError(f"reference {self.reference!r} is no config; {suggest(self.reference, self.configs)}")
        for name, config in self.configs.items():
            if config.base is None and self.base is None:
                raise ValueError(f"config {name!r} has no 'base'; name the file of a run's config")
            for world in config.only_on:
                if world not in WORLDS:
                    raise ValueError(f"config {name!r} is only on {world!r}, and there is no such world; "
                                     f"{suggest(world, WORLDS)}")  # fmt: skip
            self._check_keys(name)
        return self

    def _check_keys(self, name: str) -> None:
        keys = {**self.fixed_settings(name), **self.tuned_settings(name)}
        for key in keys:
            if any(f"{key}.".startswith(f"{own}.") for own in RESERVED_KEYS):
                raise ValueError(f"config {name!r} has {key}, which a suite sets itself; leave it out")
        if self.trials == 0 and self.tuned_settings(name):
            raise ValueError(f"config {name!r} has keys to tune, but trials is 0; leave 'tune' out, or raise trials")
        if self.trials > 0 and not self.tuned_settings(name):
            raise ValueError(
                f"config {name!r} has nothing to tune, but every config gets {self.trials} trials; give it 'tune', or "
                "set trials: 0"
            )

    def config_names(self, entry: SuiteEntry) -> list[str]:
        """Configs that are trained there."""
        world = entry.eval_dataset.world
        return [name for name, config in self.configs.items() if not config.only_on or world in config.only_on]

    def fixed_settings(self, name: str) -> dict[str, Any]:
        """Keys and values of a config."""
        return {**self.set, **self.configs[name].set}

    def tuned_settings(self, name: str) -> dict[str, list[Any] | str]:
        """Keys of a config that are tried."""
        return {key: value for key, value in {**self.tune, **self.configs[name].tune}.items()
                if key in self.configs[name].tune or key not in self.configs[name].set}  # fmt: skip

    def trial_settings(self, name: str) -> list[dict[str, Any]]:
        """What the trials of a config try, by key: of lists alone so many of their combinations, none twice, else drawn
        by chance. Raises MesetaError, naming the config, for a space that is none, or has fewer."""
        if self.trials == 0:
            return []
        try:
            return _trial_settings(self.tuned_settings(name), self.trials, self.first_seed)
        except MesetaError as error:
            raise MesetaError(f"config {name!r}: {error}") from None


def _trial_settings(tune: Mapping[str, list[Any] | str], num_trials: int, seed: int) -> list[dict[str, Any]]:
    space = _parse_tune(tune)
    if not all(isinstance(entry, Choices) for entry in space.values()):
        return random_settings(space, num_trials, seed)
    size = math.prod(len(entry.values) for entry in space.values() if isinstance(entry, Choices))
    if size < num_trials:
        raise MesetaError(f"'tune' has {size:,} combinations for {num_trials} trials; give more values, or a range")
    if size > MAX_GRID_SIZE:
        return _remove_duplicates(random_settings(space, 10 * num_trials, seed))[:num_trials]
    combinations = grid_settings(space)
    random.Random(seed).shuffle(combinations)  # all of them, so that more trials extend fewer
    return combinations[:num_trials]


def _remove_duplicates(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for place, one in enumerate(settings) if one not in settings[:place]]


def _parse_tune(tune: Mapping[str, list[Any] | str]) -> SearchSpace:
    """As `meseta sweep` reads it."""
    space = {}
    for key, value in tune.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        _, entry = parse_setting(f"{key}={text}")
        if entry is None:
            raise MesetaError(
                f"'tune' has {key}: {value!r}, neither a list nor a range; write [a, b], or uniform(a, b), "
                "loguniform(a, b) or randint(a, b)"
            )
        space[key] = entry
    return space


def load_suite(path: Path) -> QualitySuite:
    """The suite in a file, its paths as seen from here. Raises MesetaError for a file that is none, naming what is
    wrong with it in one line."""
    where = f"suite {str(path)!r}"
    try:
        document = read_mapping(path)
    except MesetaError as error:
        raise MesetaError(f"{where}: {error}") from None
    suite = validate_section(QualitySuite, document, where)
    beside = path.parent
    try:
        for name in suite.configs:
            suite.trial_settings(name)
    except MesetaError as error:
        raise MesetaError(f"{where}: {error}") from None
    configs = {
        name: config.model_copy(update={"base": beside / (config.base or suite.base or "")})
        for name, config in suite.configs.items()
    }
    datasets = tuple(one.model_copy(update={"dir": beside / one.dir}) for one in suite.datasets)
    return suite.model_copy(update={"configs": configs, "datasets": datasets})


def folder_name(name: str) -> str:
    """Of a ground or a config, in the folder of a suite."""
    return to_file_name(name.replace(" ", "-").replace("=", ""))
