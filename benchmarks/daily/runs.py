"""Trained models of one log: a run per method and day, which is measured, and scored on the rows of the next day."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from common.measure_command import Measured, measure_command
from common.processes import MESETA
from common.result_store import ResultStore

import meseta
from daily.logs import DailyLog

FIRST_DAY = 1
ONE_RUN = ("--test-fraction", 0)
"""Options of runs that are not started from another one: all rows except those of the validation split are trained."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Runs of which each starts from that of the day before."""

    name: str
    options: tuple[str, ...] = ()
    """Options and overrides of each run except the first one."""
    hash_rows: int | None = None
    """Rows of each table of hashed ids, or `None` for vocabularies."""

    @property
    def first_name(self) -> str:
        return "first" if self.hash_rows is None else f"{self.name}-first"


class DailyRuns:
    """Runs on one log.

    Each result is stored under `prefix`, the method and the day, and has the NE on the next day. Folders of runs are
    made again if a later run needs them.
    """

    def __init__(self, log: DailyLog, store: ResultStore, folder: Path, prefix: str, settings: tuple[str, ...]) -> None:
        self.log, self.folder, self._store, self._prefix = log, folder, store, prefix
        self._settings = settings

    def measure_first(self) -> Mapping[str, Any]:
        """Measure the run of the first day, with settings of a search. The result has its rates and batch size."""

        def facts() -> dict[str, Any]:
            return {**self._first_rates(), "batch_size": self._first_config()["train"]["batch_size"]}

        return self._measure("first", FIRST_DAY, self._train_first, facts)

    def measure_stale(self, day: int) -> None:
        """Score the model of the first day on the day after `day`."""
        self.store("stale", day, lambda: {"ne": self._score(self.first_run, day)})

    def measure_chain(self, chain: Chain, day: int) -> None:
        """Measure the run of a chain on the rows of `day`."""
        if chain.hash_rows is not None:
            self._measure(chain.first_name, FIRST_DAY, lambda: self._train_hashed(chain))
        self._measure(chain.name, day, lambda: self._train_next(chain, day))

    def measure_alone(self, name: str, day: int, num_days: int = 1) -> None:
        """Measure a run from scratch on the last `num_days` days with the settings of the first day."""
        files = [word for number in range(day - num_days + 1, day + 1) for word in ("--data", self.log.file(number))]
        self._measure(name, day, lambda: self._train(self._run_dir(name, day), self.first_settings, *files, *ONE_RUN))

    def measure_best(self, day: int) -> None:
        self.store("true", day, lambda: {"ne": self.log.best_ne(day + 1)})

    def find(self, name: str, day: int) -> Mapping[str, Any] | None:
        return self._store.find(f"{self._prefix}/{name}/{day}")

    def store(self, name: str, day: int, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the stored result, or that of `make`, which is stored."""
        return self._store.get_and_print(f"{self._prefix}/{name}/{day}", make)

    @cached_property
    def first_run(self) -> Path:
        """Folder of the run of the first day."""
        run_dir = self._run_dir("first", FIRST_DAY)
        if not is_complete(run_dir):
            self._train_first()
        return run_dir

    @cached_property
    def first_settings(self) -> Path:
        """Config file with the settings of the first day, without its folders and without a search."""
        path, config = self.folder / "settings.yaml", self._first_config()
        del config["run_dir"], config["data"]["dir"]
        config["train"]["search_budget"] = 0.0
        path.write_text(yaml.safe_dump(config))
        return path

    def _first_config(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load((self.first_run / "config.yaml").read_text())
        return config

    def _first_rates(self) -> dict[str, float]:
        """Return the base learning rates of the first day, and those of its last step."""
        config, lines = self._first_config(), (self.first_run / "metrics.jsonl").read_text().splitlines()
        last = [line for line in map(json.loads, lines) if line["kind"] == "train"][-1]
        names = {"embedding": "lr_sparse", "dense": "lr_dense"}
        rates = {f"{section}_rate": config[section]["optimizer"]["lr"] for section in names}
        return rates | {f"{section}_last_rate": last[name] for section, name in names.items()}

    def _train_first(self) -> list[Measured]:
        run_dir = self._run_dir("first", FIRST_DAY)
        return self._train(run_dir, "--data", self.log.file(FIRST_DAY), *ONE_RUN, *self._settings)

    def _train_hashed(self, chain: Chain) -> list[Measured]:
        run_dir = self._run_dir(chain.first_name, FIRST_DAY)
        data = run_dir.with_name(f"{run_dir.name}-data")
        settings = self.first_settings
        prepared = measure_command(
            [*MESETA, "prepare", self.log.file(FIRST_DAY), "--out", data, "--force", *ONE_RUN, "--valid-fraction", 0.1,
             "--hash-rows", chain.hash_rows]
        )  # fmt: skip
        return [prepared, *self._train(run_dir, settings, f"data.dir={data}")]

    def _train_next(self, chain: Chain, day: int) -> list[Measured]:
        parent = self._chain_run(chain, day - 1)
        data = ("--data", self.log.file(day))
        return self._train(self._run_dir(chain.name, day), "--start-from", parent, *data, *chain.options)

    def _chain_run(self, chain: Chain, day: int) -> Path:
        """Return the folder of a run of a chain. It is trained if it does not exist."""
        if day == FIRST_DAY and chain.hash_rows is None:
            return self.first_run
        run_dir = self._run_dir(chain.first_name if day == FIRST_DAY else chain.name, day)
        if not is_complete(run_dir):
            if day == FIRST_DAY:
                self._train_hashed(chain)
            else:
                self._train_next(chain, day)
        return run_dir

    def _run_dir(self, name: str, day: int) -> Path:
        return self.folder / f"{name}-{day}"

    def _train(self, run_dir: Path, *arguments: object) -> list[Measured]:
        shutil.rmtree(run_dir, ignore_errors=True)
        return [measure_command([*MESETA, "train", *arguments, f"run_dir={run_dir}"])]

    def _score(self, run_dir: Path, day: int) -> float:
        """Return the NE of a run on the day after `day`."""
        return float(meseta.open_run(run_dir).evaluate(str(self.log.file(day + 1)))["ne"])

    def _measure(
        self,
        name: str,
        day: int,
        train: Callable[[], Sequence[Measured]],
        more: Callable[[], Mapping[str, Any]] = dict,
    ) -> Mapping[str, Any]:
        def make() -> dict[str, Any]:
            commands = train()
            return {
                "ne": self._score(self._run_dir(name, day), day),
                "processor_s": sum(command.processor_s for command in commands),
                "seconds": sum(command.seconds for command in commands),
                "peak_bytes": max(command.peak_bytes for command in commands),
                **more(),
            }

        return self.store(name, day, make)


def is_complete(run_dir: Path) -> bool:
    """Whether a run has ended."""
    return (run_dir / "summary.json").exists()
