"""File format of a suite: configs to compare, worlds or datasets, and the settings to tune."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from meseta.config import read_config_document
from meseta.data.synth import WORLDS
from meseta.spec import MesetaError, suggest
from meseta.train import grid_settings, parse_setting, random_settings
from tools.quality.comparison import EvalDataset

RESERVED_KEYS = ("run_dir", "data.dir", "data.service", "seed", "checkpoint.dir", "checkpoint.mirror")
"""Config keys that a suite sets for each run, or that must not be shared by runs."""
NUM_WORLD_FILES = 10
"""Number of equal files that the rows of a world are split into. The last file is the test split, and the one before it
the validation split."""
MAX_GRID_SIZE = 100_000
"""Largest grid that is enumerated and shuffled. Trials of a larger grid are sampled."""


class Section(BaseModel):
    """Section of a suite file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: Any) -> Any:
        return {} if value is None else value  # YAML's value of a section without keys.


class SuiteWorld(Section):
    """Kind of synthetic world. Each seed draws another world of this kind and other rows."""

    world: str
    """Name of the world, see docs/data_synth.md."""
    strength: float = Field(default=1.0, ge=0, le=1)
    """Factor on the planted effects."""
    rows: int = Field(default=1_000_000, ge=1000, lt=2**40)
    """Total number of rows: 8/10 for training, 1/10 for validation and 1/10 for test."""
    scale: float = Field(default=0.01, gt=0, le=1)
    """Factor on the cardinalities of Criteo."""

    @field_validator("world")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in WORLDS:
            raise ValueError(f"unknown world {name!r}; {suggest(name, WORLDS)}")
        return name

    @property
    def eval_dataset(self) -> EvalDataset:
        """Name and facts of the world for tables."""
        facts = f"{self.rows:,} rows a seed, scale {self.scale:g}"
        return EvalDataset(
            name=f"{self.world} S={self.strength:g}", world=self.world, strength=self.strength, facts=facts
        )


class SuiteDataset(Section):
    """Prepared dataset. Its rows are the same for all seeds, which affect training only."""

    dir: Path
    """Folder written by `meseta prepare` with a validation split, relative to the suite file."""

    @property
    def eval_dataset(self) -> EvalDataset:
        """Name and facts of the dataset for tables."""
        return EvalDataset(name=self.dir.resolve().name, facts=f"the rows of {str(self.dir)!r}")


SuiteEntry = SuiteWorld | SuiteDataset
"""World or dataset on which configs are compared."""


class SuiteConfig(Section):
    """Config to compare. Its keys take precedence over those of the suite."""

    base: Path | None = None
    """Config file of a run, relative to the suite file. `None` uses that of the suite."""
    set: dict[str, Any] = Field(default={})
    """Fixed config values by key, such as model.name."""
    tune: dict[str, list[Any] | str] = Field(default={})
    """Config keys to tune, each with a list of values or a range such as loguniform(1e-3, 1e-1)."""
    only_on: tuple[str, ...] = ()
    """Names of the worlds that the config is trained on. Empty for all worlds and datasets of the suite."""


