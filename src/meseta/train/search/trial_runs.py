"""Trial runs of a search: they pause, continue, and one of them becomes the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.load import with_values
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.system.files import move, parse_json, path_exists, read_if_exists
from meseta.telemetry.metrics_file import METRICS_FILE, TrialProgress
from meseta.train.run_dir import TRIALS_FOLDER, RunDir
from meseta.train.trainer import Trainer

_RESULTS_FOLDER = "results"


class TrialRuns:
    """Trials in a folder of `run_dir`. All methods are collective. Finished work is not repeated after a restart."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config, self._world = config, world
        self._folder = config.run_dir / TRIALS_FOLDER

    def path(self, name: str) -> Path:
        """Return the run folder of a trial."""
        return self._folder / name

    def train(
        self, name: str, settings: Mapping[str, Any], num_evaluations: int | None, *, may_fail: bool
    ) -> TrialProgress:
        """Start or continue a trial until `num_evaluations` validations, or to its end if it is `None`.

        A trial that `may_fail` returns the problem of an error in place of raising it, on all ranks.
        """
        results = RunDir(self._folder / _RESULTS_FOLDER)
        file = f"{name}-{'end' if num_evaluations is None else num_evaluations}.json"
        if (stored := self._world.broadcast_from_rank_0(lambda: _load_result(results.path / file))) is not None:
            return stored
        result, problem = TrialProgress(), None
        try:
            trainer = Trainer(self._trial_config(name, settings), self._world, with_test=False)
            result = trainer.run_trial(num_evaluations)
        except MesetaError as error:
            if not may_fail:
                raise
            problem = error
        try:
            self._world.raise_on_all_ranks(problem)
        except StorageError:
            raise
        except MesetaError as error:
            result = TrialProgress(is_finished=True, problem=str(error))

        def store() -> None:
            results.path.mkdir(parents=True, exist_ok=True)
            results.write_json(file, result.to_dict())

        self._world.run_on_rank_0(store)
        return result

    def _trial_config(self, name: str, settings: Mapping[str, Any]) -> RunConfig:
        config = with_values(self._config, {**settings, "run_dir": str(self.path(name)), "train.loggers": ()})
        # Without settings it is the first trial, which needs the memory of the run.
        return config if not settings else config.model_copy(update={"check_memory": False})

    def remember(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the plain data of `compute`, which is collective, or that of an earlier call with this name."""
        folder = RunDir(self._folder / _RESULTS_FOLDER)
        stored = self._world.broadcast_from_rank_0(lambda: read_if_exists(folder.path / f"{name}.json"))
        if stored is None:
            result = compute()
            self._world.run_on_rank_0(lambda: folder.write_json(f"{name}.json", {"result": result}))
            return result
        return parse_json(stored)["result"]

    def adopt(self, name: str | None) -> None:
        """Move a trial to run_dir, which then resumes from it, and remove all trials. `None` only removes them.

        A restart may repeat it after an interruption.
        """

        def move_all() -> None:
            if name is not None:
                # The metrics are moved last, because a run with metrics has begun.
                for entry in ("config.yaml", "checkpoints", METRICS_FILE):
                    source, target = self.path(name) / entry, self._config.run_dir / entry
                    if path_exists(source):
                        shutil.rmtree(target, ignore_errors=True)
                        move(source, target)
            shutil.rmtree(self._folder, ignore_errors=True)

        self._world.run_on_rank_0(move_all)


def _load_result(file: Path) -> TrialProgress | None:
    content = read_if_exists(file)
    try:
        return None if content is None else TrialProgress.model_validate(parse_json(content))
    except ValueError:
        return None
