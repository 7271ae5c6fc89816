"""Timeouts after which a run with an unresponsive or stuck rank is stopped."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meseta.errors import MesetaError

HANG_EXIT_CODE = 76
"""Exit code of a command whose ranks were unresponsive or stuck."""
WARN_DELAY_S = 30.0
"""Maximum seconds that a rank waits before a warning is printed."""
# The run is stopped first, because its diagnosis says more than torch's timeout error.
TRANSPORT_GRACE_S = 120.0
"""Seconds added to `stall_timeout_s` for the timeout of torch's process groups."""
# Some of torch's timers count milliseconds in 32 bits.
MAX_TIMEOUT_S = 7 * 86400.0
"""Maximum of all timeouts."""


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Timeouts for ranks. Raises MesetaError if a timeout is out of range."""

    heartbeat_timeout_s: float = 15.0
    """Seconds without a heartbeat after which a rank is unresponsive. Heartbeats are sent every second."""
    stall_timeout_s: float = 600.0
    """Seconds in one transfer, or in one stage of a step, after which a run is stuck."""

    def __post_init__(self) -> None:
        for name, least_s in (("heartbeat_timeout_s", 2.0), ("stall_timeout_s", 1.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and least_s <= value <= MAX_TIMEOUT_S):
                raise MesetaError(f"comm: {name} must be in {least_s:g}..{MAX_TIMEOUT_S:,.0f} seconds, got {value!r}")

    @property
    def warn_delay_s(self) -> float:
        """Seconds that a rank waits before a warning is printed."""
        return min(WARN_DELAY_S, self.stall_timeout_s / 2)

    @property
    def transport_timeout_s(self) -> float:
        """Timeout of torch's process groups in seconds."""
        return self.stall_timeout_s + TRANSPORT_GRACE_S
