"""What a checkpoint holds beside the tables: dense parameters, optimizer moments and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from meseta import checkpoint
from meseta.checkpoint.manifest import QUANTIZED
from meseta.comm import World
from meseta.comm.dense_shards import distribute_like, full_tensor, is_sharded
from meseta.data.batch import Batch
from meseta.data.dataset.dataset import Dataset
from meseta.errors import StorageError, format_value
from meseta.machine.remote import Location
from meseta.pipeline.agreement import LateNonFiniteLoss, NonFiniteLoss
from meseta.spec import FeatureSpec, MesetaError

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


class _TrainerState(_StateModel):
    """What a run goes on from, beside its tensors."""

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


def dense_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Tensor]:
    """`model.<parameter>` and `optimizer.<parameter>.<moment>`, flat, whole whatever they are cut into. Collective.

    Those that are cut are put together one by one, and kept by rank 0 alone, on the CPU.
    """
    tensors = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{moment}"] = torch.as_tensor(value)
    for name in [name for name, tensor in tensors.items() if is_sharded(tensor)]:
        together = full_tensor(tensors.pop(name))
        if world.rank == 0:
            tensors[name] = together.cpu()
    return tensors


def set_dense_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Undo `dense_tensors`. Raises MesetaError where a parameter is missing or has another shape."""
    set_dense_parameters(model, tensors)
    fused = {p for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        moments = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if moments:
            # Moments lie beside their parameter, and torch keeps step counters on the CPU unless a fused kernel reads
            # them.
            optimizer.state[parameter] = {
                key: distribute_like(
                    value.to("cpu" if key == "step" and parameter not in fused else parameter.device, copy=True),
                    parameter,
                )
                for key, value in moments.items()
            }


def set_dense_parameters(model: nn.Module, tensors: Mapping[str, Tensor], where: str = "checkpoint") -> None:
    """Fill the dense parameters alone. Raises MesetaError where one is missing or has another shape."""
    expected = {f"model.{name}": value for name, value in model.state_dict().items()}
    saved = {name: value for name, value in tensors.items() if name.startswith("model.")}
    for name in sorted(expected.keys() | saved.keys()):
        shapes = [tuple(t[name].shape) if name in t else "nothing" for t in (saved, expected)]
        if shapes[0] != shapes[1]:
            raise MesetaError(
                f"{where}: dense tensor {name!r} is {shapes[0]} there and {shapes[1]} in the model; "
                "use the config that it was trained with"
            )
    model.load_state_dict(
        {name.removeprefix("model."): distribute_like(t, expected[name]) for name, t in saved.items()}
    )


def add_step_context(
    error: MesetaError, done: int, batch: Batch | None, dataset: Dataset, folder: Location, world: World
) -> MesetaError:
    """What went wrong behind `done` steps, with the number of its step, what `batch` has to do with it, and the way
    back to the checkpoints of `folder`. Collective."""
    cause = None
    if isinstance(error, NonFiniteLoss) and batch is not None:
        cause = find_non_finite_input(batch, dataset, world)
    try:
        saved = checkpoint.latest_complete(folder)
        back = "there is no checkpoint yet" if saved is None else f"the last checkpoint is {str(saved)!r}"
    except StorageError as unread:  # less than what is to be told
        back = str(unread)
    number = done if isinstance(error, LateNonFiniteLoss) else done + 1
    return MesetaError(f"step {number}: {cause or error} ({back})")


def random_state() -> str:
    """torch's CPU generator, as text for the manifest."""
    return bytes(torch.get_rng_state().tolist()).hex()


def set_random_state(text: str) -> None:
    """Undo `random_state`."""
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8))


def sum_out_of_range_ids(features: Sequence[FeatureSpec], counts: Tensor | None, world: World) -> dict[str, int]:
    """Ids outside their table that a policy has dropped, clamped or hashed, by feature, over all ranks; features
    without any are left out. `counts` [F] are this rank's, None before any batch. Collective."""
    if counts is None:
        counts = torch.zeros(len(features), dtype=torch.int64, device=world.device)
    total = world.all_reduce_small(counts, "out-of-range ids").tolist()
    return {feature.name: count for feature, count in zip(features, total, strict=True) if count}


def sum_clamped(clamped: Tensor | None, world: World) -> int | None:
    """Numbers that were too large for fp16 on their way between ranks, over all ranks; None where none travelled so.
    `clamped` [1] are this rank's. Collective."""
    return None if clamped is None else int(world.all_reduce_small(clamped, "clamped elements"))


