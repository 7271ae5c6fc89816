"""The plan of a run: given in its config, or made for the machines that it runs on."""

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
from meseta.machine.kernel import KernelFiles, read_cgroup_limits, total_memory_bytes
from meseta.machine.ranks import print_note
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
from meseta.telemetry.summary import PredictedStep
from meseta.train.setup.memory import RunMemory, available_bytes, check_memory, dense_part_bytes, run_bytes
from meseta.train.setup.meta_model import dense_only_flops, make_meta_model
from meseta.train.setup.source import make_row_source
from meseta.train.setup.specs import make_specs
from meseta.train.setup.workload import make_workload


class RunPlanner:
    """Plans one run: what it asks of the machines, of its data and the shapes of its model, and where its tables go."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, collection: EmbeddingBagCollection, outline: nn.Module, world: World
    ) -> None:
        """`outline` has the shapes of the model, as meseta.train.setup.meta_model makes it."""
        self.config, self.dataset, self.collection, self.meta_model = config, dataset, collection, outline
        self._world = world

    @cached_property
    def workload(self) -> Workload:
        """Of its steps."""
        return with_overlap(self._workload_without_overlap, self.overlap, self.meta_model, len(self.dataset.dense))

    @cached_property
    def overlap(self) -> OverlapChoice:
        """What travels while it computes. Raises MesetaError, on all ranks, for an overlap that cannot be."""
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
        """With nothing hidden."""
        return make_workload(
            self.config, self.dataset, self.collection.tables, self.collection.features, self.meta_model
        )

    @cached_property
    def run_bytes(self) -> RunBytes:
        """What it adds to the memory of its plan."""
        world = self._world
        sizes = world.size, world.ranks_per_host
        return run_bytes(self.config, self.dataset, self.meta_model, *sizes, on_cpu=world.device.type == "cpu")

    def memory(self, plan: Plan) -> RunMemory:
        """What its ranks hold under any plan for the hosts of `plan`."""
        dense_bytes = dense_part_bytes(self.config, self.meta_model, plan.num_ranks, plan.ranks_per_host)
        run = replace(self.run_bytes, dense_bytes=dense_bytes)
        return RunMemory(workload=self.workload, run=run)

    def check_memory(self, plan: Plan) -> None:
        """Raise MesetaError, on all ranks, where they need more than there is under `plan`. Collective."""
        plan = replace(plan, devices_per_host=plan.devices_per_host or self._world.ranks_per_host)
        check_memory(self.memory(plan), self.meta_model, self._world, plan)

    @cached_property
    def topology(self) -> Topology:
        """Its machines, see `run_topology`. Collective."""
        return run_topology(self.config, self._world)

    @cached_property
    def cost_model(self) -> CostModel | None:
        """None: as documented for the kind of its devices."""
        path = self.config.planner.cost_model
        return None if path is None else CostModel.load(path)

    def plan(self) -> Plan:
        """The plan of the config, checked against the tables and the ranks; the same on every rank. Collective.

        'auto' searches one for this run's ranks and hosts, the statistics of the dataset, and the operations of the
        model; tables that have no room in memory lie on the disk of `storage.dir`, where one is named. A checkpoint
        loads under any plan, so a run that goes on on other machines plans anew. Which way rows and sums take between
        hosts is what `comm` of the config names, else what the plan says, else what is predicted to take less.
        Raises MesetaError for a plan, topology, cost model or constraints that do not fit, and where nothing fits, with
        what would.
        """
        given, tables = self.config.plan, self.collection.tables
        if isinstance(given, dict):
            return self._with_cache_rows(
                self._with_exchange_algorithms(Plan.from_dict(given, tables, self._world.size))
            )
        if given != "auto":
            return self._with_cache_rows(self._with_exchange_algorithms(Plan.load(given, tables, self._world.size)))
        storage = self.config.storage.options
        if self._world.size == 1 and storage.dir is None:
            return self.collection.plan
        (topology, without), path = available_placement(self.topology, storage), self.config.planner.constraints

        def search() -> Plan:
            constraints = None if path is None else Constraints.load(path)
            found = find_plan(self.workload, topology, self.cost_model, constraints, self.run_bytes, without).plan
            return found if self._world.size > 1 or found.has_offloaded_tables else self.collection.plan

        return self._world.broadcast_from_rank_0(search)

    def _with_cache_rows(self, plan: Plan) -> Plan:
        """A plan that was made before, with near rows where it says nothing of them and they can be told. Collective.

        What is shared out is `storage.cache_bytes`, else what is advised, see `meseta.planner.search.cache_allocation`.
        """
        if not plan.has_offloaded_tables:
            return plan
        _, topology = self._with_topology(plan)
        cost_model = self.cost_model or documented_cost_model(topology.device)
        return self._world.broadcast_from_rank_0(
            lambda: allocate_cache_rows(plan, self.workload, topology, cost_model, self.run_bytes)
        )

    def _with_exchange_algorithms(self, plan: Plan) -> Plan:
        """A plan that was made before, with the ways between hosts of this run. Collective."""
        per_host = plan.devices_per_host or self._world.ranks_per_host
        if not 1 < per_host < self._world.size:
            return plan
        plan, topology = self._with_topology(plan)
        return self._world.broadcast_from_rank_0(
            lambda: choose_exchange_algorithms(plan, self.workload, topology, self.cost_model)
        )

    def _with_topology(self, plan: Plan) -> tuple[Plan, Topology]:
        """A plan and its machines; one that is written by hand, as if these were other hosts. Collective."""
        topology = self.topology
        if plan.devices_per_host is None:
            plan = replace(plan, devices_per_host=topology.devices_per_host)
        elif plan.devices_per_host != topology.devices_per_host:
            topology = replace(
                topology, num_hosts=plan.num_ranks // plan.ranks_per_host, devices_per_host=plan.ranks_per_host
            )
        return plan, topology

    def predict(self, plan: Plan) -> PredictedStep:
        """Seconds that a step under `plan` is predicted to take. Collective; raises MesetaError as `plan` does."""
        plan, topology = self._with_topology(plan)
        path = self.config.planner.cost_model
        found = self._world.broadcast_from_rank_0(
            lambda: predict(plan, self.workload, topology, self.cost_model, run=self.run_bytes)
        )
        return PredictedStep(
            step_s=found.step_s,
            seconds={name: values.tolist() for name, values in found.seconds.items()},
            constants=f"documented for {topology.device}" if path is None else f"of {path}",
            transfers_by_rank=found.transfers_by_rank,
            overlap=list(self.workload.overlap),
            misses=dict(found.cache_misses),
        )


def find_run_plan(
    config: RunConfig, topology: Topology, cost_model: CostModel | None, constraints: Constraints | None
) -> PlanResult:
    """The plan that the run of a config makes on these machines, before there is any run: `RunPlanner.plan`.

    Where a model of the user's own cannot be built here, its dense part is left out, which is said on the terminal.
    Raises MesetaError where the config does not fit its data, and as `find_plan` does.
    """
    check_clip(config, topology.num_ranks)
    dataset = make_row_source(config.data).dataset().with_labels(config.data.labels)
    tables, features = make_specs(config, dataset)
    collection = EmbeddingBagCollection(tables, features, seed=config.seed)
    outline = None
    try:
        outline = make_meta_model(config, dataset, collection)
    except Exception as error:
        if ":" not in config.model.name:
            raise
        print_note(
            f"the dense part is left out, since model {config.model.name!r} cannot be built here: "
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


def check_clip(config: RunConfig, num_ranks: int) -> None:
    """Raise MesetaError where a run on so many ranks is to clip gradients by a norm that none of them knows."""
    if config.train.clip_norm is not None and num_ranks > 1:
        raise MesetaError(
            f"config: train.clip_norm is one norm over layers and tables, which one process knows, but this run has "
            f"{num_ranks} ranks; run it with --nproc 1, or set dense.clip_norm and embedding.optimizer.clip_norm"
        )


def predict_run_overlap(
    config: RunConfig, workload: Workload, outline: nn.Module, num_ranks: int, *, is_one_cpu_host: bool
) -> OverlapChoice:
    """What a run on so many ranks hides, of its workload with nothing hidden; see `predict_overlap`."""
    names = [transfer.name for transfer in step_transfers(workload, None, num_ranks, num_ranks)]
    asked, num_parts = config.pipeline.overlap, config.train.accumulate_steps
    return predict_overlap(
        asked, outline, num_ranks, num_parts, has_dense_gradients="dense" in names, is_one_cpu_host=is_one_cpu_host
    )


def with_overlap(workload: Workload, overlap: OverlapChoice, outline: nn.Module, num_dense: int) -> Workload:
    """The workload of a run that hides so much, and of what its model computes from dense inputs alone."""
    of_dense = dense_only_flops(outline, workload.batch_size, num_dense) / workload.batch_size
    dense = replace(workload.dense, before_flops_per_sample=of_dense)
    return replace(workload, dense=dense, overlap=overlap.hidden)


def available_placement(topology: Topology, storage: StorageOptions) -> tuple[Topology, tuple[Tier, ...]]:
    """(machines with what a run may place rows in, tiers that it cannot train from): a disk where a folder on it is
    named and ranks compute on CPUs; on GPUs rows lie near at least in part."""
    if topology.device == "cpu":
        return replace(topology, host_bytes=None, disk_bytes=topology.disk_bytes if storage.dir else None), ()
    return replace(topology, disk_bytes=None), (HOST,)


def run_topology(config: RunConfig, world: World) -> Topology:
    """The machines of this run: those of `planner.topology`, else these hosts, with the memory that they have in all;
    of a GPU without documented constants, those of an A100 stand. Collective.

    What is free at the moment is left out of account, so that the same machines always get the same plan; but where
    `storage.dir` names a disk, tables lie there that what is free has no room for. Raises MesetaError where the file is
    of other machines.
    """
    if config.planner.topology is None:
        least, disk_bytes = min(world.all_gather_object(_total_memory_bytes(world) or 0)), None
        if config.storage.dir is not None and world.device.type == "cpu":
            free = available_bytes(world.device)
            free = least if free is None else free // world.ranks_per_host
            found = world.all_gather_object((free, _free_disk_bytes(config.storage.dir)))
            least, disk_bytes = min(least, *(room for room, _ in found)), min(room for _, room in found)
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
            f"topology file {str(config.planner.topology)!r}: it has {topology.num_hosts} hosts with "
            f"{topology.devices_per_host} devices each, but this run has {world.size} ranks, {world.ranks_per_host} on "
            "a host; correct the file, or leave planner.topology out to plan for the machines at hand"
        )
    return topology


def _free_disk_bytes(folder: Path) -> int:
    """Free on the disk of a folder that is perhaps still to be made."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _total_memory_bytes(world: World) -> int | None:
    """Of this rank's device, or its share of the host's; None where the system does not tell."""
    if world.device.type == "cuda":
        return int(torch.cuda.get_device_properties(world.device).total_memory)
    system = KernelFiles()
    total = total_memory_bytes(system, read_cgroup_limits(system))
    return None if total is None else total // world.ranks_per_host
