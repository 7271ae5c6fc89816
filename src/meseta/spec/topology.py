"""The machines that a plan is made for."""

from dataclasses import dataclass

from meseta.spec.errors import MesetaError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts with equal devices; one rank drives one device."""

    num_hosts: int = 1
    """Machines, for example 2."""
    devices_per_host: int = 1
    """Ranks on each machine, for example 8."""
    hbm_bytes: int | None = None
    """Memory of one device in bytes that tables may fill (on a CPU rank, its share of DRAM); None: not checked."""

    def __post_init__(self) -> None:
        for field in ("num_hosts", "devices_per_host"):
            if getattr(self, field) < 1:
                raise MesetaError(f"topology: {field} must be at least 1, got {getattr(self, field)}")
        if self.hbm_bytes is not None and self.hbm_bytes < 1:
            raise MesetaError(f"topology: hbm_bytes must be at least 1, or None for no check, got {self.hbm_bytes}")

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.devices_per_host
