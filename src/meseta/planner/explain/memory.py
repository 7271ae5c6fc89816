"""Device memory of a topology, and the fullest ranks of a plan."""

from __future__ import annotations

from dataclasses import replace

from meseta.planner.cost.documented import documented_memory_bytes
from meseta.planner.search.plan_result import PlanResult
from meseta.spec import MesetaError, Topology
from meseta.spec.tiers import HBM
from meseta.telemetry.formatting import format_bytes


def with_device_memory(topology: Topology, where: str) -> tuple[Topology, str | None]:
    """Return the topology with `hbm_bytes`, and a note if the value is from the data sheet of the device.

    Raises MesetaError, naming `where`, if neither the topology nor a data sheet has the value.
    """
    if topology.hbm_bytes is not None:
        return topology, None
    num_bytes = documented_memory_bytes(topology.device)
    if num_bytes is None:
        raise MesetaError(
            f"{where}: hbm_bytes is missing, so no plan can be checked against the memory of its ranks; add the bytes "
            "of DRAM that each rank may fill, or let `meseta topology detect` write the file"
        )
    note = (
        f"Memory: {format_bytes(num_bytes)} for each {topology.device}, as in its data sheet, since {where} has no "
        "hbm_bytes"
    )
    return replace(topology, hbm_bytes=num_bytes), note


def describe_fullest_ranks(planned: PlanResult) -> str:
    """Return the peak memory of the fullest rank for each memory in use, as text."""
    prediction, topology = planned.prediction, planned.problem.topology
    parts = []
    for memory, rank in prediction.fullest_ranks().items():
        of_all = f" of {format_bytes(topology.hbm_bytes)}" if memory == HBM and topology.hbm_bytes else ""
        parts.append(f"{memory} {format_bytes(float(prediction.peak_bytes(memory)[rank]))}{of_all} on rank {rank}")
    return ", ".join(parts)
