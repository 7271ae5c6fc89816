"""Files of a run folder: config, dataset description, plan, environment, metrics, summary, checkpoints and report."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from meseta.checkpoint.files.paths import CHECKPOINT_NAME_PATTERN, checkpoint_path
from meseta.checkpoint.store.store import check_writable, make_store, newest
from meseta.comm import World
from meseta.config import RunConfig, load_config
from meseta.config.load import checkpoint_location
from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.data.prepare.staging import SPOOL_FOLDER
from meseta.errors import StorageError
from meseta.ops.row_file import DiskEngine
from meseta.spec import MesetaError
from meseta.spec.tiers import DISK
from meseta.system.environment import git_commit, package_version
from meseta.system.files import append_atomic, format_json, is_folder, is_read_failure, move, path_exists
from meseta.system.locks import FolderLock
from meseta.system.processors import choose_num_threads, num_cores, read_processor
from meseta.system.ranks import print_note
from meseta.system.remote import Location, RemotePath, location_is_folder
from meseta.telemetry.metrics_file import (
    METRICS_FILE,
    EvalLine,
    Line,
    MetricsLine,
    TrainLine,
    corrupt_lines_message,
    read_metrics_lines,
)
from meseta.telemetry.rank_record import RANKS_FOLDER
from meseta.telemetry.summary import (
    ENVIRONMENT_FILE,
    SUMMARY_FILE,
    TRIALS_FILE,
    PackageVersions,
    RunEnvironment,
    RunSummary,
    read_summary,
)
from meseta.telemetry.timeline import TIMELINE_FILE
from meseta.train.setup.source import make_row_source
from meseta.train.start.remote_encoding import upload_encoding

TRIALS_FOLDER = "trials"
"""Folder of the trials before a run, see meseta.train.search."""
LOGGER_FILES = {"mlflow": "mlflow.json", "wandb": "wandb.json"}
"""Files with the id of the run in each logger, see meseta.train.interop.loggers."""


class RunDir:
    """Run folder, which only rank 0 writes to. Checkpoints may be stored elsewhere."""

    def __init__(self, path: Path, checkpoints: Location | None = None) -> None:
        """Create an object for the folder `path`. `checkpoints` defaults to the location in the config of the run."""
        self.path = path
        self.checkpoints = checkpoint_location(path) if checkpoints is None else checkpoints
        self._metrics_path = path / METRICS_FILE
        self._lock = FolderLock(path, self._lock_error_text)
        self._printed_notes: set[str] = set()

    def read_summary(self) -> RunSummary | None:
        """Return the summary of the last completed start, or `None`. See `meseta.telemetry.summary.read_summary`."""
        return read_summary(self.path)

    def _lock_error_text(self, holder: str) -> str:
        return (
            f"run_dir {str(self.path)!r} is in use: {holder} trains in it; wait until it has ended, stop it, or choose "
            "another run_dir"
        )

    def begin(self, config: RunConfig, dataset: Dataset, plan: Mapping[str, Any], device: str) -> None:
        """Lock the folder, and write the files that are known before the first step.

        They include the files required to encode new rows.
        Raises MesetaError if the folder cannot be written, another run uses it, or a dispatcher does not send the
        files.
        """
        with self._wrap_write_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            if isinstance(self.checkpoints, Path):
                self.checkpoints.mkdir(parents=True, exist_ok=True)
            else:
                check_writable(self.checkpoints)
            for path in (self.path / RANKS_FOLDER).glob("*.record"):  # Records of the previous start.
                path.unlink()
            if plan["num_ranks"] > 1:
                (self.path / RANKS_FOLDER).mkdir(exist_ok=True)
            shutil.rmtree(self.path / SPOOL_FOLDER, ignore_errors=True)  # The rows are prepared now.
            for path in self.path.glob(".*.tmp"):  # Incomplete files of killed runs.
                if not path.is_dir():
                    path.unlink()
            dataset = make_row_source(config.data).keep_tables(dataset, self.path)
        for path in make_store(self.checkpoints).unrecognized_entries():
            self._print_once(f"{str(path)!r} is no checkpoint and is ignored")
        document = config.model_dump(mode="json")
        self.write("config.yaml", yaml.safe_dump(document, sort_keys=False))
        self.write_json(DATASET_FILE, dataset.to_dict())
        if isinstance(self.checkpoints, RemotePath):
            with self._wrap_write_errors():
                upload_encoding(self.path, self.checkpoints)
        self.write_json("plan.json", plan)
        noted = describe_environment(device, plan["num_ranks"], choose_num_threads(config.num_threads).number)
        if any(shard["tier"] == DISK for entry in plan["tables"].values() for shard in entry["shards"]):
            assert config.storage.dir is not None
            facts = DiskEngine(config.storage.dir, config.storage.engine).info  # Creates the folder.
            noted = noted.model_copy(update={"row_files": facts.summary})
        self.write_json(ENVIRONMENT_FILE, noted.to_dict())

    def checkpoint_path(self, step: int) -> Location:
        """Return the path of the checkpoint of a step."""
        return checkpoint_path(self.checkpoints, step)

    @property
    def has_begun(self) -> bool:
        """Whether a run in this folder has reached its first step."""
        return path_exists(self._metrics_path)

    def lock(self) -> None:
        """Lock the folder, if it exists, until `unlock`. Raises MesetaError if another run uses it."""
        if is_folder(self.path):
            with self._wrap_write_errors():
                self._lock.acquire()

    def clear(self) -> None:
        """Remove checkpoints, metrics and results, but no other files. Raises MesetaError if the folder is in use."""
        if not is_folder(self.path):
            return
        self.lock()
        try:
            with self._wrap_write_errors():
                make_store(self.checkpoints).remove_all()
                shutil.rmtree(self.path / TRIALS_FOLDER, ignore_errors=True)
                names = METRICS_FILE, SUMMARY_FILE, TIMELINE_FILE, TRIALS_FILE, "report.html", *LOGGER_FILES.values()
                for name in names:
                    (self.path / name).unlink(missing_ok=True)
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Release the lock of the folder."""
        self._lock.release()

    def _print_once(self, text: str) -> None:
        if text not in self._printed_notes:
            print_note(text)
        self._printed_notes.add(text)

    @contextlib.contextmanager
    def _wrap_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MesetaError(
                f"run_dir {str(self.path)!r} cannot be written: {error.strerror}; free space there, or choose another"
            ) from None

    def write(self, name: str, text: str | bytes) -> None:
        """Replace a file atomically. Raises MesetaError if it cannot be written, and then keeps the old file."""
        temporary = self.path / f".{name}.tmp"
        with self._wrap_write_errors():
            try:
                temporary.write_bytes(text if isinstance(text, bytes) else text.encode())
                move(temporary, self.path / name)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Replace a JSON file. See `write`."""
        self.write(name, format_json(document))

    def append_metrics(self, line: Line) -> None:
        """Append one line to metrics.jsonl, atomically. Raises MesetaError if it cannot be written."""
        with self._wrap_write_errors(), self._metrics_path.open("ab", buffering=0) as file:
            append_atomic(file, f"{json.dumps(line.to_dict())}\n".encode())

    def truncate_metrics(self, step: int, num_steps: int) -> None:
        """Remove the lines of metrics.jsonl that a run resumed at `step` writes again, and lines truncated by a kill.

        The final evaluations of a finished run are removed too. Other corrupt lines are reported and kept.
        """

        def stays(line: MetricsLine) -> bool:
            if isinstance(line.record, TrainLine):
                return line.record.step <= step
            if isinstance(line.record, EvalLine):
                return line.record.step <= min(step, num_steps - 1)
            return line.is_complete

        with self._wrap_write_errors():
            (self.path / SUMMARY_FILE).unlink(missing_ok=True)
        lines = self._read_lines()
        again = next((number for number, line in enumerate(lines) if line.record and not stays(line)), len(lines))
        kept = lines[:again] + [line for line in lines[again:] if not line.record]
        self.write(METRICS_FILE, b"".join(line.content + b"\n" for line in kept if stays(line)))

    def final_checkpoint(self) -> Location | None:
        """Return the checkpoint with the final weights of the run, or `None` if there is none.

        It is the newest one, whether complete or not. If the run ended with its best weights, it is the one with these.
        Raises MesetaError if the best checkpoint is missing.
        """
        last = newest(self.checkpoints)
        best = None if last is None else self._best_step()
        path = last if best is None else self.checkpoint_path(best)
        if path is not None and not location_is_folder(path):
            raise MesetaError(
                f"run {str(self.path)!r} ended with the weights of step {best}, but {str(path)!r} does not exist; "
                "set train.finish to last in its config.yaml to use the newest checkpoint"
            )
        return path

    def _best_step(self) -> int | None:
        try:
            if self.load_config().train.finish == "best":
                summary = read_summary(self.path)
                name = Path((summary and summary.checkpoint) or "").name
                return int(match["step"]) if (match := CHECKPOINT_NAME_PATTERN.fullmatch(name)) else None
        except StorageError:
            raise
        except MesetaError:
            pass  # The config is of another version.
        return None

    def lines(self) -> list[Line]:
        """Return the log and evaluation lines of metrics.jsonl. Raises MesetaError if it cannot be read."""
        return [line.record for line in self._read_lines() if line.record is not None]

    def evaluations(self) -> list[EvalLine]:
        """Return the evaluation lines of metrics.jsonl. Raises MesetaError if it cannot be read."""
        return [line for line in self.lines() if isinstance(line, EvalLine)]

    def _read_lines(self) -> list[MetricsLine]:
        try:
            lines = list(read_metrics_lines(self._metrics_path))
        except FileNotFoundError:
            return []
        except OSError as error:
            what = f"run {str(self.path)!r}: {METRICS_FILE}: {error.strerror}"
            if is_read_failure(error):
                raise StorageError(f"{what}; run the command again once it can be read") from None
            raise MesetaError(f"{what}; move it away") from None
        if spoiled := [line.number for line in lines if line.is_corrupt and line.is_complete]:
            self._print_once(f"{str(self._metrics_path)!r}: {corrupt_lines_message(spoiled)} left alone")
        return lines

    def load_config(self) -> RunConfig:
        """Load the config with which the run was started. If the run was moved with its data, so is `data.dir`.

        Raises MesetaError if there is none.
        """
        file = self.path / "config.yaml"
        if not path_exists(file):
            raise MesetaError(f"{str(self.path)!r} is not a run: it has no config.yaml; pass the run_dir of a training")
        return self._with_moved_data(load_config(file, is_stored=True))

    def _with_moved_data(self, config: RunConfig) -> RunConfig:
        data_dir = config.data.dir
        if data_dir is None or not data_dir.is_relative_to(config.run_dir) or path_exists(data_dir):
            return config
        moved = self.path / data_dir.relative_to(config.run_dir)
        if not path_exists(moved):
            return config
        return config.model_copy(update={"data": config.data.model_copy(update={"dir": moved})})


def clear_run(config: RunConfig, world: World) -> None:
    """Remove the results of a run, see `RunDir.clear`. Collective. Raises MesetaError if a mirror would restore it."""
    if config.checkpoint.mirror is not None:
        raise MesetaError(
            f"--force: checkpoint.mirror {config.checkpoint.mirror!r} may have the run too, and --force does not "
            "clear mirrors; choose another mirror and run_dir"
        )
    world.run_on_rank_0(RunDir(config.run_dir, config.checkpoint_location).clear)


def describe_environment(device: str, num_ranks: int, num_threads: int) -> RunEnvironment:
    """Return the software and hardware that measurements of this run depend on."""
    versions = {package: package_version(package) for package in ("meseta", "torch", "numpy", "pyarrow")}
    processor = read_processor()
    return RunEnvironment(
        versions=PackageVersions(python=platform.python_version(), **versions),
        num_cores=num_cores(),
        num_threads=num_threads,
        processor=processor.name,
        instructions=processor.instruction_set(),
        device=device,
        num_ranks=num_ranks,
        commit=git_commit() or None,
    )
