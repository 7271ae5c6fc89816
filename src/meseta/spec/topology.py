"""The machines that a plan is made for."""

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
    """What joins a device to the others of one level."""

    bytes_per_s: float
    """What one device sends while it receives as much, in bytes per second."""
    latency_s: float
    """Of one collective, in seconds."""
    peer_s: float = 0.0
    """Of each other rank that a rank meets in it over such links, on top, in seconds."""

    def __post_init__(self) -> None:
        if check_number("link", "bytes_per_s", self.bytes_per_s) <= 0:
            raise MesetaError(f"link: bytes_per_s must be above 0, got {self.bytes_per_s}")
        for name in ("latency_s", "peer_s"):
            if check_number("link", name, getattr(self, name)) < 0:
                raise MesetaError(f"link: {name} must not be negative, got {getattr(self, name)}")

    def to_dict(self) -> dict[str, float]:
        """Plain data; nothing of peers where they take nothing."""
        peers = {"peer_s": self.peer_s} if self.peer_s else {}
        return {"bytes_per_s": self.bytes_per_s, "latency_s": self.latency_s, **peers}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts with equal devices; one rank drives one device. Rank r is device r % devices_per_host of host
    r // devices_per_host."""

    num_hosts: int = 1
    """Machines, for example 2."""
    devices_per_host: int = 1
    """Ranks on each machine, for example 8."""
    device: DeviceKind = "cpu"
    """Kind of the devices; its documented constants stand for what was not measured."""
    hbm_bytes: int | None = None
    """Memory of one device in bytes (on a CPU rank, its share of DRAM); None: not checked."""
    host_bytes: int | None = None
    """DRAM of one host beside its devices that tables may fill, in bytes; None or 0: none. CPU ranks have theirs in
    `hbm_bytes`."""
    disk_bytes: int | None = None
    """Local disks of one host that tables may fill, in bytes; None or 0: none."""
    inside: Link | None = None
    """Between the devices of a host; None: as documented for the kind of device."""
    across: Link | None = None
    """Between hosts; None: as documented for the kind of device."""

    def __post_init__(self) -> None:
        check_choice("topology", "device", self.device, get_args(DeviceKind))
        for field in ("num_hosts", "devices_per_host"):
            value = getattr(self, field)
            if not is_int(value) or value < 1:
                raise MesetaError(f"topology: {field} must be at least 1, got {value!r}")
        if self.num_ranks > MAX_RANKS:
            raise MesetaError(
                f"topology: num_hosts {self.num_hosts} of devices_per_host {self.devices_per_host} are more than "
                f"{MAX_RANKS:,} ranks"
            )
        for field in ("hbm_bytes", "host_bytes", "disk_bytes"):
            value, least = getattr(self, field), int(field == "hbm_bytes")
            if value is not None and (not is_int(value) or value < least):
                raise MesetaError(f"topology: {field} must be at least {least}, or None for no check, got {value!r}")

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def is_one_cpu_host(self) -> bool:
        """Whether nothing leaves a host, and the processors that compute copy what travels in it."""
        return self.device == "cpu" and self.num_hosts == 1

    def memory_bytes(self, memory: str) -> int | None:
        """Of one device, or of one host: what the field says; None where it is no memory."""
        return {HBM: self.hbm_bytes, HOST: self.host_bytes, DISK: self.disk_bytes}.get(memory)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where tables may lie; 'host' and 'cached' of a CPU rank are its own memory."""
        has_host = self.host_bytes or self.device == "cpu"
        return (HBM, *((HOST, CACHED) if has_host else ()), *((DISK,) if self.disk_bytes else ()))

    @property
    def has_shared_host_memory(self) -> bool:
        """Whether what ranks hold in the DRAM of their hosts takes room of their devices: they compute there, and what
        has no room may lie on a disk."""
        return self.device == "cpu" and bool(self.disk_bytes)

    @property
    def spill_tiers(self) -> tuple[Tier, ...]:
        """Of these, those that take less of a device's memory than 'hbm'."""
        on_cpu: tuple[Tier, ...] = (HBM, DISK)
        return tuple(tier for tier in self.tiers if self.device != "cpu" or tier in on_cpu)

    def host_of(self, rank: int) -> int:
        """Number of the host that the rank's device sits in."""
        return rank // self.devices_per_host

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML; `from_dict` reads it back."""
        document: dict[str, Any] = {"format": _FORMAT}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                document[field.name] = value.to_dict() if isinstance(value, Link) else value
        return document

    @staticmethod
    def from_dict(document: Mapping[Any, Any]) -> Topology:
        """Read a topology. Raises MesetaError for an unknown key, a value that breaks its rule, or another format."""
        return parse_dataclass("topology", Topology, strip_format("topology", document, _FORMAT))

    @staticmethod
    def load(path: str | Path) -> Topology:
        """Read a YAML or JSON file; raises MesetaError as `from_dict` does, naming the file."""
        return load_document("topology", path, Topology.from_dict)

    def save(self, path: str | Path) -> None:
        """Write YAML."""
        write_yaml(path, self.to_dict())
