"""Loggers of a run, which send the lines of metrics.jsonl to TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import Field

from meseta.config import RunConfig
from meseta.errors import MesetaError
from meseta.report.record import flatten
from meseta.system.environment_variables import environ
from meseta.system.files import parse_json, read_if_exists
from meseta.telemetry.metrics_file import Count, Entry, EvalLine, Line
from meseta.train.interop.tensorboard import TensorBoardWriter, scalars
from meseta.train.run_dir import LOGGER_FILES, RunDir

Outcome = Literal["completed", "interrupted", "failed"]
"""End of a run. An interrupted one can be resumed."""
DEFAULT_PROJECT = "meseta"
"""Project of W&B, and experiment of MLflow, unless their environment variables name another one."""
MAX_PARAMS_PER_REQUEST = 100
"""Maximum number of parameters in a request to MLflow (its REST API, log-batch)."""
MAX_PARAM_CHARACTERS = 500
"""Length to which values of parameters are truncated, which all stores of MLflow accept."""


@runtime_checkable
class Logger(Protocol):
    """Destination of the lines of a run. A single thread calls all methods."""

    def begin(self, lines: Sequence[Line]) -> None:
        """Start or continue a run with the lines so far, of which earlier starts may have logged some."""

    def add(self, line: Line) -> None:
        """Log a line."""

    def close(self, outcome: Outcome) -> None:
        """End the run, if it was started."""


class LoggerRecord(Entry):
    """Content of a file of LOGGER_FILES."""

    run_id: str
    """Id of the run in MLflow or W&B."""
    last_steps: dict[str, Count] = Field(default={})
    """Last logged step of each kind of lines, see `_series`."""


class MLflowLogger:
    """Logs to an experiment of MLflow. MLflow's environment variables choose server, experiment and user."""

    def __init__(self, config: RunConfig, run_dir: RunDir) -> None:
        import mlflow

        self._mlflow, self._config, self._run_dir = mlflow, config, run_dir
        self._last_steps: dict[str, int] = {}
        self._is_active = False

    def begin(self, lines: Sequence[Line]) -> None:
        """Start or continue a run. See `Logger`."""
        record = _load_record(self._run_dir, "mlflow")
        if record is None:
            name = self._run_dir.path.absolute().name
            run = self._mlflow.start_run(run_name=name, experiment_id=self._choose_experiment())
            params = flatten(self._config.model_dump(mode="json"))
            pairs = [(key, str(value)[:MAX_PARAM_CHARACTERS]) for key, value in params]
            for first in range(0, len(pairs), MAX_PARAMS_PER_REQUEST):
                self._mlflow.log_params(dict(pairs[first : first + MAX_PARAMS_PER_REQUEST]))
            _write_record(self._run_dir, "mlflow", LoggerRecord(run_id=run.info.run_id))
        else:
            run = self._mlflow.start_run(run_id=record.run_id)
            # The store knows which points a killed process has logged.
            client = self._mlflow.MlflowClient()
            for tag in run.data.metrics:
                self._last_steps[tag] = max(point.step for point in client.get_metric_history(record.run_id, tag))
        self._is_active = True
        for line in lines:
            self.add(line)

    def _choose_experiment(self) -> str | None:
        """Return the id of the default experiment, or `None` if the environment names one."""
        if any(environ.get(name) for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID")):
            return None
        experiment = self._mlflow.get_experiment_by_name(DEFAULT_PROJECT)
        return str(self._mlflow.create_experiment(DEFAULT_PROJECT) if experiment is None else experiment.experiment_id)

    def add(self, line: Line) -> None:
        """Log the values of a line that are not logged yet."""
        values = {re.sub(r"[^\w\-. /]", "_", tag): value for tag, value in scalars(line)}
        values = {tag: value for tag, value in values.items() if self._last_steps.get(tag, -1) < line.step}
        if values:
            self._mlflow.log_metrics(values, step=line.step)

    def close(self, outcome: Outcome) -> None:
        """Set the status of the run, if it was started."""
        if self._is_active:
            self._is_active = False
            self._mlflow.end_run({"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[outcome])


class WandbLogger:
    """Logs to a project of Weights & Biases. The environment variables of W&B choose mode, entity and project."""

    def __init__(self, config: RunConfig, run_dir: RunDir) -> None:
        import wandb

        self._wandb, self._config, self._run_dir = wandb, config, run_dir
        self._run: Any = None
        self._last_steps: dict[str, int] = {}

    def begin(self, lines: Sequence[Line]) -> None:
        """Start or continue a run. See `Logger`."""
        mode = self._wandb.setup().settings.mode
        if mode not in {"offline", "disabled"} and not self._wandb.login(prompt=False):
            raise MesetaError("W&B has no API key; set WANDB_API_KEY, or WANDB_MODE=offline")
        record = _load_record(self._run_dir, "wandb")
        self._run = self._wandb.init(
            id=None if record is None else record.run_id,
            resume=None if record is None else "allow",
            project=environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=environ.get("WANDB_NAME") or self._run_dir.path.absolute().name,
            dir=self._run_dir.path,
            config=self._config.model_dump(mode="json"),
            # The terminal shows the output of this run only.
            settings=self._wandb.Settings(console="off", silent=True),
        )
        # W&B drops lines whose internal step does not increase, but an evaluation has the step of a training line.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        # Unlike those of MLflow, offline runs cannot be read while they are written.
        self._last_steps = {} if record is None else dict(record.last_steps)
        self._save_record()
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> None:
        """Log a line that is not logged yet."""
        if self._last_steps.get(_series(line), -1) < line.step:
            self._run.log({"step": line.step, **dict(scalars(line))})
            self._last_steps[_series(line)] = line.step
            self._save_record()

    def close(self, outcome: Outcome) -> None:
        """End the run, if it was started, and wait until it is stored or sent."""
        if self._run is not None:
            self._run.finish(exit_code=int(outcome != "completed"))
            self._run = None

    def _save_record(self) -> None:
        _write_record(self._run_dir, "wandb", LoggerRecord(run_id=self._run.id, last_steps=self._last_steps))


def make_logger(name: str, config: RunConfig, run_dir: RunDir) -> Logger:
    """Create the logger of a name in `train.loggers`."""
    if name == "tensorboard":
        return TensorBoardWriter(run_dir.path / "tensorboard")
    return (MLflowLogger if name == "mlflow" else WandbLogger)(config, run_dir)


def _load_record(run_dir: RunDir, name: str) -> LoggerRecord | None:
    content = read_if_exists(run_dir.path / LOGGER_FILES[name])
    try:
        return None if content is None else LoggerRecord.model_validate(parse_json(content))
    except ValueError:
        return None


def _write_record(run_dir: RunDir, name: str, record: LoggerRecord) -> None:
    run_dir.write_json(LOGGER_FILES[name], record.to_dict())


def _series(line: Line) -> str:
    return f"eval/{line.split}" if isinstance(line, EvalLine) else line.kind
