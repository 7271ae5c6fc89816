"""What is compared: ways to exchange, and what a window of steps was like. Neither torch nor meseta is needed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meseta.spec.stages import OVERLAPS, Overlap


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How tables are cut, how numbers are written, and which way they take."""

    sharding: str = "table_wise"
    precision: str = "fp32"
    exchange: str = "flat"
    dense_path: str = ""
    """Of sums over ranks; empty: 'flat' beside a flat exchange, else 'cross_host'."""
    overlap: tuple[Overlap, ...] = ()
    """What is hidden behind computation."""
    accumulate_steps: int = 1
    """Micro-batches of a step."""
    stale: bool = False
    """Whether lookups are one update late."""

    @property
    def sum_path(self) -> str:
        """The same, always said."""
        return self.dense_path or ("flat" if self.exchange == "flat" else "cross_host")

    @property
    def name(self) -> str:
        """For people, and to tell it from others."""
        path = self.exchange + (f" {self.dense_path}" if self.dense_path else "")
        parts = f" in {self.accumulate_steps} parts" if self.accumulate_steps > 1 else ""
        hidden = "" if not self.overlap else " overlapped" if self.overlap == OVERLAPS else f" {'+'.join(self.overlap)}"
        return f"{self.sharding} {path} {self.precision}{parts}{hidden}{' stale' * self.stale}"

    @property
    def base(self) -> Variant:
        """What its steps are compared with."""
        return Variant(sharding=self.sharding)


@dataclass(frozen=True)
class Layout:
    """Hosts, and ranks of each."""

    hosts: int
    per_host: int

    @property
    def size(self) -> int:
        """All ranks."""
        return self.hosts * self.per_host

    def __str__(self) -> str:
        return f"{self.hosts} x {self.per_host}"


@dataclass(frozen=True)
class Window:
    """Some steps of one rank, between barriers."""

    num_steps: int
    seconds: float
    busy_s: float
    """In which its process had a processor."""
    waited_s: float
    """In which it stood still for transfers."""
    sent_bytes: int
    """That its host's link counted, without headers; 0 where there is none."""
    resent_packets: int
    across: Mapping[str, float]
    """Bytes to other hosts that it meant to send in a step, by transfer."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step in which it stood still for each transfer."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step in each stage."""
