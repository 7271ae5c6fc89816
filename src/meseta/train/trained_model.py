"""Load a trained model from a checkpoint of a run, on any number of ranks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from numpy.typing import NDArray

from meseta import checkpoint
from meseta.checkpoint.files.paths import parse_step
from meseta.checkpoint.manifest import read_manifest
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.encoding import with_vocabulary_digests
from meseta.data.dataset.statistics import UnseenValues
from meseta.data.prepare.new_rows import NewRows
from meseta.data.read.batch import Batch
from meseta.data.read.batch_reader import BatchReader
from meseta.data.read.new_batches import NewBatches
from meseta.data.read.options import ReaderOptions
from meseta.errors import StorageError
from meseta.spec import MesetaError
from meseta.spec.documents import rename_keys
from meseta.spec.plan import FORMER_KEYS
from meseta.spec.tiers import DISK, OFFLOADED_TIERS
from meseta.system.remote import Location
from meseta.telemetry.metrics import validation_split
from meseta.train.averages.runs import Averaged, PredictionSums, check_averaged, check_same_labels
from meseta.train.dataset_checks import check_same_encoding, load_training_dataset, open_dataset
from meseta.train.evaluate import Evaluation, LogitShift, evaluate, logit_shift, predict
from meseta.train.evaluation_tracker import EarlyStopping
from meseta.train.run_dir import RunDir
from meseta.train.session import session
from meseta.train.setup.build import make_sharded_model
from meseta.train.setup.source import make_row_source
from meseta.train.setup.specs import bfloat16_note
from meseta.train.state import restore

ReaderT = TypeVar("ReaderT", BatchReader, NewBatches)


@dataclass(frozen=True)
class OtherRun:
    """Run whose predictions have been added to the sums of a `TrainedModel`."""

    path: Path
    step: int
    unseen: UnseenValues | None
    """Values of raw rows that its training did not see. `None` for a split."""


@dataclass(frozen=True)
class TrainedModel(Generic[ReaderT]):
    """Model with the rows to apply it to."""

    model: Any
    reader: ReaderT
    world: World
    step: int
    """Number of training steps of the checkpoint."""
    config: RunConfig
    """Config of the run, with a plan for these ranks."""
    sums: PredictionSums | None = None
    """Sums of the predictions of other runs, or `None` for one run."""
    others: tuple[OtherRun, ...] = ()

    @property
    def logit_shift(self) -> float:
        """Value to add to logits if the model was trained on a sample of the negatives."""
        return logit_shift(self.config)

    @property
    def correction(self) -> LogitShift:
        """`logit_shift`, with the average over several runs."""
        shift, sums = self.logit_shift, self.sums
        if sums is None:
            return shift
        return lambda logits: sums.average(logits + logits.dtype.type(shift))

    def predict(self) -> Iterator[tuple[NDArray[Any], Batch]]:
        """Yield (logits [B] or [B, T], batch) for this rank's slice of each global batch, in the order of the rows."""
        return predict(self.model, self.reader, self.world, self.correction)

    def evaluate(self, segments: Sequence[str] = ()) -> Evaluation:
        """Return the metrics over all rows. Empty `segments` means those of the run. See `meseta.train.evaluate`."""
        config = self.config.metrics
        config = config.model_copy(update={"segments": tuple(segments)}) if segments else config
        return evaluate(self.model, self.reader, self.world, config, self.correction)


@contextmanager
def open_trained(
    run_dir: Path,
    split: str,
    data: Path | None = None,
    *,
    more_runs: Sequence[Path] = (),
    averaged: Averaged = "probability",
    **options: Any,
) -> Iterator[TrainedModel[BatchReader]]:
    """Context manager around the final model of a run and a reader of `split` for each rank.

    Predictions are averaged with those of `more_runs`. `run_dir` determines the rows and the metrics. `options` are
    `best`, `ignore_filter` and `storage_dir` of `load_trained`.
    Raises MesetaError as `load_trained` does, or if runs differ in their labels.
    """

    def load(path: Path, world: World, rows_of: RunConfig | None) -> TrainedModel[BatchReader]:
        return load_trained(path, split, world, data, rows_of=rows_of, **options)

    runs = [run_dir, *more_runs]
    with session(RunDir(run_dir).load_config()) as world, _open_average(runs, averaged, load, world) as trained:
        yield trained


