"""Resume of a run: the choice of its checkpoint, checks of its config, and the restored state."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from meseta.checkpoint import DamagedCheckpoint, failures
from meseta.checkpoint.averages import saved_average
from meseta.checkpoint.failures import run_on_rank_0
from meseta.checkpoint.fallback import FallbackCheckpointError
from meseta.checkpoint.manifest import read_manifest
from meseta.checkpoint.store.store import make_store, newest
from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.load import checkpoint_location
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch_reader import BatchReader
from meseta.errors import StorageError
from meseta.pipeline.prefetch import PrefetchedEmbeddings
from meseta.spec import MesetaError, Plan, TableSpec
from meseta.spec.documents import load_document
from meseta.spec.plan import PLAN_FILE, read_explicit_plan
from meseta.system.remote import Location, location_is_folder
from meseta.train.dataset_checks import check_same_encoding, check_same_rows
from meseta.train.evaluation_tracker import EarlyStopping
from meseta.train.run_dir import RunDir
from meseta.train.setup.config_changes import diff_configs, find_model_change
from meseta.train.start.measurements import NewRowMeasurements
from meseta.train.start.starting import start_from_parent
from meseta.train.state import restore, set_random_state

if TYPE_CHECKING:
    from meseta.train.trainer import Trainer

# Config keys that define how the model learns. Constants of row optimizers are in the checkpoint instead.
_LEARNING_KEYS = (
    "dense.optimizer",
    "dense.schedule",
    "dense.clip_value",
    "dense.clip_norm",
    "train.clip_norm",
    "embedding.schedule",
    "pipeline.staleness",
)
# Sections with these keys, except for `train`, which also has the length of the run.
_LEARNING_SECTIONS = ("embedding", "dense", "schedule", "pipeline")
# Maximum number of changes, and of tables per change, in a message.
_MAX_LISTED = 4


def check_same_model(run: RunDir, config: RunConfig, world: World) -> None:
    """Raise MesetaError, on all ranks, if the config defines another model than the one that `run` was trained with.
    Collective."""
    # Tensor shapes do not reveal a different dropout, pooling or number of heads.
    before = _load_previous_config(run)
    change = None if before is None else find_model_change(before, config)
    problem = None
    if change is not None:
        key, was, now = change
        problem = MesetaError(
            f"run_dir {str(run.path)!r} has another model: {key} was {was!r} and is {now!r} now; set it back, "
            "choose another run_dir, or start from the beginning with --force"
        )
    world.raise_on_all_ranks(problem)


@dataclass(frozen=True)
class CompletionReason:
    """Reason why a resumed run has no step left."""

    description: str
    """Text that follows the name of the run in a message, such as "has done its 10 steps"."""
    config_key: str
    """Config key that gives the run more steps if it is raised."""

    @staticmethod
    def find(config: RunConfig, step: int, num_steps: int, best: EarlyStopping) -> CompletionReason | None:
        """Return the reason for a run that has done `step` of `num_steps` steps, or `None` if steps are left."""
        if step == num_steps:
            key = "train.epochs" if config.train.max_steps is None else "train.max_steps"
            return CompletionReason(f"has done its {step:,} steps", key)
        if best.should_stop:
            return CompletionReason(f"stopped early at step {step:,}: {best}", "train.early_stopping.patience")
        return None


def seek_reader(reader: BatchReader, path: Location | None) -> dict[str, Any] | None:
    """Set the reader to the position of the checkpoint at `path`. Return the position.

    Returns `None` if there is no checkpoint, or it is invalid and will be refused when it is loaded.
    """
    if path is None:
        return None
    with suppress(MesetaError, KeyError, TypeError):
        place: dict[str, Any] = read_manifest(path)["reader"]
        reader.set_state(place)
        return place
    return None


def retry_reads(config: RunConfig) -> AbstractContextManager[None]:
    """Context manager that retries failed reads of checkpoints if `checkpoint.resume` is 'older'."""
    return failures.retry_reads() if config.checkpoint.resume == "older" else nullcontext()


def find_newest_checkpoint(run: RunDir) -> Location | None:
    """Return the newest checkpoint at the location of the config, whether it is complete or not.

    Raises MesetaError if there is none, but the run in run_dir has checkpoints at another location.
    """
    path, before = newest(run.checkpoints), checkpoint_location(run.path)
    if path is None and run.has_begun and before != run.checkpoints and newest(before) is not None:
        raise MesetaError(
            f"run_dir {str(run.path)!r} has its checkpoints at {str(before)!r}, and there are none at "
            f"{str(run.checkpoints)!r}; copy them there, set checkpoint.dir back, or choose another run_dir"
        )
    return path


def check_resume_allowed(config: RunConfig, path: Location) -> None:
    """Raise MesetaError if `checkpoint.resume` is 'never'. `path` is the checkpoint of run_dir."""
    if config.checkpoint.resume == "never":
        raise MesetaError(
            f"run_dir {str(config.run_dir)!r} has a checkpoint ({path.name}), but checkpoint.resume is 'never'; "
            "choose another run_dir, start from the beginning with --force, or set checkpoint.resume=auto"
        )


def quarantine_damaged(config: RunConfig, damaged: FallbackCheckpointError, world: World) -> None:
    """Quarantine damaged checkpoints, so that the newest undamaged one is resumed, and print a note. Collective.

    Raises the error if `checkpoint.resume` is not 'older', or no checkpoint is undamaged.
    """
    if config.checkpoint.resume != "older" or damaged.fallback is None:
        raise damaged

    def pass_all() -> None:
        for path in damaged.unusable:
            make_store(path.parent).quarantine(path, damaged.problem)

    run_on_rank_0(world, pass_all)
    if world.rank == 0:
        names = " and ".join(path.name for path in damaged.unusable)
        print(f"note: {damaged.problem}: falling back to {damaged.fallback.name} (checkpoint.resume 'older'), and "
              f"quarantining "
              f"{names}", file=sys.stderr)  # fmt: skip


def check_dataset(run: RunDir, path: Location | None, dataset: Dataset, world: World) -> None:
    """Raise MesetaError, on all ranks, if the checkpoint at `path` was trained on other data. Collective."""
    if path is not None:
        check_same_encoding(run, path, dataset, world)
        check_same_rows(run, dataset, world)


def resume(
    trainer: Trainer, checked: Location | None, start_position: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Restore the state of `trainer` from the newest checkpoint if there is one, else from its parent. Collective.

    Args:
        trainer: Run whose model, reader and metrics exist.
        checked: Checkpoint that the dataset was already compared with.
        start_position: Position at which the trainer has started to read.

    Returns:
        Row optimizers in the checkpoint by table, or `None` without a checkpoint.

    Raises:
        MesetaError: On all ranks, if the checkpoint is damaged, or does not match the config or the dataset.
    """
    world, run, manager = trainer.world, trainer.run_dir, trainer.checkpoint_manager
    world.run_on_rank_0(manager.fetch_from_mirror)
    path = world.broadcast_from_rank_0(lambda: newest(run.checkpoints))
    if path is None:
        if trainer.config.start_from is not None:
            start_from_parent(trainer)
        return None
    check_resume_allowed(trainer.config, path)
    if path != checked:  # From the mirror, or an older one after quarantine.
        check_dataset(run, path, trainer.dataset, world)
    check_same_average(run, path, trainer.config, world)
    since_whole = manager.marks_since_full
    try:
        state = restore(path, trainer.model, trainer.optimizer, world, mark_changes_since_full=since_whole)
    except FallbackCheckpointError as damaged:
        quarantine_damaged(trainer.config, damaged, world)
        return resume(trainer, path, start_position)
    check_same_model(run, trainer.config, world)
    trainer.step = manager.resume_from(state)
    trainer.num_samples = state["num_samples"]
    trainer.clock.train_s = state["train_s"]
    # Reading has started at the position of the first checkpoint found. Start again if another one is resumed.
    if state["reader"] != start_position:
        trainer.restart_reading(state["reader"])
    if trainer.config.pipeline.staleness and state["carried"] is not None:
        trainer.pipeline.prefetched_embeddings = PrefetchedEmbeddings.from_tensors(
            path, state["carried"], trainer.model.embeddings
        )
    set_random_state(state["random"])
    trainer.running_metrics.set_tensors(state["dense"])
    if trainer.config.start_from is not None:
        trainer.continued = NewRowMeasurements(trainer)
        trainer.continued.epoch_metrics.set_tensors(state["dense"])
    trainer.average.set_tensors(state["dense"], f"checkpoint {str(path)!r}")
    trainer.evaluation_tracker.set_state(state)
    trainer.track_logged_evaluation()  # Made at the end of the previous start.
    if trainer.config.train.finish == "best":
        check_best_checkpoint(run, trainer.early_stopping.best_step, trainer.step, world)
    return dict(state["optimizers"])


