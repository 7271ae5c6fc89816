"""Predict the memory that a run needs, before its model and tables are created, and check that it fits."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from meseta.comm import World
from meseta.comm.dense import sharded_modules
from meseta.config import CheckpointConfig, RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.service.client.windows import MAX_WINDOWS_AHEAD
from meseta.data.service.record_batches import MAX_RECORD_BATCH_ROWS
from meseta.planner.cost.memory import DENSE_COPIES, PHASES, PROCESS_OVERHEAD_BYTES, Phase, RunBytes, plan_memory_bytes
from meseta.spec import MesetaError, OptimizerSpec, Plan, TableSpec, Workload
from meseta.spec.tiers import HBM, HOST
from meseta.system.kernel import KernelFiles, free_memory_bytes, read_cgroup_limits
from meseta.telemetry.formatting import format_bytes
from meseta.train.setup.baseline_sample import sample_bytes as baseline_sample_bytes
from meseta.train.setup.meta_model import evaluation_peak_bytes, pooled_embedding_bytes, step_peak_bytes
from meseta.train.setup.source import make_row_source


@dataclass(frozen=True, kw_only=True)
class MemoryDemand:
    """Bytes that one rank needs in one phase of a run."""

    tables: int
    """Rows of its shards, and gradients of replicas. Exact."""
    optimizer_state: int
    """Optimizer states of its rows. Exact."""
    dense_part: int
    """Upper bound of dense parameters, gradients and moments."""
    activations: int
    """Activations of one batch in the forward and backward pass with exchange buffers, or of one evaluation batch."""
    reading: int
    """Decoded windows or received rows, prefetched batches, and rows of a baseline, in host memory."""
    saving: int
    """Blocks of a checkpoint that are being written, in host memory."""
    copies: int
    """Copies from which a background save writes, in host memory."""
    process: int
    """Thread stacks and memory retained by allocators, in host memory."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def device_demand(self) -> MemoryDemand:
        """Demand without the parts in host memory."""
        return replace(self, reading=0, saving=0, copies=0, process=0)

    def __str__(self) -> str:
        parts = asdict(self).items()
        shown = [(name, value) for name, value in parts if value or name not in ("saving", "copies")]
        return ", ".join(f"{name.replace('_', ' ')} {format_bytes(value)}" for name, value in shown)


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """Memory demand of the ranks of a run under any plan."""

    workload: Workload
    """Load of one training step."""
    run: RunBytes
    """Demand that does not depend on the plan."""

    def demand_by_phase(
        self, plan: Plan, tables: Mapping[str, TableSpec] | None = None
    ) -> dict[Phase, list[MemoryDemand]]:
        """Return the demand of each rank by phase. `tables` replaces tables of the workload with the same name."""
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


def _has_deltas(config: CheckpointConfig) -> bool:
    return config.deltas != "none" or config.bits != "exact" or bool(config.tables)


def saves_during_training(config: CheckpointConfig) -> bool:
    """Whether a run saves checkpoints before its end."""
    return bool(config.every_steps or config.every_minutes or config.keep_best)


