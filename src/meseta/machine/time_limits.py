"""How long the processes of a run wait for each other before it is ended."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meseta.errors import MesetaError

HANG_EXIT_CODE = 76
"""Exit code of a command that was ended because its ranks did not go on."""
WARN_DELAY_S = 30.0
"""A rank that has waited so long is told of, where it may wait that long."""
TRANSPORT_GRACE_S = 120.0
"""How much longer than `stall_timeout_s` torch waits: by then a run has ended, with more words than torch has."""
MAX_TIMEOUT_S = 7 * 86400.0
"""The longest limit: some of torch's clocks count milliseconds in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """When a rank counts as silent or stuck, in seconds. Raises MesetaError for limits that are none."""

    heartbeat_timeout_s: float = 15.0
    """Without a heartbeat, which comes each second."""
    stall_timeout_s: float = 600.0
    """Waiting for one and the same transfer, or in one stage of a step without any."""

    def __post_init__(self) -> None:
        for name, least_s in (("heartbeat_timeout_s", 2.0), ("stall_timeout_s", 1.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and least_s <= value <= MAX_TIMEOUT_S):
                raise MesetaError(f"comm: {name} must be in {least_s:g}..{MAX_TIMEOUT_S:,.0f} seconds, got {value!r}")

    @property
    def warn_delay_s(self) -> float:
        """When to warn."""
        return min(WARN_DELAY_S, self.stall_timeout_s / 2)

    @property
    def transport_timeout_s(self) -> float:
        """For torch, in every group."""
        return self.stall_timeout_s + TRANSPORT_GRACE_S
