"""Topology: the hosts, devices and links for which a plan is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from meseta.errors import MesetaError, check_choice, check_number, is_int
from meseta.spec.documents import load_document, parse_dataclass, strip_format, write_yaml
from meseta.spec.shards import MAX_RANKS
from meseta.spec.tiers import CACHED, DISK, HBM, HOST, Tier

DeviceKind = Literal["cpu", "a100", "h100", "h200", "b200"]

_FORMAT = "meseta.topology/1"


@dataclass(frozen=True, kw_only=True)
class Link:
    """Bandwidth and latency of communication between devices, either inside a host or between hosts."""

    bytes_per_s: float
    """Bandwidth of one device per direction, while it sends and receives at the same time."""
    latency_s: float
    """Latency of one collective."""
    peer_s: float = 0.0
    """Additional latency of a collective for each peer that a rank reaches over this link."""

    def __post_init__(self) -> None:
        if check_number("link", "bytes_per_s", self.bytes_per_s) <= 0:
            raise MesetaError(f"link: bytes_per_s must be above 0, got {self.bytes_per_s}")
        for name in ("latency_s", "peer_s"):
            if check_number("link", name, getattr(self, name)) < 0:
                raise MesetaError(f"link: {name} must not be negative, got {getattr(self, name)}")

    def to_dict(self) -> dict[str, float]:
        """Convert to plain data. Omits `peer_s` if it is 0."""
        peers = {"peer_s": self.peer_s} if self.peer_s else {}
        return {"bytes_per_s": self.bytes_per_s, "latency_s": self.latency_s, **peers}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts with identical devices and one rank per device.

    Rank r is device r % devices_per_host of host r // devices_per_host.
    """

    num_hosts: int = 1
    devices_per_host: int = 1
    device: DeviceKind = "cpu"
    """Kind of device. Its documented constants are used if there are no measurements."""
    hbm_bytes: int | None = None
    """Memory of one device. For a CPU rank, its share of the host DRAM. `None` disables the memory check."""
    host_bytes: int | None = None
    """DRAM of one host that is available for tables, in addition to device memory. `None` or 0 means none. For CPU
    ranks, use `hbm_bytes` instead."""
    disk_bytes: int | None = None
    """Disk space of one host that is available for tables. `None` or 0 means none."""
    inside: Link | None = None
    """Link between the devices of a host. `None` selects the links of the cost model."""
    across: Link | None = None
    """Link between hosts. `None` selects the links of the cost model."""

    def __post_init__(self) -> None:
        check_choice("topology", "device", self.device, get_args(DeviceKind))
        for field in ("num_hosts", "devices_per_host"):
            value = getattr(self, field)
            if not is_int(value) or value < 1:
                raise MesetaError(f"topology: {field} must be a positive integer, got {value!r}")
        if self.num_ranks > MAX_RANKS:
            raise MesetaError(
                f"topology: num_hosts {self.num_hosts} times devices_per_host {self.devices_per_host} must be at most "
                f"{MAX_RANKS:,}"
            )
        for field in ("hbm_bytes", "host_bytes", "disk_bytes"):
            value, least = getattr(self, field), int(field == "hbm_bytes")
            if value is not None and (not is_int(value) or value < least):
                raise MesetaError(f"topology: {field} must be an integer >= {least}, or None, got {value!r}")

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def is_one_cpu_host(self) -> bool:
        """Whether all ranks run on the CPUs of one host, so that the same cores compute and copy communicated data."""
        return self.device == "cpu" and self.num_hosts == 1

    def memory_bytes(self, memory: str) -> int | None:
        """Return the capacity of a memory, per device or per host. `None` means unknown, or that there is none."""
        return {HBM: self.hbm_bytes, HOST: self.host_bytes, DISK: self.disk_bytes}.get(memory)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Available tiers. For CPU ranks, `host` and `cached` use the same memory as `hbm`."""
        has_host = self.host_bytes or self.device == "cpu"
        return (HBM, *((HOST, CACHED) if has_host else ()), *((DISK,) if self.disk_bytes else ()))

    @property
    def has_shared_host_memory(self) -> bool:
        """Whether tables in host DRAM count towards device memory. True for CPU ranks with disk space for tables."""
        return self.device == "cpu" and bool(self.disk_bytes)

    @property
    def spill_tiers(self) -> tuple[Tier, ...]:
        """Available tiers that need less device memory than `hbm`, and `hbm` itself."""
        on_cpu: tuple[Tier, ...] = (HBM, DISK)
        return tuple(tier for tier in self.tiers if self.device != "cpu" or tier in on_cpu)

    def host_of(self, rank: int) -> int:
        return rank // self.devices_per_host

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for YAML. `from_dict` is the inverse."""
        document: dict[str, Any] = {"format": _FORMAT}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                document[field.name] = value.to_dict() if isinstance(value, Link) else value
        return document

    @staticmethod
    def from_dict(document: Mapping[Any, Any]) -> Topology:
        """Parse a topology. Raises MesetaError if a key is unknown, or a value or the format is invalid."""
        return parse_dataclass("topology", Topology, strip_format("topology", document, _FORMAT))

    @staticmethod
    def load(path: str | Path) -> Topology:
        """Load a topology from a YAML or JSON file. Raises MesetaError if it cannot be read or is invalid."""
        return load_document("topology", path, Topology.from_dict)

    def save(self, path: str | Path) -> None:
        """Write the topology to a YAML file."""
        write_yaml(path, self.to_dict())
