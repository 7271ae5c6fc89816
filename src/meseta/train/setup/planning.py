"""Plan of a run, which is loaded from its config or searched for its machines."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.errors import error_summary
from meseta.measure.topology import gpu_kind
from meseta.pipeline.overlap import OverlapChoice, predict_overlap
from meseta.planner import PlanResult, documented_cost_model, find_plan, predict
from meseta.planner.cost.memory import RunBytes
from meseta.planner.planning import choose_exchange_algorithms
from meseta.planner.search.cache_allocation import allocate_cache_rows
from meseta.spec import CostModel, DeviceKind, MesetaError, Plan, Topology, Workload
from meseta.spec.constraints import Constraints
from meseta.spec.tiers import HOST, StorageOptions, Tier
from meseta.spec.transfer import step_transfers
from meseta.system.kernel import KernelFiles, read_cgroup_limits, total_memory_bytes
from meseta.system.ranks import print_note
from meseta.telemetry.summary import PredictedStep
from meseta.train.setup.memory import RunMemory, available_bytes, check_memory, dense_part_bytes, run_bytes
from meseta.train.setup.meta_model import dense_only_flops, make_meta_model
from meseta.train.setup.source import make_row_source
from meseta.train.setup.specs import make_specs, make_workload


class RunPlanner:
    """Predicts the load and memory of one run, and plans its tables."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, collection: EmbeddingBagCollection, outline: nn.Module, world: World
    ) -> None:
        """Create a planner. `outline` is the model on the meta device."""
        self.config, self.dataset, self.collection, self.meta_model = config, dataset, collection, outline
        self._world = world

    @cached_property
    def workload(self) -> Workload:
        """Load of one training step."""
        return with_overlap(self._workload_without_overlap, self.overlap, self.meta_model, len(self.dataset.dense))

    @cached_property
    def overlap(self) -> OverlapChoice:
        """Communication that is hidden by computation. Raises MesetaError, on all ranks, if the configured overlap is
        impossible."""
        world = self._world
        return predict_run_overlap(
            self.config,
            self._workload_without_overlap,
            self.meta_model,
            world.size,
            is_one_cpu_host=world.is_one_cpu_host,
        )

    @cached_property
    def _workload_without_overlap(self) -> Workload:
        return make_workload(
            self.config, self.dataset, self.collection.tables, self.collection.features, self.meta_model
        )

    @cached_property
    def run_bytes(self) -> RunBytes:
        """Memory demand that does not depend on the plan."""
        world = self._world
        sizes = world.size, world.ranks_per_host
        return run_bytes(self.config, self.dataset, self.meta_model, *sizes, on_cpu=world.device.type == "cpu")

    def memory(self, plan: Plan) -> RunMemory:
        """Return the memory demand of the run on the hosts of `plan`."""
        dense_bytes = dense_part_bytes(self.config, self.meta_model, plan.num_ranks, plan.ranks_per_host)
        run = replace(self.run_bytes, dense_bytes=dense_bytes)
        return RunMemory(workload=self.workload, run=run)

    def check_memory(self, plan: Plan) -> None:
        """Raise MesetaError, on all ranks, if the run needs more memory than there is under `plan`. Collective."""
        plan = replace(plan, devices_per_host=plan.devices_per_host or self._world.ranks_per_host)
        check_memory(self.memory(plan), self.meta_model, self._world, plan)

    @cached_property
    def topology(self) -> Topology:
        """Machines of the run. Collective."""
        return run_topology(self.config, self._world)

    @cached_property
    def cost_model(self) -> CostModel | None:
        """Cost model of the config, or `None` to use the documented one for the kind of device."""
        path = self.config.planner.cost_model
        return None if path is None else CostModel.load(path)

    def plan(self) -> Plan:
        """Return the plan of the config, checked against tables and ranks. It is identical on all ranks. Collective.

        'auto' searches a plan for the ranks and hosts of this run, the statistics of the dataset, and the operations of
        the model. Tables that do not fit into memory are placed on the disk of `storage.dir`, if it is set. The
        exchange algorithms are those of `comm` in the config, else of the plan, else the ones with the lowest predicted
        time.
        Raises MesetaError if a plan, topology, cost model or constraints file is invalid, or no plan fits into memory.
        """
        configured_plan, tables = self.config.plan, self.collection.tables
        if isinstance(configured_plan, dict):
            return self._with_cache_rows(
                self._with_exchange_algorithms(Plan.from_dict(configured_plan, tables, self._world.size))
            )
        if configured_plan != "auto":
            return self._with_cache_rows(
                self._with_exchange_algorithms(Plan.load(configured_plan, tables, self._world.size))
            )
        # A run may resume on other machines with a new plan, because a checkpoint loads under any plan.
        storage = self.config.storage.options
        if self._world.size == 1 and storage.dir is None:
            return self.collection.plan
        (topology, without), path = available_placement(self.topology, storage), self.config.planner.constraints

        def search() -> Plan:
            constraints = None if path is None else Constraints.load(path)
            planned = find_plan(self.workload, topology, self.cost_model, constraints, self.run_bytes, without).plan
            return planned if self._world.size > 1 or planned.has_offloaded_tables else self.collection.plan

        return self._world.broadcast_from_rank_0(search)

    def _with_cache_rows(self, plan: Plan) -> Plan:
        """Return an existing plan with cache rows for the shards that have none. Collective.

        The rows fill `storage.cache_bytes` if it is set. See `meseta.planner.search.cache_allocation`.
        """
        if not plan.has_offloaded_tables:
            return plan
        _, topology = self._with_topology(plan)
        cost_model = self.cost_model or documented_cost_model(topology.device)
        return self._world.broadcast_from_rank_0(
            lambda: allocate_cache_rows(plan, self.workload, topology, cost_model, self.run_bytes)
        )

    def _with_exchange_algorithms(self, plan: Plan) -> Plan:
        """Return an existing plan with exchange algorithms for this run. Collective."""
        per_host = plan.devices_per_host or self._world.ranks_per_host
        if not 1 < per_host < self._world.size:
            return plan
        plan, topology = self._with_topology(plan)
        return self._world.broadcast_from_rank_0(
            lambda: choose_exchange_algorithms(plan, self.workload, topology, self.cost_model)
        )

    def _with_topology(self, plan: Plan) -> tuple[Plan, Topology]:
        """Return (plan, topology) with equal ranks per host. If they differ, the topology changes. Collective."""
        topology = self.topology
        if plan.devices_per_host is None:
            plan = replace(plan, devices_per_host=topology.devices_per_host)
        elif plan.devices_per_host != topology.devices_per_host:
            topology = replace(
                topology, num_hosts=plan.num_ranks // plan.ranks_per_host, devices_per_host=plan.ranks_per_host
            )
        return plan, topology

    def predict(self, plan: Plan) -> PredictedStep:
        """Predict the time of a step under `plan`. Collective. Raises MesetaError under the conditions of `plan`."""
        plan, topology = self._with_topology(plan)
        path = self.config.planner.cost_model
        prediction = self._world.broadcast_from_rank_0(
            lambda: predict(plan, self.workload, topology, self.cost_model, run=self.run_bytes)
        )
        return PredictedStep(
            step_s=prediction.step_s,
            seconds={name: values.tolist() for name, values in prediction.seconds.items()},
            constants=f"documented for {topology.device}" if path is None else f"of {path}",
            transfers_by_rank=prediction.transfers_by_rank,
            overlap=list(self.workload.overlap),
            misses=dict(prediction.cache_misses),
        )


