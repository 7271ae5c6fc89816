"""Checks that a run is resumed or evaluated on the data that it was trained on."""

from __future__ import annotations

import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from meseta.checkpoint import DamagedCheckpoint
from meseta.checkpoint.manifest import read_manifest
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import DATASET_FILE, Dataset
from meseta.data.dataset.encoding import DatasetEncoding, encoding_difference, row_difference, uncomparable_parts
from meseta.spec import MesetaError
from meseta.system.files import path_exists
from meseta.system.remote import Location
from meseta.train.run_dir import RunDir
from meseta.train.setup.source import make_row_source

_OTHER_RUN_HINT = "choose another run_dir, or start from the beginning with --force"
ENCODING_KEY = "encoding"
"""Key of the data encoding in the state of a checkpoint."""


def open_dataset(config: RunConfig, world: World, data: Path | None = None) -> Dataset:
    """Open the dataset of a config, or the folder `data`, with the labels and features of the config. Collective.

    Only the dataset of a run without checkpoint must have the features of `data.without`.
    Raises MesetaError if it cannot be read, or, on all ranks, if they read different datasets.
    """
    source = make_row_source(config.data, data)
    dataset = world.broadcast_from_rank_0(source.dataset) if source.is_served else source.dataset()
    has_begun = bool(config.data.without) and world.broadcast_from_rank_0(lambda: RunDir(config.run_dir).has_begun)
    dataset = dataset.select(config.data.labels, config.data.without, allow_missing=data is not None or has_begun)
    if config.start_from is not None and not source.is_served:
        dataset = dataset.with_times()  # For metrics by hour.
    if world.size > 1:
        digests = world.all_gather_object(sha256(dataset.model_dump_json().encode()).hexdigest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise MesetaError(
                    f"dataset {str(dataset.dir)!r}: rank {rank} and rank 0 have different files {DATASET_FILE}; copy "
                    "the same folder to all hosts"
                )
    return dataset


def load_training_dataset(run: RunDir, config: RunConfig) -> Dataset:
    """Return the run folder's dataset, or that of existing training data if an older version recorded less. It has no
    features that the config leaves out."""
    kept = Dataset.load(run.path)
    vocabularies = [feature.vocabulary for feature in kept.sparse if feature.vocabulary is not None]
    if kept.source_form is None or not all(path_exists(run.path / path) for path in vocabularies):
        with suppress(MesetaError):
            if config.data.dir is not None:
                return Dataset.load(config.data.dir).select(None, config.data.without, allow_missing=True)
    return kept


def encoding_state(dataset: Dataset) -> dict[str, Any]:
    """Return the entry of a checkpoint that `check_same_encoding` reads."""
    return {ENCODING_KEY: DatasetEncoding.from_dataset(dataset).to_dict()}


def check_same_encoding(
    run: RunDir, checkpoint: Location | None, dataset: Dataset, world: World, way_out: str = _OTHER_RUN_HINT
) -> None:
    """Raise MesetaError, on all ranks, if ids or dense columns of `dataset` have another meaning than in training.
    Collective.

    The encoding of training is that in `checkpoint`, or in the run folder if `checkpoint` is `None` or of an older
    version. A note lists properties that were not recorded.
    """
    problem: Exception | None = None
    notes = []
    try:
        before = _load_recorded_encoding(run, checkpoint)
        now = DatasetEncoding.from_dataset(dataset)
        if before is None:
            notes = ["the data that it was trained on"] if checkpoint is not None else []
        elif (difference := encoding_difference(before, now)) is not None:
            problem = _other_data_error(run, dataset, difference, way_out)
        else:
            notes = uncomparable_parts(before, now)
    except (MesetaError, OSError) as error:
        problem = error
    world.raise_on_all_ranks(problem)
    if notes and world.rank == 0:
        more = f" and {len(notes) - 1:,} more" if len(notes) > 1 else ""
        print(f"note: {notes[0]}{more} cannot be compared, because an older version did not record it; assuming that "
              f"of {str(dataset.dir)!r}", file=sys.stderr)  # fmt: skip


def check_same_rows(run: RunDir, dataset: Dataset, world: World) -> None:
    """Raise MesetaError, on all ranks, if the run was trained on other rows than those of `dataset`: other numbers
    of rows, files or statistics. Collective."""
    problem: Exception | None = None
    try:
        if path_exists(run.path / DATASET_FILE):
            differs = row_difference(Dataset.load(run.path), dataset)
            problem = None if differs is None else _other_data_error(run, dataset, differs, _OTHER_RUN_HINT)
    except (MesetaError, OSError) as error:
        problem = error
    world.raise_on_all_ranks(problem)


def _other_data_error(run: RunDir, dataset: Dataset, differs: str, way_out: str) -> MesetaError:
    return MesetaError(
        f"run_dir {str(run.path)!r} was trained on other data than those of {str(dataset.dir)!r}: {differs}; {way_out}"
    )


def load_encoding(checkpoint: Location) -> DatasetEncoding | None:
    """Return the encoding of a checkpoint's data, or `None` if it is not recorded. Raises MesetaError if damaged."""
    state = read_manifest(checkpoint)["state"]
    return (
        DatasetEncoding.from_dict(state[ENCODING_KEY], f"checkpoint {str(checkpoint)!r}")
        if ENCODING_KEY in state
        else None
    )


def _load_recorded_encoding(run: RunDir, checkpoint: Location | None) -> DatasetEncoding | None:
    if checkpoint is not None:
        with suppress(DamagedCheckpoint):  # Loading the checkpoint raises the error with a remedy.
            encoding = load_encoding(checkpoint)
            if encoding is not None:
                return encoding
    if not path_exists(run.path / DATASET_FILE):
        return None
    return DatasetEncoding.from_dataset(_with_source_digests(run, Dataset.load(run.path)))


def _with_source_digests(run: RunDir, kept: Dataset) -> Dataset:
    """Add missing vocabulary digests to the description in a run folder, from the data source.

    A digest is used only if the rest of the feature, including its statistics, is equal.
    """
    if all(feature.vocabulary_digest or feature.encoding != "vocabulary" for feature in kept.sparse):
        return kept
    try:
        source = make_row_source(run.load_config().data).dataset()
    except MesetaError:
        return kept
    uncompared = {"vocabulary_digest": None, "test_lookups": None}  # Older versions did not record these.
    there = {feature.name: feature.model_copy(update=uncompared) for feature in source.sparse}
    digests = {feature.name: feature.vocabulary_digest for feature in source.sparse}
    sparse = [
        feature.model_copy(update={"vocabulary_digest": digests[feature.name]})
        if feature.vocabulary_digest is None and there.get(feature.name) == feature
        else feature
        for feature in kept.sparse
    ]
    return kept.model_copy(update={"sparse": tuple(sparse)})
