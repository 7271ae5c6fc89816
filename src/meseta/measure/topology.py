"""Hosts, devices and memories of this machine, or of the ranks that torchrun started."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from meseta.machine.environment_variables import environ
from meseta.machine.kernel import KernelFiles, read_cgroup_limits, total_memory_bytes
from meseta.machine.processors import num_cores
from meseta.planner import documented_cost_model
from meseta.spec import CostModel, DeviceKind, Link, MesetaError, Topology

RESERVED_MEMORY_SHARE = 0.1
"""Share of a host's memory that is left to the system, to torch and to reading."""


@dataclass(frozen=True)
class GpuInfo:
    """What torch says of the GPUs of this host."""

    name: str
    count: int
    memory_bytes: int


@dataclass(frozen=True)
class DetectedTopology:
    """A topology, and where its numbers come from."""

    topology: Topology
    notes: tuple[str, ...]
    """A line for each kind of number."""


def detect_topology(
    *,
    num_devices: int | None = None,
    device: DeviceKind | None = None,
    folder: Path = Path(),
    cost_model: CostModel | None = None,
    gpus: GpuInfo | None = None,
    system: KernelFiles | None = None,
    environment: Mapping[str, str] = environ,
) -> DetectedTopology:
    """Look at this machine; a run under torchrun tells how many hosts and devices there are, which are taken as equal.

    Args:
        num_devices: ranks of a host; None: what torchrun says, else all GPUs, else one for each core.
        device: kind of the devices; None: by the name of the GPUs, 'cpu' where there are none.
        folder: on the disk that tables may fill.
        cost_model: of `meseta calibrate`; its links are written down where they were measured. Without it the topology
            names none, and those documented for the kind of device hold.
        gpus: of this host, if any.
        system: files of the kernel.
        environment: variables of torchrun, if any.

    Raises MesetaError for an unknown kind of GPU, and where the system does not tell its memory.
    """
    system = system or KernelFiles()
    kind = device or _device_kind(gpus)
    world, local = (int(environment.get(name, "0")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    per_host = num_devices or local or (gpus.count if gpus and kind != "cpu" else num_cores())
    hosts = max(world // local, 1) if world and local else 1
    limits = read_cgroup_limits(system)
    total = total_memory_bytes(system, limits)
    if total is None:
        raise MesetaError("topology detect: the system does not tell its memory; write the topology by hand")
    usable = int(total * (1.0 - RESERVED_MEMORY_SHARE))
    on_gpu = gpus is not None and kind != "cpu"
    links, about_links = _links(cost_model, kind, hosts)
    topology = Topology(
        num_hosts=hosts,
        devices_per_host=per_host,
        device=kind,
        hbm_bytes=gpus.memory_bytes if gpus and on_gpu else usable // per_host,
        host_bytes=usable if on_gpu else None,
        disk_bytes=shutil.disk_usage(folder).free,
        inside=links[0],
        across=links[1],
    )
    memory = (
        "of the GPU" if on_gpu else f"{1 - RESERVED_MEMORY_SHARE:.0%} of this host's DRAM, shared by {per_host} ranks"
    )
    notes = (
        f"{hosts} x {per_host} devices: " + ("as torchrun started them" if world and local else "of this machine"),
        f"hbm_bytes: {memory}" + (", as its control group limits it" if limits.memory_bytes else ""),
        f"disk_bytes: free on the disk of {str(folder.resolve())!r}",
        about_links,
    )
    return DetectedTopology(topology, notes)


def find_gpus() -> GpuInfo | None:
    """Those that torch sees; None where there are none."""
    import torch

    if not torch.cuda.is_available():
        return None
    own = torch.cuda.get_device_properties(0)
    return GpuInfo(name=own.name, count=torch.cuda.device_count(), memory_bytes=own.total_memory)


def gpu_kind(name: str) -> DeviceKind | None:
    """The kind that a GPU's own name tells; None for one without documented constants."""
    kinds: tuple[DeviceKind, ...] = get_args(DeviceKind)
    return next((kind for kind in kinds if kind in name.lower()), None)


def _device_kind(gpus: GpuInfo | None) -> DeviceKind:
    if gpus is None:
        return "cpu"
    kind = gpu_kind(gpus.name)
    if kind is not None:
        return kind
    known = ", ".join(kind for kind in get_args(DeviceKind) if kind != "cpu")
    raise MesetaError(
        f"topology detect: there are no documented constants for GPU {gpus.name!r}; name the kind that comes nearest "
        f"with --device ({known}), or --device cpu"
    )


def _links(cost_model: CostModel | None, kind: DeviceKind, hosts: int) -> tuple[tuple[Link | None, Link | None], str]:
    if cost_model is not None and cost_model.exchange.measured:
        own = cost_model.exchange
        return (own.inside_all_to_all, None), f"inside: {own.source}"
    documented = documented_cost_model(kind).exchange
    inside, across = documented.inside_all_to_all, documented.across_all_to_all
    text = f"links: as documented for {kind}, {inside.bytes_per_s / 1e9:.3g} GB/s inside a host"
    if hosts > 1:
        text += f", {across.bytes_per_s / 1e9:.3g} GB/s across hosts"
    return (None, None), f"{text}; `meseta calibrate` measures them"
