"""Detection of the topology of this machine, or of a run that torchrun started."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from meseta.planner import documented_cost_model
from meseta.spec import CostModel, DeviceKind, Link, MesetaError, Topology
from meseta.system.environment_variables import environ
from meseta.system.kernel import KernelFiles, read_cgroup_limits, total_memory_bytes
from meseta.system.processors import num_cores

RESERVED_MEMORY_SHARE = 0.1
"""Share of host memory that is left to the system, to torch and to reading data."""


@dataclass(frozen=True)
class GpuInfo:
    """GPUs of this host as torch reports them. All are assumed to be like the first one."""

    name: str
    count: int
    memory_bytes: int


@dataclass(frozen=True)
class DetectedTopology:
    """Detected topology and the sources of its values."""

    topology: Topology
    notes: tuple[str, ...]
    """Source of each kind of value, one line each."""


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
    """Detect the topology of this machine. Under torchrun, all hosts are assumed to be like this one.

    Args:
        num_devices: Ranks per host. `None` means the number that torchrun sets, else one per GPU, else one per core.
        device: Kind of the devices. `None` means the kind of the GPUs, or `cpu` without GPUs.
        folder: Folder on the disk that may hold tables.
        cost_model: Cost model of `meseta calibrate`. If it has measured the exchange, its links are part of the
            topology. Otherwise the topology names no links, and planners use the documented ones.
        gpus: GPUs of this host, or `None` if there are none.
        system: Kernel files to read. `None` means those of this machine.
        environment: Environment variables, in which torchrun sets `WORLD_SIZE` and `LOCAL_WORLD_SIZE`.

    Raises MesetaError if the kind of GPU is unknown, or if the memory size cannot be read.
    """
    system = system or KernelFiles()
    kind = device or _device_kind(gpus)
    world, local = (int(environment.get(name, "0")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    per_host = num_devices or local or (gpus.count if gpus and kind != "cpu" else num_cores())
    hosts = max(world // local, 1) if world and local else 1
    limits = read_cgroup_limits(system)
    total = total_memory_bytes(system, limits)
    if total is None:
        raise MesetaError("topology detect: cannot read the memory size of this host; write the topology file by hand")
    # Ranks on CPUs share the memory of their host.
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
        f"{hosts} x {per_host} devices: " + ("as started by torchrun" if world and local else "of this machine"),
        f"hbm_bytes: {memory}" + (", as limited by its control group" if limits.memory_bytes else ""),
        f"disk_bytes: free space on the disk of {str(folder.resolve())!r}",
        about_links,
    )
    return DetectedTopology(topology, notes)


def find_gpus() -> GpuInfo | None:
    """Return the GPUs that torch sees, or `None` if there are none."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return GpuInfo(name=properties.name, count=torch.cuda.device_count(), memory_bytes=properties.total_memory)


def gpu_kind(name: str) -> DeviceKind | None:
    """Return the device kind that occurs in the name of a GPU, or `None` if no known kind does."""
    kinds: tuple[DeviceKind, ...] = get_args(DeviceKind)
    return next((kind for kind in kinds if kind in name.lower()), None)


def _device_kind(gpus: GpuInfo | None) -> DeviceKind:
    if gpus is None:
        return "cpu"
    kind = gpu_kind(gpus.name)
    if kind is not None:
        return kind
    kinds = ", ".join(kind for kind in get_args(DeviceKind) if kind != "cpu")
    raise MesetaError(
        f"topology detect: there are no documented constants for GPU {gpus.name!r}; set --device to the most similar "
        f"kind ({kinds}), or to cpu"
    )


def _links(cost_model: CostModel | None, kind: DeviceKind, hosts: int) -> tuple[tuple[Link | None, Link | None], str]:
    if cost_model is not None and cost_model.exchange.measured:
        exchange = cost_model.exchange
        return (exchange.inside_all_to_all, None), f"inside: {exchange.source}"
    documented = documented_cost_model(kind).exchange
    inside, across = documented.inside_all_to_all, documented.across_all_to_all
    text = f"links: documented values for {kind}, {inside.bytes_per_s / 1e9:.3g} GB/s inside a host"
    if hosts > 1:
        text += f", {across.bytes_per_s / 1e9:.3g} GB/s between hosts"
    return (None, None), f"{text}; `meseta calibrate` measures them"
