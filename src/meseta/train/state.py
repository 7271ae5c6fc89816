"""State of a checkpoint besides the tables: dense parameters, optimizer moments and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from meseta import checkpoint
from meseta.checkpoint.averages import replace_rows_by_averages, select_averages
from meseta.checkpoint.manifest import QUANTIZED
from meseta.comm import World
from meseta.comm.dense import distribute_like, full_tensor, is_sharded
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch import Batch
from meseta.errors import StorageError, format_value
from meseta.pipeline.losses import NonFiniteLoss, SkippedUpdate
from meseta.spec import FeatureSpec, MesetaError
from meseta.spec.average import AverageKind
from meseta.system.remote import Location

Count = Annotated[int, Field(ge=0, lt=1 << 53)]


class _StateModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _BestState(_StateModel):
    step: Count | None
    value: float | None
    num_stale: Count


class _PlateauState(_StateModel):
    num_falls: Count
    num_stale: Count


class _AverageState(_StateModel, extra="forbid"):
    kind: AverageKind
    decay: Annotated[float, Field(gt=0, lt=1)]
    start_step: Count


class _TrainerState(_StateModel):
    num_samples: Count
    embedding_step: Count
    ids_outside: dict[str, Count]
    train_s: Annotated[float, Field(ge=0)]
    dense_optimizer: str
    random: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]
    reader: dict[str, Any]
    best: _BestState | None = None
    evaluated: Count = 0
    restores: Count = 0
    run_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    plateaus: dict[str, _PlateauState] = {}
    average: _AverageState | None = None


def dense_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World, more: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Return `model.PARAMETER`, `optimizer.PARAMETER.MOMENT` and `more` tensors by name, only on rank 0, on the CPU.
    Collective. Gathers sharded tensors one at a time."""
    tensors = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{moment}"] = torch.as_tensor(value)
    tensors |= more
    for name in [name for name, tensor in tensors.items() if is_sharded(tensor)]:
        together = full_tensor(tensors.pop(name))
        if world.rank == 0:
            tensors[name] = together.cpu()
    return tensors


def set_dense_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], where: str = "checkpoint"
) -> None:
    """Restore the tensors of `dense_tensors`. Raises MesetaError, whose message starts with `where`, if a parameter is
    missing or its shape differs."""
    set_dense_parameters(model, tensors, where)
    fused = {p for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        moments = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if moments:
            # Moments are on the device of their parameter. torch keeps step counters on the CPU, unless a fused kernel
            # reads them.
            optimizer.state[parameter] = {
                key: distribute_like(
                    value.to("cpu" if key == "step" and parameter not in fused else parameter.device, copy=True),
                    parameter,
                )
                for key, value in moments.items()
            }


def set_dense_parameters(model: nn.Module, tensors: Mapping[str, Tensor], where: str = "checkpoint") -> None:
    """Restore the dense parameters only. Raises MesetaError if one is missing or its shape differs."""
    expected = {f"model.{name}": value for name, value in model.state_dict().items()}
    saved = {name: value for name, value in tensors.items() if name.startswith("model.")}
    for name in sorted(expected.keys() | saved.keys()):
        shapes = [tuple(t[name].shape) if name in t else "nothing" for t in (saved, expected)]
        if shapes[0] != shapes[1]:
            raise MesetaError(
                f"{where}: dense tensor {name!r} is saved as {shapes[0]}, but the model has {shapes[1]}; "
                "use the config that it was trained with"
            )
    model.load_state_dict(
        {name.removeprefix("model."): distribute_like(t, expected[name]) for name, t in saved.items()}
    )


def add_step_context(
    error: MesetaError, done: int, batch: Batch | None, dataset: Dataset, folder: Location, world: World
) -> MesetaError:
    """Add the step number, a cause in `batch` and the last checkpoint to an error after `done` steps. Collective."""
    cause = None
    if isinstance(error, NonFiniteLoss) and batch is not None:
        cause = find_non_finite_input(batch, dataset, world)
    try:
        saved = checkpoint.latest_complete(folder)
        back = "there is no checkpoint yet" if saved is None else f"the last checkpoint is {str(saved)!r}"
    except StorageError as unread:  # The original error is more important than this one.
        back = str(unread)
    # A deferred check reports the step before.
    number = done if isinstance(error, SkippedUpdate) else done + 1
    return MesetaError(f"step {number}: {cause or error} ({back})")


def random_state() -> str:
    """Return the state of torch's CPU generator as hexadecimal text."""
    return bytes(torch.get_rng_state().tolist()).hex()


def set_random_state(text: str) -> None:
    """Restore the result of `random_state`."""
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8))


def sum_out_of_range_ids(features: Sequence[FeatureSpec], counts: Tensor | None, world: World) -> dict[str, int]:
    """Return the number of ids that a policy dropped, clamped or hashed, by feature, over all ranks. Collective.

    `counts` [F] are those of this rank, or `None` before the first batch. Features without such ids are omitted.
    """
    if counts is None:
        counts = torch.zeros(len(features), dtype=torch.int64, device=world.device)
    total = world.all_reduce_small(counts, "out-of-range ids").tolist()
    return {feature.name: count for feature, count in zip(features, total, strict=True) if count}