def restore(
    path: Location,
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    world: World,
    *,
    mark_changes_since_full: bool = False,
) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint, under any plan; returns its state with `step`, `dense`, `carried`
    and, by table, the constants of the row `optimizers`; `restores` counts this one where its rows were in codes.

    Without an optimizer, for a model that does not train on, its moments are left in the file. Rows are marked as
    `checkpoint.load` says. Raises MesetaError, on
    all ranks, where the checkpoint is damaged, with the newest older one that is not, and where it is of another model
    or dense optimizer.
    """
    try:
        shards = model.embeddings.shards
        loaded = checkpoint.load(path, world=world, shards=shards, mark_changes_since_full=mark_changes_since_full)
    except checkpoint.DamagedCheckpoint as problem:
        raise world.broadcast_from_rank_0(partial(checkpoint.fallback_checkpoint_error, problem, path)) from None
    _check_state(path, loaded.state)
    if optimizer is None:
        set_dense_parameters(model, loaded.dense)
    else:
        where = f"checkpoint {str(path)!r}"
        check_dense_optimizer(where, optimizer, loaded.state["dense_optimizer"], loaded.dense, loaded.step)
        set_dense_tensors(model, optimizer, loaded.dense)
    embeddings = model.embeddings
    counts = None
    if world.rank == 0:  # they are sums over ranks
        told = [loaded.state["ids_outside"].get(feature.name, 0) for feature in embeddings.features]
        counts = torch.tensor(told, device=world.device)
    embeddings.set_resume_state(loaded.state["embedding_step"], counts)
    optimizers = {name: entry["optimizer"] for name, entry in loaded.manifest["tables"].items()}
    tensors = {"dense": loaded.dense, "carried": loaded.prefetched_embeddings}
    restores = loaded.state.get("restores", 0) + (QUANTIZED in loaded.manifest)
    return {**loaded.state, **tensors, "step": loaded.step, "optimizers": optimizers, "restores": restores}


def _check_state(path: Location, state: Mapping[str, Any]) -> None:
    """Raise MesetaError for a state that no run has written; a checkpoint's own checks do not know what is in it."""
    try:
        saved = _TrainerState.model_validate({**state, "best": state.get("best") or None})
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise MesetaError(
            f"checkpoint {str(path)!r}: state {format_value(key)}: {problem['msg'].lower()}; use one of `meseta train`"
        ) from None
    if len(saved.random) != len(random_state()):
        raise MesetaError(f"checkpoint {str(path)!r}: state 'random' is that of another generator; use an older one")


def check_dense_optimizer(
    where: str, optimizer: torch.optim.Optimizer, saved: str, dense: Mapping[str, Tensor], num_steps: int
) -> None:
    """Raise MesetaError where the dense part was trained with another one than `optimizer`, `saved` being the class of
    the former, for `num_steps`."""
    wanted = type(optimizer).__name__
    if saved != wanted:
        raise MesetaError(
            f"{where}: the dense part was trained with {saved}, but the config asks for {wanted}; "
            "set dense.optimizer.name back, or choose another run_dir"
        )
    moments = [name for name in dense if name.startswith("optimizer.")]
    if num_steps or moments:  # an imported model has made no step, and has none yet
        _check_momentum(where, optimizer, moments)


def _check_momentum(where: str, optimizer: torch.optim.Optimizer, moments: Sequence[str]) -> None:
    """Raise MesetaError where SGD's velocities would be lost, or begin from nothing in the middle of a run."""
    saved = any(name.endswith(".momentum_buffer") for name in moments)
    wanted = any(group.get("momentum") for group in optimizer.param_groups)
    if isinstance(optimizer, torch.optim.SGD) and saved != wanted:
        raise MesetaError(
            f"{where}: the dense part was trained {'with' if saved else 'without'} momentum, and the "
            f"config asks for {'some' if wanted else 'none'}; set dense.optimizer.momentum back, or choose another "
            "run_dir"
        )


def find_non_finite_input(batch: Batch, dataset: Dataset, world: World) -> str | None:
    """Of a loss that is not finite: the first dense value of the global batch that is not, in words; None where all
    are. Collective."""
    start = 0
    for batch_size, place in world.all_gather_object((batch.batch_size, batch.find_non_finite())):
        if place is not None:
            sample, column, value = place
            return (
                f"the loss is not finite, and nothing was updated: dense feature {dataset.dense[column].name!r} of "
                f"sample {start + sample} is {value}; fix the data, or prepare them again"
            )
        start += batch_size
    return None