@contextmanager
def open_for_raw_rows(
    run_dir: Path,
    patterns: Sequence[str],
    *,
    more_runs: Sequence[Path] = (),
    averaged: Averaged = "probability",
    keys: Sequence[str] = (),
    **options: Any,
) -> Iterator[TrainedModel[NewBatches]]:
    """Context manager around `load_for_raw_rows`, on the ranks of this process.

    Predictions are averaged as by `open_trained`. Each run encodes all rows like its own training data.
    """

    def load(path: Path, world: World, rows_of: RunConfig | None) -> TrainedModel[NewBatches]:
        copied = keys if rows_of is None else ()
        return load_for_raw_rows(path, patterns, world, keys=copied, rows_of=rows_of, **options)

    runs = [run_dir, *more_runs]
    with session(RunDir(run_dir).load_config()) as world, _open_average(runs, averaged, load, world) as trained:
        yield trained


@contextmanager
def _open_average(
    run_dirs: Sequence[Path],
    averaged: Averaged,
    load: Callable[[Path, World, RunConfig | None], TrainedModel[ReaderT]],
    world: World,
) -> Iterator[TrainedModel[ReaderT]]:
    """Context manager around the first run's model, with the sums of the others. One model is in memory at a time."""
    check_averaged(averaged)
    first, *others = run_dirs
    if not others:
        yield load(first, world, None)
        return
    _check_runs(run_dirs, world)
    rows_of, added = RunDir(first).load_config(), list[OtherRun]()
    with PredictionSums(averaged) as sums:
        for run_dir in others:
            trained = load(run_dir, world, rows_of)
            try:
                sums.add(trained.predict())
            except MesetaError as error:
                if error.rank is not None:  # The message starts with the rank.
                    raise
                # Errors of rows do not name the run that encodes them.
                raise MesetaError(f"run {str(run_dir)!r}: {error}") from None
            unseen = trained.reader.rows.unseen if isinstance(trained.reader, NewBatches) else None
            added.append(OtherRun(run_dir, trained.step, unseen))
            del trained
            gc.collect()  # Models have reference cycles.
        yield replace(load(first, world, None), sums=sums, others=tuple(added))


def _check_runs(run_dirs: Sequence[Path], world: World) -> None:
    problem: Exception | None = None
    try:
        if len({path.resolve() for path in run_dirs}) < len(run_dirs):
            raise MesetaError(
                f"average: a run is given twice among {', '.join(repr(str(path)) for path in run_dirs)}; name each once"
            )
        datasets = {}
        for path in run_dirs:
            run = RunDir(path)
            config = run.load_config()
            datasets[path] = load_training_dataset(run, config).with_labels(config.data.labels)
        check_same_labels(datasets)
    except (MesetaError, OSError) as error:
        problem = error
    world.raise_on_all_ranks(problem)


def load_model(run_dir: Path, world: World, *, best: bool = False) -> torch.nn.Module:
    """Load the final checkpoint of a run, or the one of its best evaluation, without the training data.

    Tables get a plan for these ranks, with the tiers that they had in training.
    Raises MesetaError if there is no run or checkpoint.
    """
    run = RunDir(run_dir)
    config, path = _find_checkpoint(run, best=best)
    dataset = load_training_dataset(run, config).with_labels(config.data.labels)
    model, _ = _restore_weights(_with_plan(config, path, None, world), path, dataset, world)
    return model