def check_same_average(run: RunDir, path: Location, config: RunConfig, world: World) -> None:
    """Raise MesetaError, on all ranks, if the checkpoint at `path` has another average than the config. Collective."""

    def check() -> None:
        try:
            before, now = saved_average(read_manifest(path)["state"]), config.train.average_spec
        except DamagedCheckpoint:  # Loading the checkpoint raises the error with a remedy.
            return
        for name, key in (("kind", "weights"), ("decay", "decay"), ("start_step", "start_step")):
            was, is_now = (None if spec is None else getattr(spec, name) for spec in (before, now))
            if was != is_now:
                raise MesetaError(
                    f"run_dir {str(run.path)!r} has another average in {path.name}: train.average_{key} was {was!r} "
                    f"and is {is_now!r} now; set it back, choose another run_dir, or start from the beginning with "
                    "--force"
                )

    world.run_on_rank_0(check)


def check_best_checkpoint(run: RunDir, best_step: int | None, step: int, world: World) -> None:
    """Raise MesetaError, on all ranks, if the best checkpoint was not kept. Collective."""

    def check() -> None:
        if best_step not in (None, step) and not location_is_folder(run.checkpoint_path(best_step)):
            raise MesetaError(
                f"run_dir {str(run.path)!r}: train.finish 'best' needs the checkpoint of step {best_step}, the best so "
                "far, which was not kept; set train.finish=last, or choose another run_dir"
            )

    world.run_on_rank_0(check)