def find_run_plan(
    config: RunConfig, topology: Topology, cost_model: CostModel | None, constraints: Constraints | None
) -> PlanResult:
    """Return the plan that a run of this config would make on the machines of `topology`.

    If a custom model cannot be built here, its dense part is omitted, with a note on the terminal.
    Raises MesetaError if the config does not fit its data, or no plan can be found.
    """
    dataset = make_row_source(config.data).dataset().select(config.data.labels, config.data.without)
    tables, features = make_specs(config, dataset)
    collection = EmbeddingBagCollection(tables, features, seed=config.seed)
    outline = None
    try:
        outline = make_meta_model(config, dataset, collection)
    except Exception as error:
        if ":" not in config.model.name:
            raise
        print_note(
            f"the plan ignores the dense part, because model {config.model.name!r} cannot be built here: "
            f"{error_summary(error)}"
        )
    workload = make_workload(config, dataset, tables, features, outline)
    run = None
    if outline is not None:
        copies = topology.is_one_cpu_host
        overlap = predict_run_overlap(config, workload, outline, topology.num_ranks, is_one_cpu_host=copies)
        workload = with_overlap(workload, overlap, outline, len(dataset.dense))
        sizes = topology.num_ranks, topology.devices_per_host
        run = run_bytes(config, dataset, outline, *sizes, on_cpu=topology.device == "cpu")
    topology, without = available_placement(topology, config.storage.options)
    planned = find_plan(workload, topology, cost_model, constraints, run, without)
    return (
        planned
        if topology.num_ranks > 1 or planned.plan.has_offloaded_tables
        else replace(planned, plan=collection.plan)
    )


