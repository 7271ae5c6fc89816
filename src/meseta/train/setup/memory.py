"""Whether a run fits into memory: bytes that it will hold, predicted before its model and its tables are made."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from meseta.comm import World
from meseta.comm.dense_shards import sharded_modules
from meseta.config import CheckpointConfig, RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.served.record_batches import MAX_RECORD_BATCH_ROWS
from meseta.data.read.served.windows import MAX_WINDOWS_AHEAD
from meseta.machine.kernel import KernelFiles, free_memory_bytes, read_cgroup_limits
from meseta.planner.cost.memory import DENSE_COPIES, PHASES, PROCESS_OVERHEAD_BYTES, Phase, RunBytes, plan_memory_bytes
from meseta.spec import MesetaError, OptimizerSpec, Plan, TableSpec, Workload
from meseta.spec.tiers import HBM, HOST
from meseta.telemetry.formatting import format_bytes
from meseta.train.setup.meta_model import evaluation_peak_bytes, pooled_embedding_bytes, step_peak_bytes
from meseta.train.setup.source import make_row_source


@dataclass(frozen=True, kw_only=True)
class MemoryDemand:
    """Bytes that one rank holds in one phase of a run."""

    tables: int
    """Rows of its shards, and for replicas their gradient: exact."""
    optimizer_state: int
    """State of its rows: exact."""
    dense_part: int
    """Parameters, gradients and moments, at most."""
    activations: int
    """Of one batch, forwards and backwards, with the buffers of its exchange; or of one in evaluation."""
    reading: int
    """Decoded windows, or rows that have come from readers, and batches made ahead, in the host's memory."""
    saving: int
    """Blocks of a checkpoint on their way to files, in the host's memory."""
    copies: int
    """What a save in the background is written from, in the host's memory."""
    process: int
    """Stacks of threads and what allocators keep, in the host's memory."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def device_demand(self) -> MemoryDemand:
        """Without what lies in the memory of the host."""
        return replace(self, reading=0, saving=0, copies=0, process=0)

    def __str__(self) -> str:
        """What there is of each, for the message."""
        parts = asdict(self).items()
        shown = [(name, value) for name, value in parts if value or name not in ("saving", "copies")]
        return ", ".join(f"{name.replace('_', ' ')} {format_bytes(value)}" for name, value in shown)


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """What the ranks of a run hold under any plan."""

    workload: Workload
    """Of its steps."""
    run: RunBytes
    """What the run adds to a plan."""

    def demand_by_phase(
        self, plan: Plan, tables: Mapping[str, TableSpec] | None = None
    ) -> dict[Phase, list[MemoryDemand]]:
        """By phase, of every rank; `tables` stand for those of the workload of their names."""
        workload = self.workload
        if tables is not None:
            workload = replace(workload, tables=tuple(tables[table.name] for table in workload.tables))
        held = plan_memory_bytes(plan, workload, plan.ranks_per_host, self.run)

        def need(phase: Phase, rank: int) -> MemoryDemand:
            parts = dict.fromkeys(MemoryDemand.__dataclass_fields__, 0)
            for memory in (HBM, HOST):
                for name, values in held[phase][memory].items():
                    parts[name] += int(values[rank])
            return MemoryDemand(**parts)

        return {phase: [need(phase, rank) for rank in range(plan.num_ranks)] for phase in PHASES}


def is_background_save_certain(config: CheckpointConfig) -> bool:
    """Whether a run is certain to save in the background: 'auto' does so only where memory is free."""
    return config.background == "always" and saves_during_training(config)


def _has_deltas(config: CheckpointConfig) -> bool:
    """Whether checkpoints hold changed rows alone, or rows in codes."""
    return config.deltas != "none" or config.bits != "exact" or bool(config.tables)


def saves_during_training(config: CheckpointConfig) -> bool:
    """Whether a run saves before its end."""
    return bool(config.every_steps or config.every_minutes or config.keep_best)


def run_bytes(
    config: RunConfig, dataset: Dataset, outline: nn.Module, num_ranks: int, per_host: int, *, on_cpu: bool
) -> RunBytes:
    """What a run adds to its plan on so many ranks, `per_host` of them on a host; of the model, `outline` has the
    shapes, as meseta.train.setup.meta_model makes it."""
    train, num_dense = config.train, len(dataset.dense)
    batch_size = -(-train.batch_size // num_ranks)
    part_size = -(-batch_size // train.accumulate_steps)
    lookups = sum(column.statistics.mean_pooling_factor for column in dataset.sparse)
    sample_bytes = 4 * (1 + len(dataset.dense)) + 8 * lookups
    ahead = _max_rows_read_ahead(config, dataset, num_ranks)
    is_stale, overlaps = bool(config.pipeline.staleness), num_ranks > 1 and config.pipeline.overlap != "off"
    if overlaps or is_stale:  # the batch whose ids travel ahead, and those that come
        ahead += 2 * batch_size
    scored = -(-train.eval_batch_size // num_ranks)
    return RunBytes(
        dense_bytes=dense_part_bytes(config, outline, num_ranks, per_host),
        step_bytes=step_peak_bytes(outline, part_size, num_dense, on_heap=on_cpu)
        + is_stale * pooled_embedding_bytes(outline, batch_size),
        evaluation_bytes=evaluation_peak_bytes(outline, scored, num_dense, on_heap=on_cpu),
        eval_batch_size=train.eval_batch_size,
        num_micro_batches=train.accumulate_steps,
        reading_bytes=int(ahead * sample_bytes),
        process_bytes=PROCESS_OVERHEAD_BYTES,
        has_deltas=_has_deltas(config.checkpoint),
        saves_during_training=config.checkpoint.background != "never" and saves_during_training(config.checkpoint),
        saves_from_copies=is_background_save_certain(
            config.checkpoint.model_copy(update={"keep_best": config.keeps_best})
        ),
        storage=config.storage.options,
    )


def _max_rows_read_ahead(config: RunConfig, dataset: Dataset, num_ranks: int) -> int:
    """The most that a rank holds of training rows before their turn."""
    window_rows = min(config.data.shuffle_window_rows, dataset.num_training_rows)
    num_batches = 1 + config.data.prefetch_batches
    if not make_row_source(config.data).is_served:
        # A window as decoded and as Arrow has it, while the next one is read.
        return window_rows * 3 + config.train.batch_size * num_batches
    # Of each window that is asked for, this rank's rows: a record batch in hand, one waiting, and one that comes.
    of_rank, batch_size = (-(-rows // num_ranks) for rows in (window_rows, config.train.batch_size))
    return (MAX_WINDOWS_AHEAD + 1) * min(3 * MAX_RECORD_BATCH_ROWS, of_rank) + batch_size * num_batches


def _without_checkpoint_phase(needs: Mapping[Phase, list[MemoryDemand]]) -> dict[Phase, list[MemoryDemand]]:
    """Without the phase of checkpoints."""
    return {phase: found for phase, found in needs.items() if phase != "checkpoint"}


def _peak_phase(needs: Sequence[list[MemoryDemand]]) -> list[MemoryDemand]:
    """Of the phase in which ranks hold most together."""
    return max(needs, key=lambda found: sum(need.total for need in found))


def dense_part_bytes(config: RunConfig, model: nn.Module, num_ranks: int, per_host: int) -> int:
    """Of the dense part on one rank; where it is cut, its share and the largest module while that is gathered."""

    def of(module: nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())

    if config.dense.sharding == "replicated" or num_ranks == 1:
        return of(model) * DENSE_COPIES
    cut = [of(module) for _, module in sharded_modules(model, model.get_submodule("embeddings"))]
    left = of(model) - sum(cut)
    return (left + sum(cut) // per_host) * DENSE_COPIES + 2 * max(cut, default=0)


def available_bytes(device: torch.device, system: KernelFiles | None = None) -> int | None:
    """Memory that this process may still take of its device; of the host, what no control group forbids. None where
    the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    system = system or KernelFiles()
    return free_memory_bytes(system, read_cgroup_limits(system))


