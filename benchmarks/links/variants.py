"""Variants and measurements. Needs neither torch nor meseta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meseta.spec.stages import OVERLAPS, Overlap


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Sharding type, codec and exchange algorithm."""

    sharding: str = "table_wise"
    precision: str = "fp32"
    exchange: str = "flat"
    overlap: tuple[Overlap, ...] = ()
    accumulate_steps: int = 1
    stale: bool = False

    @property
    def sum_path(self) -> str:
        """Path of sums over ranks."""
        return "flat" if self.exchange == "flat" else "cross_host"

    @property
    def name(self) -> str:
        parts = f" in {self.accumulate_steps} parts" if self.accumulate_steps > 1 else ""
        hidden = "" if not self.overlap else " overlapped" if self.overlap == OVERLAPS else f" {'+'.join(self.overlap)}"
        return f"{self.sharding} {self.exchange} {self.precision}{parts}{hidden}{' stale' * self.stale}"

    @property
    def base(self) -> Variant:
        """Variant with which this one is compared."""
        return Variant(sharding=self.sharding)


@dataclass(frozen=True)
class Layout:
    """Number of hosts, and ranks per host."""

    hosts: int
    per_host: int

    @property
    def size(self) -> int:
        return self.hosts * self.per_host

    def __str__(self) -> str:
        return f"{self.hosts} x {self.per_host}"


@dataclass(frozen=True)
class Window:
    """Timed steps of one rank."""

    num_steps: int
    seconds: float
    busy_s: float
    """CPU seconds of the process."""
    waited_s: float
    """Seconds of waiting for transfers."""
    sent_bytes: int
    """Payload that the link of the host counted."""
    across: Mapping[str, float]
    """Bytes that this rank sent to other hosts per step, by transfer."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Seconds of waiting per step, by transfer."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step, by stage."""