def run_bytes(
    config: RunConfig, dataset: Dataset, outline: nn.Module, num_ranks: int, per_host: int, *, on_cpu: bool
) -> RunBytes:
    """Return the memory demand of a run that its plan does not include.

    Args:
        config: Config of the run.
        dataset: Dataset of the run.
        outline: Model on the meta device.
        num_ranks: Number of ranks.
        per_host: Number of ranks per host.
        on_cpu: Whether the ranks compute on CPUs.
    """
    train, num_dense = config.train, len(dataset.dense)
    batch_size = -(-train.batch_size // num_ranks)
    part_size = -(-batch_size // train.accumulate_steps)
    lookups = sum(column.statistics.mean_pooling_factor for column in dataset.sparse)
    sample_bytes = 4 * (1 + len(dataset.dense)) + 8 * lookups
    ahead = _max_rows_read_ahead(config, dataset, num_ranks)
    is_stale, overlaps = bool(config.pipeline.staleness), num_ranks > 1 and config.pipeline.overlap != "off"
    if overlaps or is_stale:  # The batch in input_dist, and the ids that it receives.
        ahead += 2 * batch_size
    scored = -(-train.eval_batch_size // num_ranks)
    saving = config.checkpoint.model_copy(update={"keep_best": config.keeps_best})
    return RunBytes(
        dense_bytes=dense_part_bytes(config, outline, num_ranks, per_host),
        step_bytes=step_peak_bytes(outline, part_size, num_dense, on_heap=on_cpu)
        + is_stale * pooled_embedding_bytes(outline, batch_size),
        evaluation_bytes=evaluation_peak_bytes(outline, scored, num_dense, on_heap=on_cpu),
        eval_batch_size=train.eval_batch_size,
        num_micro_batches=train.accumulate_steps,
        reading_bytes=int(ahead * sample_bytes),
        baseline_bytes=0 if config.report.baseline is None else baseline_sample_bytes(dataset),
        process_bytes=PROCESS_OVERHEAD_BYTES,
        has_deltas=_has_deltas(config.checkpoint),
        saves_during_training=config.checkpoint.background != "never" and saves_during_training(config.checkpoint),
        # With 'auto', a save is in the background only if memory is free.
        saves_from_copies=saving.background == "always" and saves_during_training(saving),
        storage=config.storage.options,
    )


def _max_rows_read_ahead(config: RunConfig, dataset: Dataset, num_ranks: int) -> int:
    window_rows = min(config.data.shuffle_window_rows, dataset.num_training_rows)
    num_batches = 1 + config.data.prefetch_batches
    if not make_row_source(config.data).is_served:
        # A window in decoded form and as Arrow table, and the next one, which is being read.
        return window_rows * 3 + config.train.batch_size * num_batches
    # For each requested window, this rank's rows: one record batch in use, one waiting, and one being received.
    of_rank, batch_size = (-(-rows // num_ranks) for rows in (window_rows, config.train.batch_size))
    return (MAX_WINDOWS_AHEAD + 1) * min(3 * MAX_RECORD_BATCH_ROWS, of_rank) + batch_size * num_batches


def dense_part_bytes(config: RunConfig, model: nn.Module, num_ranks: int, per_host: int) -> int:
    """Return one rank's bytes of the dense part: a share if sharded, plus the largest module while it is gathered."""

    def of(module: nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())

    copies = DENSE_COPIES + (config.train.average_weights is not None)
    if config.dense.sharding == "replicated" or num_ranks == 1:
        return of(model) * copies
    cut = [of(module) for _, module in sharded_modules(model, model.get_submodule("embeddings"))]
    left = of(model) - sum(cut)
    return (left + sum(cut) // per_host) * copies + 2 * max(cut, default=0)


def available_bytes(device: torch.device, system: KernelFiles | None = None) -> int | None:
    """Return the free memory of this process's device, within its control groups, or `None` if the system does not
    report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    system = system or KernelFiles()
    return free_memory_bytes(system, read_cgroup_limits(system))


def check_memory(memory: RunMemory, outline: nn.Module, world: World, plan: Plan) -> None:
    """Raise MesetaError, on all ranks, if the ranks of a host need more memory than is free. Collective.

    On GPUs, each rank is checked against its own device, without its demand of host memory.
    """
    free, host = available_bytes(world.device), socket.gethostname()
    hosts = world.all_gather_object((host, free))
    if world.device.type == "cuda":
        here, free_bytes = [world.rank], free
    else:
        here = [rank for rank, (name, _) in enumerate(hosts) if name == host]
        free_bytes = min((left for name, left in hosts if name == host and left is not None), default=None)

    def held(
        tables: Mapping[str, TableSpec] | None = None, run: RunBytes = memory.run
    ) -> tuple[list[MemoryDemand], list[MemoryDemand]]:
        needs = replace(memory, run=run).demand_by_phase(plan, tables)
        if world.device.type == "cuda":
            needs = {phase: [need.device_demand for need in of_ranks] for phase, of_ranks in needs.items()}
        of_here = {phase: [of_ranks[rank] for rank in here] for phase, of_ranks in needs.items()}
        checkpoint = of_here.pop("checkpoint")
        peak = max(of_here.values(), key=lambda demands: sum(need.total for need in demands))
        return peak, checkpoint

    problem = None
    for phase, (together, while_so) in enumerate(zip(held(), ("", " while it saves"), strict=True)):
        total = sum(need.total for need in together)
        if free_bytes is not None and total > free_bytes:
            tables = {table.name: table for table in memory.workload.tables}
            largest = max(tables.values(), key=lambda table: table.num_embeddings * table.embedding_dim)
            smaller = {
                change: format_bytes(sum(need.total for need in held(changed)[phase]))
                for change, changed in _smaller_tables(tables).items()
            }
            plain = held(run=replace(memory.run, baseline_bytes=0))[phase]
            smaller["report.baseline=null"] = format_bytes(sum(need.total for need in plain))
            ways = [f"{change} needs {size}" for change, size in smaller.items() if size != format_bytes(total)]
            problem = MesetaError(
                f"this run needs {format_bytes(total)} of memory on {host!r}{while_so}, but {format_bytes(free_bytes)} "
                f"are free "
                f"({len(together)} ranks there; rank {world.rank} holds: {together[here.index(world.rank)]}; the "
                f"largest table is {largest.name!r}, {largest.num_embeddings:,} x {largest.embedding_dim}"
                f"{_largest_parameter(outline)}). {'; '.join([*ways, 'or ' * bool(ways) + _REMEDIES])}"
            )
            break
    world.raise_on_all_ranks(problem)


_REMEDIES = (
    "prepare the data with fewer --hash-rows, lower model.embedding_dim, the widths of the model's layers, "
    "train.batch_size or train.eval_batch_size, use more hosts, or set check_memory=false to skip this check"
)


def _largest_parameter(outline: nn.Module) -> str:
    """Return a clause with the largest dense parameter, or an empty string if there is none."""
    largest = max(outline.named_parameters(), key=lambda named: named[1].numel(), default=None)
    if largest is None:
        return ""
    name, parameter = largest
    return f", the largest dense parameter {name!r}, {' x '.join(f'{size:,}' for size in parameter.shape)}"


def _smaller_tables(tables: Mapping[str, TableSpec]) -> dict[str, dict[str, TableSpec]]:
    # Settings that need less memory, with the tables that result.
    if any(table.average is not None for table in tables.values()):  # Rows of 16 bits have no average.
        smaller = {"train.average_weights=null": {n: replace(table, average=None) for n, table in tables.items()}}
    else:
        smaller = {
            "embedding.dtype=bfloat16": {
                name: replace(table, dtype="bfloat16") if table.dtype == "float32" else table
                for name, table in tables.items()
            }
        }
    return smaller | {
        "embedding.optimizer.name=rowwise_adagrad": {
            name: replace(table, optimizer=OptimizerSpec(name="rowwise_adagrad")) for name, table in tables.items()
        },
    }