class QualitySuite(Section):
    """Content of a suite file."""

    worlds: tuple[SuiteWorld, ...] = ()
    """Worlds with known probabilities, compared by regret, NE and AUC."""
    datasets: tuple[SuiteDataset, ...] = ()
    """Datasets with unknown probabilities, compared by NE and AUC."""
    base: Path | None = None
    """Config file that all configs are based on. `None` if each config has its own."""
    set: dict[str, Any] = Field(default={})
    """Config values by key that all configs share."""
    tune: dict[str, list[Any] | str] = Field(default={})
    """Keys to tune in all configs."""
    configs: dict[str, SuiteConfig] = Field(min_length=2)
    """Configs to compare by name."""
    reference: str | None = None
    """Config with which charts compare the others. `None` selects the first."""
    trials: Annotated[int, Field(ge=0, le=10_000)] = 8
    """Number of trials per config, which select its settings on the validation split of a separate seed. 0 disables
    tuning."""
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Number of runs of each config with the selected settings. These runs read the test split."""
    first_seed: NonNegativeInt = 0
    """Seed of the trials. The following seeds are those of the final runs."""
    choose_by: Literal["ne", "auc", "logloss", "pr_auc"] = "ne"
    """Metric on the validation split that selects settings."""
    resamples: PositiveInt = 1000
    """Number of resamples of the test rows of a dataset."""

    @property
    def entries(self) -> list[SuiteEntry]:
        """Worlds and datasets of the suite."""
        return [*self.worlds, *self.datasets]

    @property
    def fresh_seeds(self) -> range:
        """Seeds of the final runs, for worlds and training."""
        return range(self.first_seed + 1, self.first_seed + 1 + self.seeds)

    @model_validator(mode="after")
    def _check(self) -> QualitySuite:
        if not self.worlds and not self.datasets:
            raise ValueError("a suite needs data to train on; add 'worlds' or 'datasets'")
        names = [folder_name(one.eval_dataset.name) for one in self.entries]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is listed twice; list each dataset, and each world and strength, once")
        if self.reference is not None and self.reference not in self.configs:
            raise ValueError(f"reference {self.reference!r} is no config; {suggest(self.reference, self.configs)}")
        for name, config in self.configs.items():
            if config.base is None and self.base is None:
                raise ValueError(f"config {name!r} has no 'base'; set it to the config file of a run")
            for world in config.only_on:
                if world not in WORLDS:
                    raise ValueError(f"config {name!r}: only_on has the unknown world {world!r}; "
                                     f"{suggest(world, WORLDS)}")  # fmt: skip
            self._check_keys(name)
        return self

    def _check_keys(self, name: str) -> None:
        keys = {**self.fixed_settings(name), **self.tuned_settings(name)}
        for key in keys:
            if any(f"{key}.".startswith(f"{reserved}.") for reserved in RESERVED_KEYS):
                raise ValueError(f"config {name!r} must not set {key}, which the suite sets; remove it")
        if self.trials == 0 and self.tuned_settings(name):
            raise ValueError(f"config {name!r} has keys to tune, but trials is 0; remove 'tune', or raise trials")
        if self.trials > 0 and not self.tuned_settings(name):
            raise ValueError(
                f"config {name!r} has no keys to tune, but trials is {self.trials}; add 'tune', or set trials: 0"
            )

    def config_names(self, entry: SuiteEntry) -> list[str]:
        """Return the names of the configs that are trained on `entry`."""
        world = entry.eval_dataset.world
        return [name for name, config in self.configs.items() if not config.only_on or world in config.only_on]

    def fixed_settings(self, name: str) -> dict[str, Any]:
        """Return the fixed keys and values of a config."""
        return {**self.set, **self.configs[name].set}

    def tuned_settings(self, name: str) -> dict[str, list[Any] | str]:
        """Return the keys of a config to tune, with their values or ranges."""
        return {key: value for key, value in {**self.tune, **self.configs[name].tune}.items()
                if key in self.configs[name].tune or key not in self.configs[name].set}  # fmt: skip

    def trial_settings(self, name: str) -> list[dict[str, Any]]:
        """Return the settings of each trial of a config: combinations without repetition if all keys have lists, else
        samples.

        Raises MesetaError with the name of the config if a range is invalid or there are too few combinations.
        """
        if self.trials == 0:
            return []
        try:
            return _trial_settings(self.tuned_settings(name), self.trials, self.first_seed)
        except MesetaError as error:
            raise MesetaError(f"config {name!r}: {error}") from None


def _trial_settings(tune: Mapping[str, list[Any] | str], num_trials: int, seed: int) -> list[dict[str, Any]]:
    space = _parse_tune(tune)
    if not all(hasattr(entry, "values") for entry in space.values()):  # A range has none.
        return random_settings(space, num_trials, seed)
    size = math.prod(len(entry.values) for entry in space.values())
    if size < num_trials:
        raise MesetaError(f"'tune' has {size:,} combinations for {num_trials} trials; add values, or use a range")
    if size > MAX_GRID_SIZE:
        samples = random_settings(space, 10 * num_trials, seed)
        return [one for place, one in enumerate(samples) if one not in samples[:place]][:num_trials]
    combinations = grid_settings(space)
    random.Random(seed).shuffle(combinations)  # Shuffle all of them, so that more trials only append to the list.
    return combinations[:num_trials]


def _parse_tune(tune: Mapping[str, list[Any] | str]) -> dict[str, Any]:
    space = {}
    for key, value in tune.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        _, entry = parse_setting(f"{key}={text}")
        if entry is None:
            raise MesetaError(
                f"'tune' must have a list or a range for {key}, got {value!r}; write [a, b], uniform(a, b), "
                "loguniform(a, b) or randint(a, b)"
            )
        space[key] = entry
    return space


def load_suite(path: Path) -> QualitySuite:
    """Load a suite file. Its paths become relative to the working directory.

    Raises MesetaError with a one-line message if the file cannot be read or is invalid.
    """
    where = f"suite {str(path)!r}"
    try:
        suite = _validate(read_config_document(path))
        for name in suite.configs:
            suite.trial_settings(name)
    except MesetaError as error:
        raise MesetaError(f"{where}: {str(error).removeprefix(f'config {str(path)!r}: ')}") from None
    folder = path.parent
    configs = {
        name: config.model_copy(update={"base": folder / (config.base or suite.base or "")})
        for name, config in suite.configs.items()
    }
    datasets = tuple(one.model_copy(update={"dir": folder / one.dir}) for one in suite.datasets)
    return suite.model_copy(update={"configs": configs, "datasets": datasets})


_SECTIONS: dict[str, type[Section]] = {"worlds": SuiteWorld, "datasets": SuiteDataset, "configs": SuiteConfig}
"""Sections below each key of a suite. They are entries of a list or a mapping."""


def _validate(document: Mapping[str, Any]) -> QualitySuite:
    try:
        return QualitySuite.model_validate(document)
    except ValidationError as error:
        # Escape control characters, so that the message is one line.
        text = "; ".join(dict.fromkeys(_explain(entry["loc"], entry) for entry in error.errors()))
        raise MesetaError("".join(char if char.isprintable() else repr(char)[1:-1] for char in text)) from None


def _explain(place: tuple[int | str, ...], entry: Mapping[str, Any]) -> str:
    key = ".".join(map(str, place))
    if entry["type"] == "extra_forbidden":
        section = _SECTIONS[str(place[0])] if len(place) > 1 else QualitySuite
        return f"unknown key {key!r}; {suggest(str(place[-1]), list(section.model_fields))}"
    if entry["type"] == "missing":
        return f"key {key!r} is missing"
    text = str(entry["ctx"]["error"]) if entry["type"] == "value_error" else f"{entry['msg']}, got {entry['input']!r}"
    return f"key {key!r}: {text}" if key else text


def folder_name(name: str) -> str:
    """Return the folder name of a world, dataset or config within the folder of a suite."""
    quoted = quote(name.replace(" ", "-").replace("=", ""), safe="")
    return f"{quoted[:-1]}%2E" if quoted.endswith(".") else quoted
