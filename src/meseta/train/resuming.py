"""What may be another config in the middle of a run, and what may not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

from meseta.checkpoint import retries
from meseta.checkpoint.failures import run_on_rank_0
from meseta.checkpoint.fallback import FallbackCheckpointError
from meseta.checkpoint.manifest import read_manifest
from meseta.checkpoint.store.names import checkpoint_path
from meseta.checkpoint.store.store import make_store, newest
from meseta.comm import World
from meseta.config import RunConfig
from meseta.config.load import checkpoint_location, get_value
from meseta.data.read.batch_reader import BatchReader
from meseta.errors import StorageError
from meseta.machine.remote import Location, location_is_folder
from meseta.spec import MesetaError, Plan, TableSpec
from meseta.spec.documents import load_document
from meseta.spec.plan_document import PLAN_FILE, read_explicit_plan
from meseta.train.early_stopping import EarlyStopping
from meseta.train.run_dir import RunDir

_MODEL_KEYS = ("model", "embedding.pooling")
"""Keys, or sections of them, that say what is trained."""
_LEARNING_KEYS = (
    "dense.optimizer",
    "dense.schedule",
    "dense.clip_value",
    "dense.clip_norm",
    "train.clip_norm",
    "embedding.schedule",
    "pipeline.staleness",
)
"""Keys that say how; those of row optimizers stand, table by table, in the checkpoint. A schedule is the one that
holds, wherever it is written."""
_LEARNING_SECTIONS = ("embedding", "dense", "schedule", "pipeline")
"""Sections that these keys are in, but for that of train, which says how long as well."""
_MAX_LISTED = 4
"""Changes, and tables of one, that a message lists."""


def check_same_model(run: RunDir, config: RunConfig, world: World) -> None:
    """Raise MesetaError, on all ranks, where the config that `run` was trained with says another model. Shapes of
    tensors do not tell all: a dropout, a pooling, how columns are parted into heads. Collective."""
    before = _load_previous_config(run)
    changes = [] if before is None else [*_diff_configs(before, config, _MODEL_KEYS), *_diff_poolings(before, config)]
    problem = None
    if changes:
        key, was, now = changes[0]
        problem = MesetaError(
            f"run_dir {str(run.path)!r} trains another model: {key} was {was!r} and is {now!r} now; set it back, "
            "choose another run_dir, or begin this one anew with --force"
        )
    world.raise_on_all_ranks(problem)


@dataclass(frozen=True)
class CompletionReason:
    """Why a run that is taken up has no step left."""

    description: str
    """In words, after its name."""
    config_key: str
    """Of the config, which gives it more steps where it is raised."""

    @staticmethod
    def find(config: RunConfig, step: int, num_steps: int, best: EarlyStopping) -> CompletionReason | None:
        """Of a run that has done `step` of `num_steps`; None where there are steps left."""
        if step == num_steps:
            key = "train.epochs" if config.train.max_steps is None else "train.max_steps"
            return CompletionReason(f"has done its {step:,} steps", key)
        if best.should_stop:
            return CompletionReason(f"stopped early at step {step:,}, since {best}", "train.early_stopping.patience")
        return None


def seek_reader(reader: BatchReader, path: Location | None) -> dict[str, Any] | None:
    """Let the reader begin where the checkpoint that is to be gone on with ended; returns that place. None where there
    is no such checkpoint, or one that is refused when it is taken up."""
    if path is None:
        return None
    with suppress(MesetaError, KeyError, TypeError):
        place: dict[str, Any] = read_manifest(path)["reader"]
        reader.set_state(place)
        return place
    return None


def retry_reads(config: RunConfig) -> AbstractContextManager[None]:
    """Context manager for what a run reads before its first step: with checkpoint.resume 'older' failed reads of
    checkpoints are repeated for a while."""
    return retries.retry_reads() if config.checkpoint.resume == "older" else nullcontext()


def find_newest_checkpoint(run: RunDir) -> Location | None:
    """The newest checkpoint, whole or not, where the config says that they lie. Raises MesetaError where there is none,
    and the run in run_dir has its checkpoints elsewhere."""
    path, before = newest(run.checkpoints), checkpoint_location(run.path)
    if path is None and run.has_begun and before != run.checkpoints and newest(before) is not None:
        raise MesetaError(
            f"run_dir {str(run.path)!r} has its checkpoints at {str(before)!r}, and there are none at "
            f"{str(run.checkpoints)!r}; copy them there, leave checkpoint.dir as it was, or choose another run_dir"
        )
    return path


def check_resume_allowed(config: RunConfig, path: Location) -> None:
    """Raise MesetaError where a run_dir has the checkpoint `path`, and the config says that none is taken up."""
    if config.checkpoint.resume == "never":
        raise MesetaError(
            f"run_dir {str(config.run_dir)!r} holds a checkpoint ({path.name}) and checkpoint.resume is 'never'; "
            "choose another run_dir, begin this one anew with --force, or set checkpoint.resume=auto"
        )


def quarantine_damaged(config: RunConfig, damaged: FallbackCheckpointError, world: World) -> None:
    """Where checkpoint.resume is 'older', let the newest checkpoint that is whole be the newest one, and say so; else,
    and where none is whole, raise what is wrong. Collective."""
    if config.checkpoint.resume != "older" or damaged.fallback is None:
        raise damaged

    def pass_all() -> None:
        for path in damaged.unusable:
            make_store(path.parent).quarantine(path, damaged.problem)

    run_on_rank_0(world, pass_all)
    if world.rank == 0:
        names = " and ".join(path.name for path in damaged.unusable)
        print(f"note: {damaged.problem}: going back to {damaged.fallback.name} (checkpoint.resume 'older'), and "
              f"leaving "
              f"{names} alone", file=sys.stderr)  # fmt: skip


def check_best_checkpoint(run: RunDir, best_step: int | None, step: int, world: World) -> None:
    """Raise MesetaError, on all ranks, where a run that is to end with its best weights did not keep those that are the
    best so far. Collective."""

    def check() -> None:
        if best_step not in (None, step) and not location_is_folder(checkpoint_path(run.checkpoints, best_step)):
            raise MesetaError(
                f"run_dir {str(run.path)!r}: train.finish is 'best', and step {best_step} was the best so far, but its "
                "checkpoint was not kept; set train.finish=last, or choose another run_dir"
            )

    world.run_on_rank_0(check)


def reconcile_config(
    run: RunDir,
    config: RunConfig,
    optimizers: Mapping[str, Any],
    tables: Sequence[TableSpec],
    over: CompletionReason | None,
) -> RunConfig:
    """Say in one line what learns otherwise from here on, or, of a run that is `over`, what would, and what to do;
    `optimizers` are those of the tables in the checkpoint, as plain data. For rank 0 alone.

    Returns the config to record, which says how the weights have learned: as before where nothing learns anew.
    """
    before = _load_previous_config(run)
    found = [*_diff_row_optimizers(optimizers, tables)]
    if before is not None:
        found += [f"{k} was {was!r}, is {now!r}" for k, was, now in _diff_configs(before, config, _LEARNING_KEYS)]
    if not found:
        return config
    changes = "; ".join(found[:_MAX_LISTED]) + (
        f"; and {len(found) - _MAX_LISTED:,} more" if len(found) > _MAX_LISTED else ""
    )
    if over is None:
        print(f"note: from here on the run learns as the config says now: {changes}", file=sys.stderr)
        return config
    print(f"note: run_dir {str(run.path)!r} {over.description}: its weights, figures and config are kept, and nothing "
          f"learns "
          f"by what is new ({changes}); choose another run_dir, or begin this one anew with --force, to train so from "
          f"the start, or raise {over.config_key} to go on so from there", file=sys.stderr)  # fmt: skip
    if before is None:
        return config
    train = config.train.model_copy(update={"clip_norm": before.train.clip_norm})
    return config.model_copy(update={"train": train, **{name: getattr(before, name) for name in _LEARNING_SECTIONS}})


def report_topology_change(run: RunDir, plan: Plan) -> None:
    """Say in one line where numbers are added over other ranks, or hosts, than until now. For rank 0 alone."""
    with suppress(MesetaError):  # of a version that wrote none, or another one
        before, _ = load_document("plan", run.path / PLAN_FILE, read_explicit_plan)
        if before.ranks_text != plan.ranks_text:
            print(f"note: from here on sums are added over {plan.ranks_text}, until now over {before.ranks_text}: the "
                  f"run goes "
                  "on to tolerance, not to the bit, as one that did not change", file=sys.stderr)  # fmt: skip


def _load_previous_config(run: RunDir) -> RunConfig | None:
    """The config that the run went by until now; None where there is none that this version understands. Raises
    StorageError if it cannot be read: what it forbids, and what is written in its place, depends on it."""
    try:
        return run.load_config()
    except StorageError:
        raise
    except MesetaError:
        return None


def _diff_configs(before: RunConfig, now: RunConfig, keys: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """(key, value before, value now) of those that differ."""
    documents = [_to_document(config) for config in (before, now)]
    for key in keys:
        one, other = (get_value(document, key) for document in documents)
        if isinstance(one, dict):
            values = {name: (one.get(name), other.get(name)) for name in {**one, **other}}
            yield from ((f"{key}.{name}", was, now) for name, (was, now) in values.items() if was != now)
        elif one != other:
            yield key, one, other


def _diff_poolings(before: RunConfig, now: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """The same of features with a pooling of their own."""
    for table in {**before.embedding.tables, **now.embedding.tables}:
        one, other = (config.embedding.table_pooling(table) for config in (before, now))
        if one != other:
            yield f"embedding.tables.{table}.pooling", one, other


def _to_document(config: RunConfig) -> dict[str, Any]:
    """Plain data, with each schedule where it holds."""
    document = config.model_dump(mode="json")
    for part, schedule in (("embedding", config.embedding_schedule), ("dense", config.dense_schedule)):
        document[part]["schedule"] = schedule.model_dump(mode="json")
    return document


def _diff_row_optimizers(optimizers: Mapping[str, Any], tables: Sequence[TableSpec]) -> Iterator[str]:
    """Constants of row optimizers, tables that changed alike together."""
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
