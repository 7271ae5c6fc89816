"""The plan of a run: given in its config, or made for the machines that it runs on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.measure.doctor.system import System, read_limits, total_memory_bytes
from meseta.measure.topology import gpu_kind
from meseta.planner import Prediction, find_plan, predict
from meseta.spec import CostModel, DeviceKind, MesetaError, Plan, Topology
from meseta.spec.constraints import Constraints
from meseta.telemetry.summary import Predicted
from meseta.train.workload import make_workload


def plan_run(
    config: RunConfig, dataset: Dataset, collection: EmbeddingBagCollection, model: nn.Module, world: World
) -> Plan:
    """The plan of the config, checked against the tables and the ranks; the same on every rank. Collective.

    'auto' searches one for this run's ranks and hosts, the statistics of the dataset, and the operations of `model`.
    A checkpoint loads under any plan, so a run that goes on on other machines plans anew.
    Raises MesetaError for a plan, topology, cost model or constraints that do not fit, and where nothing fits, with
    what would.
    """
    if isinstance(config.plan, dict):
        return Plan.from_dict(config.plan, collection.tables, world.size)
    if config.plan != "auto":
        return Plan.load(config.plan, collection.tables, world.size)
    if world.size == 1:
        return collection.plan
    # Rows can be trained in the memory of devices alone, so nothing is placed anywhere else.
    topology = replace(run_topology(config, world), host_bytes=None, disk_bytes=None)

    def search() -> Plan:
        given = config.planner.constraints
        return find_plan(
            make_workload(config, dataset, collection.tables, collection.features, model),
            topology,
            _cost_model(config),
            None if given is None else Constraints.load(given),
        ).plan

    return world.from_first(search)


def predict_run(config: RunConfig, dataset: Dataset, model: Any, world: World) -> Predicted:
    """Seconds that the plan of a sharded model is predicted to take. Collective; raises MesetaError as `plan_run`
    does."""
    embeddings = model.embeddings
    topology, plan = run_topology(config, world), embeddings.plan
    if plan.devices_per_host is None:
        plan = replace(plan, devices_per_host=topology.devices_per_host)
    elif plan.devices_per_host != topology.devices_per_host:  # written by hand, as if these were other hosts
        topology = replace(topology, num_hosts=world.size // plan.per_host, devices_per_host=plan.per_host)

    def think() -> Prediction:
        workload = make_workload(config, dataset, embeddings.tables, embeddings.features, model)
        return predict(plan, workload, topology, _cost_model(config))

    found = world.from_first(think)
    path = config.planner.cost_model
    return Predicted(
        step_s=found.step_s,
        seconds={name: values.tolist() for name, values in found.seconds.items()},
        constants=f"documented for {topology.device}" if path is None else f"of {path}",
    )


def _cost_model(config: RunConfig) -> CostModel | None:
    path = config.planner.cost_model
    return None if path is None else CostModel.load(path)


def run_topology(config: RunConfig, world: World) -> Topology:
    """The machines of this run: those of `planner.topology`, else these hosts, with the memory that they have in all;
    of a GPU without documented constants, those of an A100 stand. Collective.

    What is free at the moment is left out of account, so that the same machines always get the same plan. Raises
    MesetaError where the file is of other machines.
    """
    if config.planner.topology is None:
        least = min(world.gather_objects(_memory_bytes(world) or 0))
        kind: DeviceKind = "cpu"
        if world.device.type == "cuda":
            kind = gpu_kind(torch.cuda.get_device_name(world.device)) or "a100"
        return Topology(
            num_hosts=world.size // world.ranks_per_host,
            devices_per_host=world.ranks_per_host,
            device=kind,
            hbm_bytes=least or None,
        )
    topology = Topology.load(config.planner.topology)
    if (topology.num_ranks, topology.devices_per_host) != (world.size, world.ranks_per_host):
        raise MesetaError(
            f"topology file {str(config.planner.topology)!r}: it has {topology.num_hosts} hosts with "
            f"{topology.devices_per_host} devices each, but this run has {world.size} ranks, {world.ranks_per_host} on "
            "a host; correct the file, or leave planner.topology out to plan for the machines at hand"
        )
    return topology


def _memory_bytes(world: World) -> int | None:
    """Of this rank's device, or its share of the host's; None where the system does not tell."""
    if world.device.type == "cuda":
        return int(torch.cuda.get_device_properties(world.device).total_memory)
    system = System()
    total = total_memory_bytes(system, read_limits(system))
    return None if total is None else total // world.ranks_per_host