def predict_run_overlap(
    config: RunConfig, workload: Workload, outline: nn.Module, num_ranks: int, *, is_one_cpu_host: bool
) -> OverlapChoice:
    """Predict the communication that a run on `num_ranks` ranks hides. `workload` has no overlap yet."""
    names = [transfer.name for transfer in step_transfers(workload, None, num_ranks, num_ranks)]
    asked, num_parts = config.pipeline.overlap, config.train.accumulate_steps
    return predict_overlap(
        asked, outline, num_ranks, num_parts, has_dense_gradients="dense" in names, is_one_cpu_host=is_one_cpu_host
    )


def with_overlap(workload: Workload, overlap: OverlapChoice, outline: nn.Module, num_dense: int) -> Workload:
    """Return the workload with the hidden communication of `overlap`, and with the operations that need dense inputs
    only."""
    of_dense = dense_only_flops(outline, workload.batch_size, num_dense) / workload.batch_size
    dense = replace(workload.dense, before_flops_per_sample=of_dense)
    return replace(workload, dense=dense, overlap=overlap.hidden)


def available_placement(topology: Topology, storage: StorageOptions) -> tuple[Topology, tuple[Tier, ...]]:
    """Return (topology with the memories for rows, tiers that cannot be trained).

    A disk is available if `storage.dir` is set and ranks compute on CPUs. GPUs need a cache in their own memory.
    """
    if topology.device == "cpu":
        return replace(topology, host_bytes=None, disk_bytes=topology.disk_bytes if storage.dir else None), ()
    return replace(topology, disk_bytes=None), (HOST,)


def run_topology(config: RunConfig, world: World) -> Topology:
    """Return the machines of this run: those of `planner.topology`, else its hosts with their total memory. Collective.

    A GPU without documented constants is treated as an A100. Raises MesetaError if the file does not match the ranks.
    """
    if config.planner.topology is None:
        # Use the total memory and not the free memory, so that the same machines always get the same plan. With
        # storage.dir, tables that do not fit into free memory are placed on disk.
        least, disk_bytes = min(world.all_gather_object(_total_memory_bytes(world) or 0)), None
        if config.storage.dir is not None and world.device.type == "cpu":
            free = available_bytes(world.device)
            free = least if free is None else free // world.ranks_per_host
            free_bytes = world.all_gather_object((free, _free_disk_bytes(config.storage.dir)))
            least, disk_bytes = min(least, *(room for room, _ in free_bytes)), min(room for _, room in free_bytes)
        kind: DeviceKind = "cpu"
        if world.device.type == "cuda":
            kind = gpu_kind(torch.cuda.get_device_name(world.device)) or "a100"
        return Topology(
            num_hosts=world.size // world.ranks_per_host,
            devices_per_host=world.ranks_per_host,
            device=kind,
            hbm_bytes=least or None,
            disk_bytes=disk_bytes,
        )
    topology = Topology.load(config.planner.topology)
    if (topology.num_ranks, topology.devices_per_host) != (world.size, world.ranks_per_host):
        raise MesetaError(
            f"topology file {str(config.planner.topology)!r} has {topology.num_hosts} hosts with "
            f"{topology.devices_per_host} devices each, but this run has {world.size} ranks, {world.ranks_per_host} "
            "per host; correct the file, or remove planner.topology to plan for the current machines"
        )
    return topology


def _free_disk_bytes(folder: Path) -> int:
    folder = folder.absolute()
    while not folder.exists():  # The folder may be created later.
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _total_memory_bytes(world: World) -> int | None:
    """Return the memory of this rank's device, or its share of host memory. `None` if the system does not report it."""
    if world.device.type == "cuda":
        return int(torch.cuda.get_device_properties(world.device).total_memory)
    system = KernelFiles()
    total = total_memory_bytes(system, read_cgroup_limits(system))
    return None if total is None else total // world.ranks_per_host
