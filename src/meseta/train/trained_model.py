"""A trained model, ready to evaluate: the newest checkpoint of a run, on any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from meseta import checkpoint
from meseta.checkpoint.manifest import read_manifest
from meseta.checkpoint.store.names import parse_step
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.encoding import with_vocabulary_digests
from meseta.data.prepare.new_rows import NewRows
from meseta.data.read.batch_reader import BatchReader
from meseta.data.read.new_batches import NewBatches
from meseta.data.read.options import ReaderOptions
from meseta.data.read.selection import calibration_shift
from meseta.errors import StorageError
from meseta.machine.files import path_exists
from meseta.machine.remote import Location
from meseta.spec import MesetaError
from meseta.spec.documents import rename_keys
from meseta.spec.plan_document import FORMER_KEYS
from meseta.spec.tiers import DISK, OFFLOADED_TIERS
from meseta.telemetry.splits import validation_split
from meseta.train.dataset_checks import check_same_encoding, open_dataset
from meseta.train.early_stopping import EarlyStopping
from meseta.train.run_dir import RunDir
from meseta.train.session import session
from meseta.train.setup.build import make_sharded_model
from meseta.train.setup.precision import bfloat16_note
from meseta.train.setup.source import make_row_source
from meseta.train.state import restore

ReaderT = TypeVar("ReaderT", BatchReader, NewBatches)


@dataclass(frozen=True)
class TrainedModel(Generic[ReaderT]):
    """A model and the rows to apply it to."""

    model: Any
    reader: ReaderT
    world: World
    step: int
    """Steps that the checkpoint was trained for."""
    config: RunConfig
    """Of the run."""

    @property
    def logit_shift(self) -> float:
        """What to add to its logits, since it may have seen only a share of the negatives."""
        return calibration_shift(self.config.data.negative_keep)


@contextmanager
def open_trained(
    run_dir: Path,
    split: str,
    data: Path | None = None,
    *,
    best: bool = False,
    ignore_filter: bool = False,
    storage_dir: Path | None = None,
) -> Iterator[TrainedModel[BatchReader]]:
    """`load_trained` on the ranks of this process; raises what it raises."""
    with session(RunDir(run_dir).load_config()) as world:
        yield load_trained(run_dir, split, world, data, best=best, ignore_filter=ignore_filter, storage_dir=storage_dir)


@contextmanager
def open_for_raw_rows(
    run_dir: Path,
    patterns: Sequence[str],
    *,
    keys: Sequence[str] = (),
    best: bool = False,
    storage_dir: Path | None = None,
    encoding: str | None = None,
    allow_unseen: bool = False,
) -> Iterator[TrainedModel[NewBatches]]:
    """`load_for_raw_rows` on the ranks of this process; raises what it raises."""
    options: dict[str, Any] = {"keys": keys, "best": best, "storage_dir": storage_dir, "encoding": encoding}
    with session(RunDir(run_dir).load_config()) as world:
        yield load_for_raw_rows(run_dir, patterns, world, allow_unseen=allow_unseen, **options)


def load_trained(
    run_dir: Path,
    split: str,
    world: World,
    data: Path | None = None,
    *,
    best: bool = False,
    ignore_filter: bool = False,
    storage_dir: Path | None = None,
) -> TrainedModel[BatchReader]:
    """Load the checkpoint that stands for `run_dir` (its newest, or what train.finish says), or that of its best
    evaluation. A plan made for another number of ranks
    gives way to one for this rank. Tables lie in the tiers that they had, or all on the disk of `storage_dir`. The rows
    are those that data.filter leaves, or all where `ignore_filter` says so, for predictions beside columns of their
    files.

    Raises MesetaError where there is no run, no checkpoint, no such split, data that were encoded otherwise than
    those of the run, and, with `ignore_filter`, rows that come from a dispatcher.
    """
    run = RunDir(run_dir)
    config, path = _find_checkpoint(run, best=best)
    source = make_row_source(config.data, data)
    if ignore_filter and source.is_served:
        raise MesetaError(
            f"predict: the rows of run {str(run_dir)!r} come from the readers of {source}, and a split is predicted "
            "where its files are; name their folder with --data DIR, or raw files with --data FILE"
        )
    dataset = open_dataset(config, world, data)
    way_out = f"prepare them in one call with the sources of {str(make_row_source(config.data))!r}, as --test-files"
    check_same_encoding(run, path, dataset, world, way_out)
    options = ReaderOptions(
        batch_size=config.train.eval_batch_size,
        prefetch_batches=config.data.prefetch_batches,
        filter=None if ignore_filter else config.data.filter,
    )
    reader = source.reader(dataset, split, options, world)
    return _restore_model(_with_plan(config, path, storage_dir, world), path, dataset, reader, world)


def load_for_raw_rows(
    run_dir: Path,
    patterns: Sequence[str],
    world: World,
    *,
    keys: Sequence[str] = (),
    best: bool = False,
    storage_dir: Path | None = None,
    encoding: str | None = None,
    allow_unseen: bool = False,
) -> TrainedModel[NewBatches]:
    """The same model, and the rows of raw files, which are encoded as those that it was trained on; `keys`: columns of
    these files to hand through, for rank 0; `encoding`: of text, if not that of the earlier files. Without
    `allow_unseen`, reading them ends with a MesetaError if training has not seen their values.

    Raises MesetaError, on all ranks, where there is no run or checkpoint, where nothing was kept of how its data were
    encoded, and as NewRows does.
    """
    run = RunDir(run_dir)
    config, path = _find_checkpoint(run, best=best)
    earlier = world.broadcast_from_rank_0(lambda: with_vocabulary_digests(_load_training_dataset(run, config)))
    check_same_encoding(
        run, path, earlier.with_labels(config.data.labels), world, "it cannot be told how to read new rows"
    )
    rows, problem = None, None
    try:
        keys = keys if world.rank == 0 else ()
        rows = NewRows(earlier, patterns, keys=keys, encoding=encoding, allow_unseen=allow_unseen)
    except MesetaError as error:
        problem = error
    world.raise_on_all_ranks(problem)
    assert rows is not None
    _check_same_files(rows, world)
    batches = NewBatches(
        rows,
        rows.dataset.with_labels(config.data.labels),
        config.train.eval_batch_size,
        prefetch_batches=config.data.prefetch_batches,
        rank=world.rank,
        num_ranks=world.size,
    )
    config = _with_plan(config, path, storage_dir, world)
    return _restore_model(config, path, earlier.with_labels(config.data.labels), batches, world)


def _find_checkpoint(run: RunDir, *, best: bool) -> tuple[RunConfig, Location]:
    """The config, and the checkpoint that stands for the run or is its best."""
    config = run.load_config().model_copy(update={"plan": "auto"})
    path = _find_best_checkpoint(run, config) if best else run.final_checkpoint()
    if path is None:
        raise MesetaError(f"run {str(run.path)!r} has no checkpoint yet; train it first with `meseta train`")
    return config, path


def _load_training_dataset(run: RunDir, config: RunConfig) -> Dataset:
    """What the run keeps of its data; where an older version did not, the data themselves, if they are still there."""
    kept = Dataset.load(run.path)
    vocabularies = [feature.vocabulary for feature in kept.sparse if feature.vocabulary is not None]
    if kept.source_form is None or not all(path_exists(run.path / path) for path in vocabularies):
        with suppress(MesetaError):
            if config.data.dir is not None:
                return Dataset.load(config.data.dir)
    return kept


def _check_same_files(rows: NewRows, world: World) -> None:
    """Raise MesetaError, on all ranks, where they find other files under the same names."""
    sizes = [source.size_bytes for source in rows.sources]
    for rank, other in enumerate(world.all_gather_object(sizes)):
        if other != sizes:
            raise MesetaError(f"rank {rank} finds other files of new rows than rank {world.rank}; copy the same to all")


def _restore_model(
    config: RunConfig, path: Location, dataset: Dataset, reader: ReaderT, world: World
) -> TrainedModel[ReaderT]:
    """The model of a checkpoint for data such as `dataset`."""
    if (note := bfloat16_note(config, world)) and world.rank == 0:
        print(note, file=sys.stderr)
    model = make_sharded_model(config, dataset, world).eval()
    # No optimizer is made: torch imports its compiler for the first one, which takes longer than a small evaluation.
    state = restore(path, model, None, world)
    return TrainedModel(model=model, reader=reader, world=world, step=state["step"], config=config)


def _with_plan(config: RunConfig, path: Location, storage_dir: Path | None, world: World) -> RunConfig:
    """With a plan for the ranks at hand. Collective."""
    if storage_dir is None:
        return config.model_copy(
            update={"plan": world.broadcast_from_rank_0(lambda: _plan_with_saved_tiers(path, world.size))}
        )
    on_disk = {"sharding": "table_wise" if world.size == 1 else "row_wise", "tier": DISK}
    storage = config.storage.model_copy(update={"dir": storage_dir})
    return config.model_copy(update={"plan": {"tables": {"*": on_disk}}, "storage": storage})


def _plan_with_saved_tiers(path: Location, num_ranks: int) -> Any:
    """For a config: tables lie far that did when the checkpoint was saved, cut by rows; 'auto' where none did."""
    try:
        plan, far = read_manifest(path)["plan"], dict[str, Any]()
    except checkpoint.DamagedCheckpoint:  # whoever loads it is told, with what to do
        return "auto"
    for name, entry in plan["tables"].items():
        for stored_shard in entry["shards"]:
            shard = rename_keys("plan", stored_shard, FORMER_KEYS)
            if shard["tier"] in OFFLOADED_TIERS:
                sharding = "table_wise" if num_ranks == 1 else "row_wise"
                is_same = num_ranks == plan["num_ranks"] == 1 and "cache_rows" in shard
                near = {"cache_rows": shard["cache_rows"]} if is_same else {}
                far[name] = {"sharding": sharding, "tier": shard["tier"], **near}
    rest = {} if len(far) == len(plan["tables"]) else {"*": "table_wise"}
    return {"tables": {**far, **rest}} if far else "auto"


def _find_best_checkpoint(run: RunDir, config: RunConfig) -> Location | None:
    """The checkpoint of the best evaluation; None where the run has none at all."""
    if checkpoint.latest_complete(run.checkpoints) is None:
        return None
    lines = run.evaluations()
    split = validation_split({line.split for line in lines})
    best = EarlyStopping(config.train.early_stopping, split)
    for line in lines:
        if line.split == split:
            best.update(line)
    for listed in checkpoint.list_checkpoints(run.checkpoints):
        if listed.summary is not None and listed.summary.step == best.best_step:
            return listed.path
        if not listed.is_readable and parse_step(listed.path) == best.best_step:
            raise StorageError(listed.problem)
    what = (
        "there was no evaluation"
        if best.best_step is None
        else f"step {best.best_step} was its best, and no checkpoint has it"
    )
    raise MesetaError(
        f"run {str(run.path)!r}: {what}; train with checkpoint.keep_best=true and train.eval_every_steps or "
        "train.eval_every_epochs, or leave --best out"
    )