def check_memory(memory: RunMemory, outline: nn.Module, world: World, plan: Plan) -> None:
    """Raise MesetaError, on all ranks and with the numbers, where the ranks of a host need more than it has left.

    Collective. On GPUs each rank is held against its own device, without what takes the memory of the host.
    """
    free, host = available_bytes(world.device), socket.gethostname()
    hosts = world.all_gather_object((host, free))
    if world.device.type == "cuda":
        here, known = [world.rank], free
    else:
        here = [rank for rank, (name, _) in enumerate(hosts) if name == host]
        known = min((left for name, left in hosts if name == host and left is not None), default=None)

    def held(tables: Mapping[str, TableSpec] | None = None) -> tuple[list[MemoryDemand], list[MemoryDemand]]:
        needs = memory.demand_by_phase(plan, tables)
        if world.device.type == "cuda":
            needs = {phase: [need.device_demand for need in of_ranks] for phase, of_ranks in needs.items()}
        of_here = {phase: [of_ranks[rank] for rank in here] for phase, of_ranks in needs.items()}
        return _peak_phase(list(_without_checkpoint_phase(of_here).values())), of_here["checkpoint"]

    problem = None
    for phase, (together, while_so) in enumerate(zip(held(), ("", " while it saves"), strict=True)):
        total = sum(need.total for need in together)
        if known is not None and total > known:
            tables = {table.name: table for table in memory.workload.tables}
            largest = max(tables.values(), key=lambda table: table.num_embeddings * table.embedding_dim)
            smaller = {
                change: format_bytes(sum(need.total for need in held(changed)[phase]))
                for change, changed in _smaller_tables(tables).items()
            }
            ways = [f"{change} needs {size}" for change, size in smaller.items() if size != format_bytes(total)]
            problem = MesetaError(
                f"this run needs {format_bytes(total)} of memory on {host!r}{while_so}, and {format_bytes(known)} are "
                f"free "
                f"({len(together)} ranks there; rank {world.rank} holds: {together[here.index(world.rank)]}; the "
                f"largest table is {largest.name!r}, {largest.num_embeddings:,} x {largest.embedding_dim}"
                f"{_largest_parameter(outline)}). {'; '.join([*ways, 'or ' * bool(ways) + _REMEDIES])}"
            )
            break
    world.raise_on_all_ranks(problem)


_REMEDIES = (
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


def _smaller_tables(tables: Mapping[str, TableSpec]) -> dict[str, dict[str, TableSpec]]:
    """By change of the config, the tables under it."""
    return {
        "embedding.dtype=bfloat16": {
            name: replace(table, dtype="bfloat16") if table.dtype == "float32" else table
            for name, table in tables.items()
        },
        "embedding.optimizer.name=rowwise_adagrad": {
            name: replace(table, optimizer=OptimizerSpec(name="rowwise_adagrad")) for name, table in tables.items()
        },
    }
