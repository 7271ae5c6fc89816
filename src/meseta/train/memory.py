"""Whether a run fits into memory: bytes that it will hold, predicted before its model and its tables are made."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import nn

from meseta.comm import World
from meseta.comm.dense_shards import cut_modules
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.machine.system import System, free_memory_bytes, read_limits
from meseta.planner.memory import DENSE_COPIES, SORT_BYTES, replica_bytes, rows_and_state
from meseta.spec import MesetaError, OptimizerSpec, Plan, TableSpec
from meseta.telemetry.shown import byte_size
from meseta.train.outline import score_bytes, step_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes that one rank will hold."""

    tables: int
    """Rows of its shards, and for replicas their gradient: exact."""
    optimizer_state: int
    """State of its rows: exact."""
    dense_part: int
    """Parameters, gradients and moments, at most."""
    activations: int
    """Of one batch, forwards and backwards, with what sorts its ids; or of one in evaluation, where that takes more."""
    reading: int
    """Decoded windows and batches made ahead, in the host's memory."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = [f"{name.replace('_', ' ')} {byte_size(value)}" for name, value in asdict(self).items()]
        return ", ".join(parts)


def predict_memory(
    config: RunConfig, dataset: Dataset, outline: nn.Module, plan: Plan, tables: Mapping[str, TableSpec], rank: int
) -> MemoryNeed:
    """What `rank` will hold under `plan`, of `tables` by name; of the model, `outline` has the shapes, as
    meseta.train.outline makes it."""
    rows_bytes, state_bytes = 0, 0
    for placed in plan.tables:
        table = tables[placed.table]
        for shard in (shard for shard in placed.shards if rank in shard.ranks):
            held = rows_and_state(table, shard)
            rows_bytes, state_bytes = rows_bytes + held[0], state_bytes + held[1]
            if placed.is_replica(shard) and plan.num_ranks > 1:
                rows_bytes += replica_bytes(table, shard)
    batch_size = -(-config.train.batch_size // plan.num_ranks)
    part_size = -(-batch_size // config.train.accumulate_steps)
    lookups = sum(column.statistics.mean_pooling_factor for column in dataset.sparse)
    widths = sum(table.embedding_dim for table in tables.values())
    # What parts of a batch keep until the step: upstream gradients of bags, and their ids.
    kept = batch_size * (4 * widths + 8 * lookups) if part_size < batch_size else 0
    sample_bytes = 4 * (1 + len(dataset.dense)) + 8 * lookups
    # A window as decoded and as Arrow has it, while the next one is read.
    window_rows = min(config.data.shuffle_window_rows, dataset.num_training_rows)
    ahead = window_rows * 3 + config.train.batch_size * (1 + config.data.prefetch_batches)
    return MemoryNeed(
        tables=rows_bytes,
        optimizer_state=state_bytes,
        dense_part=_dense_bytes(config, outline, plan),
        activations=max(
            step_bytes(outline, part_size, len(dataset.dense)) + int(kept + SORT_BYTES * lookups * part_size),
            score_bytes(outline, -(-config.train.eval_batch_size // plan.num_ranks), len(dataset.dense)),
        ),
        reading=int(ahead * sample_bytes),
    )


def _dense_bytes(config: RunConfig, model: nn.Module, plan: Plan) -> int:
    """Of the dense part on one rank; where it is cut, its share and the largest module while that is gathered."""

    def of(module: nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())

    if config.dense.sharding == "replicated" or plan.num_ranks == 1:
        return of(model) * DENSE_COPIES
    cut = [of(module) for _, module in cut_modules(model, model.get_submodule("embeddings"))]
    left = of(model) - sum(cut)
    return (left + sum(cut) // plan.per_host) * DENSE_COPIES + 2 * max(cut, default=0)


def free_bytes(device: torch.device, system: System | None = None) -> int | None:
    """Memory that this process may still take of its device; of the host, what no control group forbids. None where
    the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    system = system or System()
    return free_memory_bytes(system, read_limits(system))


def check_memory(
    config: RunConfig, dataset: Dataset, outline: nn.Module, tables: Mapping[str, TableSpec], world: World, plan: Plan
) -> None:
    """Raise MesetaError, on all ranks and with the numbers, where the ranks of a host need more than it has left.

    Collective. On GPUs each rank is held against its own device, without what reading takes of the host.
    """
    plan = replace(plan, devices_per_host=plan.devices_per_host or world.ranks_per_host)
    predict = partial(predict_memory, config, dataset, outline, plan, rank=world.rank)
    need = predict(tables)
    free, host = free_bytes(world.device), socket.gethostname()
    found = world.gather_objects((host, need, free))
    if world.device.type == "cuda":
        together, known = [replace(need, reading=0)], free
    else:
        together = [other for name, other, _ in found if name == host]
        known = min((left for name, _, left in found if name == host and left is not None), default=None)
    total = sum(other.total for other in together)
    problem = None
    if known is not None and total > known:
        largest = max(tables.values(), key=lambda table: table.num_embeddings * table.embedding_dim)
        ways = [
            f"{change} needs {byte_size(total - saved * len(together))}"
            for change, saved in _savings(predict, tables)
            if byte_size(total - saved * len(together)) != byte_size(total)
        ]
        problem = MesetaError(
            f"this run needs {byte_size(total)} of memory on {host!r}, and {byte_size(known)} are free "
            f"({len(together)} ranks there; rank {world.rank} holds: {need}; the largest table is {largest.name!r}, "
            f"{largest.num_embeddings:,} x {largest.embedding_dim}{_largest_parameter(outline)}). "
            f"{'; '.join([*ways, 'or ' * bool(ways) + _OTHER_WAYS])}"
        )
    world.raise_together(problem)


_OTHER_WAYS = (
    "prepare the data with fewer --hash-rows, lower model.embedding_dim, the widths of the model's layers, "
    "train.batch_size or train.eval_batch_size, take more hosts, or set check_memory=false to start all the same"
)


def _largest_parameter(outline: nn.Module) -> str:
    """Of the dense part, for the message; nothing where it has none."""
    found = max(outline.named_parameters(), key=lambda named: named[1].numel(), default=None)
    if found is None:
        return ""
    name, parameter = found
    return f", the largest dense parameter {name!r}, {' x '.join(f'{size:,}' for size in parameter.shape)}"


def _savings(
    predict: Callable[[Mapping[str, TableSpec]], MemoryNeed], tables: Mapping[str, TableSpec]
) -> list[tuple[str, int]]:
    """Changes of the config, and the bytes that each saves on this rank, whose need `predict` tells."""
    halved = {name: replace(t, dtype="bfloat16") if t.dtype == "float32" else t for name, t in tables.items()}
    lighter = {name: replace(t, optimizer=OptimizerSpec(name="rowwise_adagrad")) for name, t in tables.items()}
    return [
        (change, predict(tables).total - predict(changed).total)
        for change, changed in (
            ("embedding.dtype=bfloat16", halved),
            ("embedding.optimizer.name=rowwise_adagrad", lighter),
        )
    ]