def sum_clamped(clamped: Tensor | None, world: World) -> int | None:
    """Return the number of values clamped to the range of fp16 in exchanges, over all ranks. Collective.

    `clamped` [1] is the number of this rank. It is `None`, and so is the result, if the exchanges do not use fp16.
    """
    return None if clamped is None else int(world.all_reduce_small(clamped, "clamped elements"))


def restore(
    path: Location,
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    world: World,
    *,
    mark_changes_since_full: bool = False,
) -> dict[str, Any]:
    """Restore model and optimizer from a checkpoint of any plan. Return its state.

    The state has additional keys: `step`, `dense` and `carried` tensors, row `optimizers` by table, and the number of
    `restores` from quantized rows including this one. `optimizer` is `None` for a model that is not trained further,
    which gets averages if the run has them. `mark_changes_since_full` is an argument of `checkpoint.load`.
    Raises MesetaError, on all ranks, if the checkpoint is damaged, or is of another model or dense optimizer. For a
    damaged checkpoint it is a FallbackCheckpointError.
    """
    try:
        shards = model.embeddings.shards
        loaded = checkpoint.load(path, world=world, shards=shards, mark_changes_since_full=mark_changes_since_full)
    except checkpoint.DamagedCheckpoint as problem:
        raise world.broadcast_from_rank_0(partial(checkpoint.fallback_checkpoint_error, problem, path)) from None
    check_trainer_state(path, loaded.state)
    if optimizer is None:
        set_dense_parameters(model, select_averages(loaded.dense))
        replace_rows_by_averages(shards, loaded.state)
    else:
        where = f"checkpoint {str(path)!r}"
        check_dense_optimizer(where, optimizer, loaded.state["dense_optimizer"], loaded.dense, loaded.step)
        set_dense_tensors(model, optimizer, loaded.dense)
    embeddings = model.embeddings
    counts = None
    if world.rank == 0:  # The saved counts are sums over ranks.
        saved_counts = [loaded.state["ids_outside"].get(feature.name, 0) for feature in embeddings.features]
        counts = torch.tensor(saved_counts, device=world.device)
    embeddings.set_resume_state(loaded.state["embedding_step"], counts)
    optimizers = {name: entry["optimizer"] for name, entry in loaded.manifest["tables"].items()}
    tensors = {"dense": loaded.dense, "carried": loaded.prefetched_embeddings}
    restores = loaded.state.get("restores", 0) + (QUANTIZED in loaded.manifest)
    return {**loaded.state, **tensors, "step": loaded.step, "optimizers": optimizers, "restores": restores}


def check_trainer_state(path: Location, state: Mapping[str, Any]) -> None:
    """Raise MesetaError if no run can have written the state. Checks of the checkpoint itself ignore its content."""
    try:
        saved = _TrainerState.model_validate({**state, "best": state.get("best") or None})
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise MesetaError(
            f"checkpoint {str(path)!r}: state {format_value(key)}: {problem['msg'].lower()}; use a checkpoint of "
            "`meseta train`"
        ) from None
    if len(saved.random) != len(random_state()):
        raise MesetaError(
            f"checkpoint {str(path)!r}: state 'random' has the wrong length for this generator; use an older checkpoint"
        )


def check_dense_optimizer(
    where: str, optimizer: torch.optim.Optimizer, saved: str, dense: Mapping[str, Tensor], num_steps: int
) -> None:
    """Raise MesetaError if the dense part was trained with another optimizer than `optimizer`.

    Args:
        where: Start of the message.
        optimizer: Optimizer of the config.
        saved: Class name of the saved optimizer.
        dense: Saved dense tensors by name.
        num_steps: Number of steps of the saved model.
    """
    configured = type(optimizer).__name__
    if saved != configured:
        raise MesetaError(
            f"{where}: the dense part was trained with {saved}, but the config has {configured}; "
            "set dense.optimizer.name back, or choose another run_dir"
        )
    moments = [name for name in dense if name.startswith("optimizer.")]
    if num_steps or moments:  # An imported model has no steps and no moments.
        _check_momentum(where, optimizer, moments)


def _check_momentum(where: str, optimizer: torch.optim.Optimizer, moments: Sequence[str]) -> None:
    """Raise MesetaError if velocities of SGD would be lost, or start at zero in the middle of a run."""
    saved = any(name.endswith(".momentum_buffer") for name in moments)
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    if isinstance(optimizer, torch.optim.SGD) and saved != has_momentum:
        raise MesetaError(
            f"{where}: the dense part was trained {'with' if saved else 'without'} momentum, but the "
            f"config has {'some' if has_momentum else 'none'}; set dense.optimizer.momentum back, or choose another "
            "run_dir"
        )


def find_non_finite_input(batch: Batch, dataset: Dataset, world: World) -> str | None:
    """Return the cause of a non-finite loss if it is a dense value of the global batch, else `None`. Collective."""
    start = 0
    for batch_size, place in world.all_gather_object((batch.batch_size, batch.find_non_finite())):
        if place is not None:
            sample, column, value = place
            return (
                f"the loss is not finite, and nothing was updated: dense feature {dataset.dense[column].name!r} of "
                f"sample {start + sample} is {value}; fix the data, or prepare it again"
            )
        start += batch_size
    return None