def load_trained(
    run_dir: Path,
    split: str,
    world: World,
    data: Path | None = None,
    *,
    best: bool = False,
    ignore_filter: bool = False,
    storage_dir: Path | None = None,
    rows_of: RunConfig | None = None,
) -> TrainedModel[BatchReader]:
    """Load the final checkpoint of a run, or the one of its best evaluation, with a reader of `split`.

    Tables get a plan for these ranks, with the tiers that they had in training.
    Raises MesetaError if there is no run, checkpoint or split, the data has another encoding than that of the run, or
    `ignore_filter` is set and rows come from a dispatcher.

    Args:
        run_dir: Run folder.
        split: Split to read.
        world: Ranks that evaluate.
        data: Dataset folder. `None` means that of the run.
        best: Whether to load the checkpoint of the best evaluation.
        ignore_filter: Whether to ignore `data.filter`, so that predictions match all rows of the files.
        storage_dir: Folder for all tables in tier 'disk'. `None` keeps the tiers.
        rows_of: Config of another run whose data, filter and batches are used. `None` means that of the run.
    """
    run = RunDir(run_dir)
    config, path = _find_checkpoint(run, best=best)
    config = config if rows_of is None else _with_rows_of(config, rows_of)
    source = make_row_source(config.data, data)
    if ignore_filter and source.is_served:
        raise MesetaError(
            f"predict: the rows of run {str(run_dir)!r} come from the readers of {source}, but predicting a split "
            "needs its files; pass their folder with --data DIR, or raw files with --data FILE"
        )
    dataset = open_dataset(config, world, data)
    way_out = (
        f"prepare them in one call with the sources of {str(make_row_source(config.data))!r}, as --test-files"
        if rows_of is None
        else "pass raw files with --data, which each run encodes itself"
    )
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
    rows_of: RunConfig | None = None,
    **options: Any,
) -> TrainedModel[NewBatches]:
    """Load a checkpoint like `load_trained`, with a reader of raw files, which are encoded like the training data.

    Raises MesetaError, on all ranks, if there is no run or checkpoint, the run has not recorded how its data was
    encoded, or the files are invalid. If values are new to the model and `allow_unseen` is not set, reading raises
    MesetaError at its end.

    Args:
        run_dir: Run folder.
        patterns: Files or patterns.
        world: Ranks that predict.
        keys: Columns of the files to copy, on rank 0.
        best: Whether to load the checkpoint of the best evaluation.
        storage_dir: Folder for all tables in tier 'disk'. `None` keeps the tiers.
        rows_of: Config of another run whose batch size is used. `None` means that of the run.
        options: `encoding`, the text encoding if it is not that of the training files, and `allow_unseen`, whether
            values new to the model are allowed.
    """
    run = RunDir(run_dir)
    config, path = _find_checkpoint(run, best=best)
    earlier = world.broadcast_from_rank_0(lambda: with_vocabulary_digests(load_training_dataset(run, config)))
    check_same_encoding(
        run, path, earlier.with_labels(config.data.labels), world, "the encoding of new rows is unknown"
    )
    rows, problem = None, None
    try:
        keys = keys if world.rank == 0 else ()
        rows = NewRows(earlier, patterns, keys=keys, **{"allow_unseen": False, **options})
    except MesetaError as error:
        problem = error
    world.raise_on_all_ranks(problem)
    assert rows is not None
    _check_same_files(rows, world)
    batches = NewBatches(
        rows,
        rows.dataset.with_labels(config.data.labels),
        (rows_of or config).train.eval_batch_size,
        prefetch_batches=config.data.prefetch_batches,
        rank=world.rank,
        num_ranks=world.size,
    )
    config = _with_plan(config, path, storage_dir, world)
    return _restore_model(config, path, earlier.with_labels(config.data.labels), batches, world)


def _find_checkpoint(run: RunDir, *, best: bool) -> tuple[RunConfig, Location]:
    config = run.load_config().model_copy(update={"plan": "auto"})
    path = _find_best_checkpoint(run, config) if best else run.final_checkpoint()
    if path is None:
        raise MesetaError(f"run {str(run.path)!r} has no checkpoint yet; train it first with `meseta train`")
    return config, path


