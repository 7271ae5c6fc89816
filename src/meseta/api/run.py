"""Result of a training run: metrics, model and predictions."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from meseta.api.callbacks import Callback
from meseta.api.command import run_command
from meseta.api.errors import argument_errors, spooled_names
from meseta.api.rows import Rows, file_paths, like_rows
from meseta.checkpoint.listing import CheckpointInfo, list_checkpoints
from meseta.config import RunConfig
from meseta.data.prepare.staging import SPOOL_FOLDER
from meseta.spec import MesetaError
from meseta.system.locks import FolderLock
from meseta.telemetry.metrics import EVALUATED_SPLITS
from meseta.telemetry.metrics_file import EvalLine
from meseta.train.averages.runs import Averaged
from meseta.train.run_dir import RunDir

HISTORY = pa.schema(
    [
        ("step", pa.int64()),
        ("num_samples", pa.int64()),
        ("split", pa.string()),
        *((name, pa.float64()) for name in ("loss", "logloss", "ne", "auc", "calibration")),
        *((name, pa.float64()) for name in ("lr_dense", "lr_sparse", "samples_per_s")),
    ]
)
"""Columns of `Run.history`. A value is null where it was not measured."""
MAIN_METRICS = ("auc", "ne", "logloss", "calibration")


@contextmanager
def lock_spool(function: str, run_dir: Path) -> Iterator[None]:
    """Context manager in which no other process may spool rows in `run_dir`. Creates the folder.

    Raises MesetaError, for `function`, if another `fit` or `resume` uses the folder, or it cannot be written.
    """

    def in_use_text(holder: str) -> str:
        return (
            f"{function}: run_dir {str(run_dir)!r} is in use: another fit or resume of {holder} prepares or trains in "
            "it; wait until it has ended, or choose another run_dir"
        )

    lock = FolderLock(run_dir, in_use_text, file=f"{SPOOL_FOLDER}.lock")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise MesetaError(f"{function}: {str(run_dir)!r}: {error.strerror}; choose another run_dir") from None
    try:
        yield
    finally:
        lock.release()


def open_run(path: str | Path) -> Run:
    """Open a run folder, also one that was moved. The training data are not needed.

    Raises MesetaError if the folder has no run.
    """
    run = Run(path)
    run.config  # noqa: B018 - raises an error that names the folder
    return run


class Run:
    """A training run, finished or not, in its folder."""

    def __init__(self, path: str | Path) -> None:
        """Create an object for the run in the folder `path`."""
        self.path = Path(path)
        self._folder = RunDir(self.path)

    @cached_property
    def config(self) -> RunConfig:
        """Config of the run, with all settings. Raises MesetaError if there is none."""
        return self._folder.load_config()

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Metrics of the final weights by split, or of the last evaluation of each split before the end.

        Raises MesetaError if files of the run cannot be read.
        """
        summary = self._folder.read_summary()
        lines = {line.split: line for line in self._folder.evaluations()}
        if summary is not None:
            lines |= {split: line for split in EVALUATED_SPLITS if (line := summary.evaluation(split)) is not None}
        return {split: _metrics_of(line) for split, line in lines.items()}

    @property
    def history(self) -> pa.Table:
        """Training progress and evaluations in their order, with the columns HISTORY. The split of progress is "train",
        whose metrics are those of the samples since the row before."""
        rows = []
        for line in self._folder.lines():
            split = line.split if isinstance(line, EvalLine) else "train"
            rows.append({"split": split} | {n: getattr(line, n, None) for n in HISTORY.names if n != "split"})
        return pa.Table.from_pylist(rows, schema=HISTORY)

    @property
    def checkpoints(self) -> list[CheckpointInfo]:
        """Checkpoints, oldest first. Raises MesetaError if there is none."""
        return list_checkpoints(self._folder.checkpoints)

    @cached_property
    def model(self) -> Any:
        """Model with the final weights, a torch.nn.Module in evaluation mode, on the device of `config`.

        Raises MesetaError if there is no complete checkpoint.
        """
        from meseta.train.session import session
        from meseta.train.trained_model import load_model

        with _same_threads(), session(self.config) as world:
            return load_model(self.path, world)

    def predict(
        self,
        data: str | Path | Rows,
        *,
        best: bool = False,
        allow_unseen: bool = False,
        more_runs: Sequence[Run | str | Path] = (),
        average: Averaged = "probability",
    ) -> Any:
        """Predict rows, with or without labels, in their order.

        Returns the column "prediction" (float32), or "prediction.NAME" for each of several labels. A frame of pandas
        returns one with the same index, a frame of polars one of polars, a dict a dict of NumPy arrays, and everything
        else a pyarrow Table.
        Raises MesetaError if columns of the training data are missing or have other types, or if training saw none of
        the values and `allow_unseen` is not set. Also raises MesetaError if runs predict other labels.

        Args:
            data: Files, or rows in memory. Other columns than those of the training data are ignored.
            best: Whether to use the checkpoint of the best evaluation.
            allow_unseen: Whether rows may have only new values.
            more_runs: Runs or their folders, with which predictions are averaged.
            average: Predictions that are averaged, "probability" or "logit".
        """
        averaged = _average_options(more_runs, average)
        table, _ = self._predict(data, best=best, allow_unseen=allow_unseen, **averaged)
        return like_rows(table, data)

    def evaluate(
        self,
        data: str | Path | Rows | None = None,
        *,
        split: str = "test",
        best: bool = False,
        more_runs: Sequence[Run | str | Path] = (),
        average: Averaged = "probability",
    ) -> dict[str, Any]:
        """Evaluate the weights on labeled rows, or on a split of the training data, and return the metrics.

        With several labels, rows have metrics by label. `more_runs` and `average` are those of `predict`.
        Raises MesetaError as `predict` does, or if rows have no labels or there is no such split.
        """
        options = {"best": best, **_average_options(more_runs, average)}
        if data is not None:
            _, metrics = self._predict(data, **options)
            return next(iter(metrics.values())) if len(metrics) == 1 else metrics
        from meseta.train.trained_model import open_trained

        with _same_threads(), argument_errors("evaluate"), open_trained(self.path, split, **options) as trained:
            return trained.evaluate().to_dict(include_reliability=False)

    def _predict(self, data: Any, **options: Any) -> tuple[pa.Table, dict[str, dict[str, Any]]]:
        """Return predictions and, for labeled rows, metrics by label."""
        from meseta.train.predictions import write_raw_predictions
        from meseta.train.trained_model import open_for_raw_rows

        with tempfile.TemporaryDirectory(prefix="meseta-predict-") as folder, _same_threads():
            paths, out = file_paths(data, Path(folder)), Path(folder) / "predictions.out.parquet"
            named = spooled_names(paths, Path(folder))
            with argument_errors("predict", named), open_for_raw_rows(self.path, paths, **options) as trained:
                predicted = write_raw_predictions(trained.model, trained.reader, trained.world, out, trained.correction)
            table = pq.read_table(out)
        names = [name for name in table.column_names if name.partition(".")[0] == "prediction"]
        return table.select(names), predicted.metrics

    def report(self) -> Path:
        """Write the HTML report of the run and return its path. Raises MesetaError if it cannot be written."""
        from meseta.report import write_report

        return write_report(self.path)

    def resume(self, nproc: int = 1, callbacks: Sequence[Callback] = ()) -> Run:
        """Continue a run that was interrupted, without the raw data, and return it. See `fit` for errors."""
        arguments = ["train", str(self.path / "config.yaml"), f"run_dir={self.path}", "--nproc", str(nproc)]
        if self.config.data.dir is not None:  # The run may have been moved, with its data.
            arguments.append(f"data.dir={self.config.data.dir}")
        # A `fit` that still spools rows has not begun the run, so the run folder itself is not locked yet.
        with lock_spool("resume", self.path), argument_errors("resume"):
            run_command(arguments, callbacks)
        return Run(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Show the main metrics of each split in a notebook."""
        head = "".join(f"<th>{name}</th>" for name in ("split", *MAIN_METRICS, "samples"))
        rows = ""
        for split, metrics in self.metrics.items():
            values = ["" if metrics.get(name) is None else f"{metrics[name]:.4f}" for name in MAIN_METRICS]
            cells = "".join(f"<td>{value}</td>" for value in (*values, f"{metrics['num_samples']:,}"))
            rows += f"<tr><th>{html.escape(split)}</th>{cells}</tr>"
        return f"<p>Run <code>{html.escape(str(self.path))}</code></p><table><tr>{head}</tr>{rows}</table>"


def _average_options(more_runs: Sequence[Run | str | Path], average: Averaged) -> dict[str, Any]:
    paths = [run.path if isinstance(run, Run) else Path(run) for run in more_runs]
    return {"more_runs": paths, "averaged": average}


def _metrics_of(line: EvalLine) -> dict[str, Any]:
    return {name: value for name, value in line.to_dict().items() if name not in {"kind", "split", "reliability"}}


@contextmanager
def _same_threads() -> Iterator[None]:
    """Context manager that restores torch's number of threads."""
    import torch

    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
