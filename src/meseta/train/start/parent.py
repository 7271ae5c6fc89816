"""The parent of a run: the checkpoint from which it starts, and what describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meseta.checkpoint import DamagedCheckpoint, fallback_checkpoint_error, find_checkpoint
from meseta.checkpoint.files.paths import parse_step
from meseta.checkpoint.manifest import read_manifest
from meseta.config import RunConfig
from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.data.dataset.encoding import DatasetEncoding, encoding_difference, with_vocabulary_digests
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.system.files import path_exists
from meseta.system.remote import Location, RemotePath, to_location
from meseta.train.dataset_checks import load_encoding, load_training_dataset
from meseta.train.run_dir import RunDir
from meseta.train.start.remote_encoding import fetch_encoding
from meseta.train.start.start_record import StartRecord


@dataclass(frozen=True, kw_only=True)
class Parent:
    """Checkpoint of another run."""

    checkpoint: Location
    run: RunDir | None
    """Run folder, or a copy of its config and encoding. `None` for a checkpoint alone."""

    @staticmethod
    def find(start_from: str, run_dir: Path) -> Parent:
        """Find the checkpoint of a run folder as `meseta predict` does, or the checkpoint at a path or URL.

        Config and encoding at a URL are copied to `run_dir`, that of the new run. Raises MesetaError without a
        checkpoint.
        """
        place = to_location(start_from)
        run = _run_of(place)
        if run is not None and run.path == place:
            path = run.final_checkpoint()
            if path is None:
                raise MesetaError(
                    f"start_from {start_from!r} is a run without a checkpoint; train it first with `meseta train`"
                )
            return Parent(checkpoint=path, run=run)
        if isinstance(place, Path) and not path_exists(place):
            raise MesetaError(f"start_from {start_from!r} does not exist; pass the run_dir or a checkpoint of a run")
        path = find_checkpoint(place)
        return Parent(checkpoint=path, run=_find_run(start_from, path, run_dir))

    def record(self, start_from: str, settings: Mapping[str, Any]) -> StartRecord:
        """Return the record of a run that starts from this parent. Raises MesetaError if its manifest is damaged."""
        return StartRecord(
            start_from=start_from, checkpoint=str(self.checkpoint), checksum=self.checksum, settings=dict(settings)
        )

    @staticmethod
    def from_record(record: StartRecord, run_dir: Path) -> Parent:
        """Return the parent of a record in `run_dir`. Raises MesetaError if its checkpoint is missing or has changed
        since."""
        path = to_location(record.checkpoint)
        try:
            parent = Parent(checkpoint=path, run=_find_run(record.start_from, path, run_dir))
            checksum = parent.checksum
        except StorageError:
            raise
        except MesetaError as error:
            raise MesetaError(
                f"start_from {record.start_from!r}: the run has no checkpoint yet, and {error}; restore the "
                "parent, or start from another one with --force"
            ) from None
        if checksum != record.checksum:
            raise MesetaError(
                f"start_from {record.start_from!r}: checkpoint {record.checkpoint!r} has changed since the run was "
                "started; restore it, or start again from it with --force"
            )
        return parent

    def check_other_place(self, run_dir: Path, places: Sequence[Location | str | None] = ()) -> None:
        """Raise MesetaError if a run in `run_dir` would write to the parent, or its checkpoints to one of its
        `places`."""
        if self.run is None:
            if isinstance(self.checkpoint, Path) and self.checkpoint.resolve().is_relative_to(run_dir.resolve()):
                raise MesetaError(f"run_dir {str(run_dir)!r} contains start_from; choose another run_dir")
            return
        if self.run.path.resolve() == run_dir.resolve():
            raise MesetaError(f"run_dir {str(run_dir)!r} is start_from itself; choose another run_dir")
        former = self.run.load_config()
        taken = {str(to_location(place)) for place in (self.run.checkpoints, former.checkpoint.mirror) if place}
        for place in places:
            if place is not None and str(to_location(place)) in taken:
                raise MesetaError(
                    f"checkpoints of run_dir {str(run_dir)!r} would be at {str(place)!r}, where those of start_from "
                    "are; set checkpoint.dir or checkpoint.mirror to another URL"
                )

    @property
    def checksum(self) -> str:
        """SHA-256 of the manifest, which has the checksums of all other files. Raises MesetaError if it is damaged."""
        try:
            return str(read_manifest(self.checkpoint)["manifest_checksum"])
        except DamagedCheckpoint as problem:
            raise damaged_parent_error(problem, self.checkpoint) from None

    def load_config(self) -> RunConfig | None:
        """Return the config of the run, or `None` without its folder."""
        return None if self.run is None else self.run.load_config()

    def encoding_folder(self, like: Path | None = None) -> Path:
        """Return the folder of the dataset that `load_dataset` returns. Raises MesetaError if it is unknown."""
        folder = self.run.path if like is None and self.run is not None else like
        if folder is None:
            raise MesetaError(
                f"checkpoint {str(self.checkpoint)!r} is not in the folder of its run, so the encoding of its data is "
                "unknown; add --like RUN or DATASET with the same encoding"
            )
        return folder

    def load_dataset(self, like: Path | None = None) -> Dataset:
        """Return the dataset with whose encoding the checkpoint was trained.

        It is that of the run folder, or the one in folder `like` for a checkpoint alone. Raises MesetaError if there
        is none, or it has another encoding than the checkpoint.
        """
        folder, where = self.encoding_folder(like), f"checkpoint {str(self.checkpoint)!r}"
        if self.run is not None and folder == self.run.path:
            dataset = load_training_dataset(self.run, self.run.load_config())
        else:
            dataset = Dataset.load(folder)
        dataset = with_vocabulary_digests(dataset)
        recorded = load_encoding(self.checkpoint)
        if recorded is not None:
            kept = recorded.column_names
            others = [name for name in DatasetEncoding.from_dataset(dataset).column_names if name not in kept]
            dataset = dataset.select(recorded.labels, others)
            difference = encoding_difference(recorded, DatasetEncoding.from_dataset(dataset))
            if difference is not None:
                raise MesetaError(
                    f"{where} was trained with another encoding than that of {str(folder)!r}: {difference}; pass "
                    "--like RUN or DATASET with the same encoding"
                )
        return dataset


def damaged_parent_error(problem: DamagedCheckpoint, path: Location) -> MesetaError:
    """Return the error of a damaged parent, which names the newest intact checkpoint before it."""
    fallback = None if parse_step(path) is None else fallback_checkpoint_error(problem, path).fallback
    if fallback is None:
        return MesetaError(f"{problem}; no older checkpoint in its folder is intact")
    return MesetaError(f"{problem}: {str(fallback)!r} is intact; start from it with --start-from {fallback}")


def find_parent(config: RunConfig) -> Parent:
    """Return the parent that a config names: the checkpoint in the record of the run, or the one to choose now.

    Raises MesetaError if it is missing, or has changed since it was recorded.
    """
    assert config.start_from is not None
    record = StartRecord.load(config.run_dir)
    if record is None:
        return Parent.find(config.start_from, config.run_dir)
    return Parent.from_record(record, config.run_dir)


def find_encoding_folder(config: RunConfig) -> Path:
    """Return the folder with the encoding of the parent that a config names. Raises MesetaError if it has another
    one."""
    parent = find_parent(config)
    parent.load_dataset(config.start.like)
    return parent.encoding_folder(config.start.like)


def _find_run(start_from: str, checkpoint: Location, run_dir: Path) -> RunDir | None:
    run = _run_of(to_location(start_from)) or _run_of(checkpoint)
    if run is None and isinstance(checkpoint, RemotePath):
        folder = fetch_encoding(checkpoint, run_dir)
        run = None if folder is None else RunDir(folder)
    return run


def _run_of(place: Location) -> RunDir | None:
    """Return the run folder that `place` is, or in whose `checkpoints` it is."""
    if not isinstance(place, Path):
        return None
    for folder in (place, *place.parents[:2]):
        if path_exists(folder / "config.yaml") and path_exists(folder / DATASET_FILE):
            return RunDir(folder)
    return None