def _with_rows_of(config: RunConfig, other: RunConfig) -> RunConfig:
    """Return `config` with the data, filter and batch size of another run."""
    kept = {key: getattr(config.data, key) for key in ("labels", "negative_keep")}
    train = config.train.model_copy(update={"eval_batch_size": other.train.eval_batch_size})
    return config.model_copy(update={"data": other.data.model_copy(update=kept), "train": train})


def _check_same_files(rows: NewRows, world: World) -> None:
    sizes = [source.size_bytes for source in rows.sources]
    for rank, other in enumerate(world.all_gather_object(sizes)):
        if other != sizes:
            raise MesetaError(
                f"new rows: rank {rank} has other files than rank {world.rank}; copy the same to all ranks"
            )


def _restore_model(
    config: RunConfig, path: Location, dataset: Dataset, reader: ReaderT, world: World
) -> TrainedModel[ReaderT]:
    model, step = _restore_weights(config, path, dataset, world)
    return TrainedModel(model=model, reader=reader, world=world, step=step, config=config)


def _restore_weights(config: RunConfig, path: Location, dataset: Dataset, world: World) -> tuple[torch.nn.Module, int]:
    """Return the model of a checkpoint, and its number of steps."""
    if (note := bfloat16_note(config, world)) and world.rank == 0:
        print(note, file=sys.stderr)
    model: torch.nn.Module = make_sharded_model(config, dataset, world).eval()
    # No optimizer is made: torch imports its compiler for the first one, which takes longer than a small evaluation.
    return model, restore(path, model, None, world)["step"]


def _with_plan(config: RunConfig, path: Location, storage_dir: Path | None, world: World) -> RunConfig:
    """Replace the plan of a config by one for the current ranks. Collective."""
    if storage_dir is None:
        return config.model_copy(
            update={"plan": world.broadcast_from_rank_0(lambda: _plan_with_saved_tiers(path, world.size))}
        )
    on_disk = {"sharding": "table_wise" if world.size == 1 else "row_wise", "tier": DISK}
    storage = config.storage.model_copy(update={"dir": storage_dir})
    return config.model_copy(update={"plan": {"tables": {"*": on_disk}}, "storage": storage})


def _plan_with_saved_tiers(path: Location, num_ranks: int) -> Any:
    """Return a plan in which tables keep the tiers of the checkpoint. Offloaded tables are split by rows. Without any,
    the plan is 'auto'."""
    try:
        plan, offloaded = read_manifest(path)["plan"], dict[str, Any]()
    except checkpoint.DamagedCheckpoint:  # Loading the checkpoint raises the error with a remedy.
        return "auto"
    for name, entry in plan["tables"].items():
        for stored_shard in entry["shards"]:
            shard = rename_keys("plan", stored_shard, FORMER_KEYS)
            if shard["tier"] in OFFLOADED_TIERS:
                sharding = "table_wise" if num_ranks == 1 else "row_wise"
                is_same = num_ranks == plan["num_ranks"] == 1 and "cache_rows" in shard
                cache_rows = {"cache_rows": shard["cache_rows"]} if is_same else {}
                offloaded[name] = {"sharding": sharding, "tier": shard["tier"], **cache_rows}
    rest = {} if len(offloaded) == len(plan["tables"]) else {"*": "table_wise"}
    return {"tables": {**offloaded, **rest}} if offloaded else "auto"


def _find_best_checkpoint(run: RunDir, config: RunConfig) -> Location | None:
    """Return the checkpoint of the best evaluation, or `None` without checkpoints. Raises MesetaError if there was no
    evaluation or it was not kept."""
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
        else f"the best step is {best.best_step}, but it has no checkpoint"
    )
    raise MesetaError(
        f"run {str(run.path)!r}: {what}; train with checkpoint.keep_best=true and train.eval_every_steps or "
        "train.eval_every_epochs, or remove --best"
    )