def reconcile_config(
    run: RunDir,
    config: RunConfig,
    optimizers: Mapping[str, Any],
    tables: Sequence[TableSpec],
    over: CompletionReason | None,
) -> RunConfig:
    """Print a note about settings that change how the model learns. Return the config to record. Only for rank 0.

    If the run is `over`, the note says that the changes have no effect, and the recorded config keeps the old settings.
    `optimizers` are the row optimizers in the checkpoint by table, as plain data.
    """
    before = _load_previous_config(run)
    differences = [*_diff_row_optimizers(optimizers, tables)]
    if before is not None:
        differences += [f"{k} was {was!r}, is {now!r}" for k, was, now in diff_configs(before, config, _LEARNING_KEYS)]
    if not differences:
        return config
    changes = "; ".join(differences[:_MAX_LISTED]) + (
        f"; and {len(differences) - _MAX_LISTED:,} more" if len(differences) > _MAX_LISTED else ""
    )
    if over is None:
        print(f"note: the run continues with changed settings: {changes}", file=sys.stderr)
        return config
    print(f"note: run_dir {str(run.path)!r} {over.description}: its weights, metrics and config are kept, and changed "
          f"settings have no effect ({changes}); to train with them, choose another run_dir or start from the "
          f"beginning with --force; to continue with them, raise {over.config_key}", file=sys.stderr)  # fmt: skip
    if before is None:
        return config
    train = config.train.model_copy(update={"clip_norm": before.train.clip_norm})
    return config.model_copy(update={"train": train, **{name: getattr(before, name) for name in _LEARNING_SECTIONS}})


def report_topology_change(run: RunDir, plan: Plan) -> None:
    """Print a note if the ranks over which values are summed changed. Only for rank 0."""
    with suppress(MesetaError):  # An older version wrote no plan, or another format.
        before, _ = load_document("plan", run.path / PLAN_FILE, read_explicit_plan)
        if before.ranks_text != plan.ranks_text:
            print(f"note: from now on sums are computed over {plan.ranks_text}, before over {before.ranks_text}: "
                  "results agree with those of an unchanged run within tolerance, not bit for bit",
                  file=sys.stderr)  # fmt: skip


def _load_previous_config(run: RunDir) -> RunConfig | None:
    """Return the run's previous config, or `None` if this version cannot parse it. Raises StorageError if it cannot be
    read, because later checks need it."""
    try:
        return run.load_config()
    except StorageError:
        raise
    except MesetaError:
        return None


def _diff_row_optimizers(optimizers: Mapping[str, Any], tables: Sequence[TableSpec]) -> Iterator[str]:
    """Yield a description of each changed constant of row optimizers. Tables with the same change are combined."""
    changed: dict[tuple[str, str, str], list[str]] = {}
    for table in tables:
        before, now = optimizers[table.name], asdict(table.optimizer)
        for key in now:
            if key in before and before[key] != now[key]:
                values = json.dumps(before[key]), json.dumps(now[key])
                changed.setdefault((key, *values), []).append(table.name)
    for (key, was, is_now), names in changed.items():
        if len(names) == len(tables):
            which, where = "all tables", "embedding.optimizer"
        else:
            more = f" and {len(names) - _MAX_LISTED:,} more" if len(names) > _MAX_LISTED else ""
            which = f"table{'s' * (len(names) > 1)} {', '.join(map(repr, names[:_MAX_LISTED]))}{more}"
            where = f"embedding.tables.{names[0] if len(names) == 1 else 'NAME'}.optimizer"
        yield f"{key} of {which} was {was}, is {is_now} ({where}.{key}={was} keeps it)"
